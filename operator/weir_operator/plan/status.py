"""What is true of one InferenceDeployment, from what was seen: counts, conditions, and the tuner's report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir_operator.api.conditions import Condition, merged
from weir_operator.api.types import InferenceDeployment
from weir_operator.plan.args import served_name
from weir_operator.plan.manifests import selector
from weir_operator.tuner.types import Outcome
from weir_server.contract import HTTP_PORT

ATTAINMENT_GOAL = 95
"""Percent of requests that must meet both objectives for SLOMet."""


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What the tuner loop says of one deployment. `status` goes into status.tuning as it is."""

    status: Mapping[str, Any]
    ready: int  # pods that should answer
    answering: int
    silent: Mapping[str, str] = field(default_factory=dict)  # pod → why its last poll failed
    good_percent: int | None = None  # of the requests that finished lately; None: too few
    refusing: bool = False
    outcome: Outcome | None = None  # the least settled of the pods' outcomes at the last tick
    reason: str = ""
    drift: str = ""
    other_contract: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a plan may know besides the resource. Objects are as the API server gave them."""

    now: str  # RFC 3339
    deployment: Mapping[str, Any] | None = None
    pods: Sequence[Mapping[str, Any]] = ()
    trouble: Condition | None = None  # NameTaken or ApplyRefused, from the last pass
    applied: bool = True  # whether the last pass left every child as planned
    tuning: TuningReport | None = None


_WAITING = {
    "ErrImagePull": "ImagePullFailed", "ImagePullBackOff": "ImagePullFailed", "InvalidImageName": "ImagePullFailed",
    "ErrImageNeverPull": "ImagePullFailed", "CrashLoopBackOff": "CrashLooping",
    "CreateContainerConfigError": "ConfigError", "CreateContainerError": "ConfigError", "RunContainerError": "ConfigError",
}


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Ready, and not on its way out."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return ready and not pod["metadata"].get("deletionTimestamp")


def is_running(pod: Mapping[str, Any]) -> bool:
    """Its processes run, and it is not on its way out."""
    return pod.get("status", {}).get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def pod_trouble(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """(reason of Ready, sentence) for a pod that cannot serve as things are; None where it serves or is on its way."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for c in status.get("conditions") or []:
        if c.get("type") == "PodScheduled" and c.get("reason") == "Unschedulable":
            return "Unschedulable", f"{name}: {c.get('message', 'no node fits')}"
    statuses = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in statuses:
        waiting = container.get("state", {}).get("waiting") or {}
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
        if container.get("ready") or not (waiting or ended):
            continue
        if ended.get("reason") == "OOMKilled":
            return "OutOfMemory", f"{name}: container {container['name']} was killed at its memory limit"
        reason = _WAITING.get(waiting.get("reason", "")) or ("CrashLooping" if ended.get("exitCode") else None)
        if reason:
            words = (ended.get("message") or waiting.get("message") or waiting.get("reason") or "").strip()
            last = words.splitlines()[-1] if words else f"exit code {ended.get('exitCode')}"
            return reason, f"{name}: {waiting.get('reason') or 'ended'}: {last}"[:1000]
    return None


def _load_failure(pods: Iterable[Mapping[str, Any]]) -> str | None:
    """Last words of a server that ended with status 2, which is how it says that what it was given cannot be loaded."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses") or []:
            for state in (container.get("state", {}), container.get("lastState", {})):
                ended = state.get("terminated") or {}
                if ended.get("exitCode") == 2 and not container.get("ready"):
                    return str((ended.get("message") or "the server ended with status 2").strip().splitlines()[-1])[:1000]
    return None


def _workload(resource: InferenceDeployment, seen: Observed) -> list[Condition]:
    wanted = resource.spec.replicas
    found, deployment = seen.deployment or {}, (seen.deployment or {}).get("status", {})
    ready = deployment.get("readyReplicas", 0)
    troubles = sorted(t for pod in seen.pods if not is_ready(pod) and (t := pod_trouble(pod)))
    counted = f"{ready} of {wanted} pods serve"
    if seen.trouble:
        first = seen.trouble
    elif wanted == 0:
        first = Condition("Ready", False, "ScaledToZero")
    elif ready >= wanted:
        first = Condition("Ready", True, "Serving", counted)
    elif troubles:
        first = Condition("Ready", False, troubles[0][0], f"{counted}; {troubles[0][1]}")
    else:
        first = Condition("Ready", False, "SomePodsUnready" if ready else "Starting", counted)
    rollout = {c.get("type"): c for c in deployment.get("conditions") or []}.get("Progressing", {})
    current = seen.applied and deployment.get("observedGeneration", 0) >= found.get("metadata", {}).get("generation", 0)
    updated = deployment.get("updatedReplicas", 0) >= wanted and deployment.get("replicas", 0) <= wanted and ready >= wanted
    if rollout.get("reason") == "ProgressDeadlineExceeded":
        progressing = Condition("Progressing", False, "DeadlineExceeded", str(rollout.get("message", "")))
    elif current and updated and seen.deployment is not None:
        progressing = Condition("Progressing", False, "Complete")
    else:
        progressing = Condition("Progressing", True, "RollingOut")
    missing = wanted > 0 and ready < wanted
    if ready:
        loaded = Condition("ModelLoaded", True, "Loaded")
    elif words := _load_failure(seen.pods):
        loaded = Condition("ModelLoaded", False, "LoadFailed", words)
    else:
        loaded = Condition("ModelLoaded", False, "Loading")
    return [
        first,
        Condition("Available", ready > 0, "PodsServing" if ready else "NoPodServes"),
        progressing,
        Condition("Degraded", missing, "PodsMissing" if missing else "AllPodsServe", counted if missing else ""),
        loaded,
    ]


_TUNED = {
    Outcome.MOVED: "Moving", Outcome.REVERTED: "Moving", Outcome.SETTLING: "Moving", Outcome.CONFIRMING: "Moving",
    Outcome.WAITING: "Moving",
    Outcome.DRAIN_OVERDUE: "Moving", Outcome.INCONCLUSIVE: "Holding", Outcome.HOLDING: "Holding", Outcome.ADVISED: "Advising",
    Outcome.WARMING: "GatheringEvidence", Outcome.INSUFFICIENT_DATA: "GatheringEvidence", Outcome.IDLE: "GatheringEvidence",
    Outcome.NO_OBJECTIVES: "Frozen", Outcome.STALE_METRICS: "Frozen", Outcome.FROZEN: "Frozen",
    Outcome.MISPREDICTED: "Mispredicted", Outcome.NOT_SET: "Frozen",
}


def _tuned(resource: InferenceDeployment, report: TuningReport | None) -> Condition:
    if report and report.drift:
        return Condition("Tuned", False, "KnobDrift", report.drift)
    if resource.spec.tuning.mode == "Disabled":
        return Condition("Tuned", False, "Frozen", "spec.tuning.mode is Disabled.")
    if resource.spec.tuning.paused:
        return Condition("Tuned", False, "Frozen", "spec.tuning.paused is true.")
    if not resource.spec.slo:
        return Condition("Tuned", False, "Frozen", "spec.slo is not set: there is no objective to tune for.")
    if report is None or report.outcome is None:
        return Condition("Tuned", None, "GatheringEvidence")
    reason = _TUNED[report.outcome]
    if resource.spec.tuning.mode == "Advise" and reason in ("Moving", "Holding"):
        reason = "Advising"
    return Condition("Tuned", reason == "Holding", reason, report.reason if reason == "Frozen" else "")


def _traffic(resource: InferenceDeployment, report: TuningReport | None) -> list[Condition]:
    if not report or not report.ready:
        metrics = Condition("MetricsAvailable", None, "NoPods")
    elif report.answering == report.ready:
        metrics = Condition("MetricsAvailable", True, "Polled")
    else:
        causes = "; ".join(f"{pod}: {why}" for pod, why in sorted(report.silent.items())[:3])
        metrics = Condition("MetricsAvailable", False, "SomePodsSilent" if report.answering else "NoPodAnswers", causes)
    if not resource.spec.slo:
        slo = Condition("SLOMet", None, "NoObjectives")
    elif not report or report.good_percent is None:
        slo = Condition("SLOMet", None, "NoTraffic")
    else:
        met = report.good_percent >= ATTAINMENT_GOAL
        slo = Condition("SLOMet", met, "Met" if met else "Missed")
    refusing, other = bool(report and report.refusing), report.other_contract if report else ()
    paused = resource.spec.tuning.paused
    return [
        metrics,
        slo,
        _tuned(resource, report),
        Condition("Saturated", refusing, "Refusing" if refusing else "NotRefusing"),
        Condition("Paused", paused, "BySpec" if paused else "NotPaused"),
        Condition("KnobsUnsupported", bool(other), "OtherContract" if other else "Supported", ", ".join(other)),
    ]


def status(resource: InferenceDeployment, seen: Observed) -> dict[str, Any]:
    """The whole status. Equal observations give an equal status, so an unchanged one is never written."""
    meta, deployment = resource.metadata, (seen.deployment or {}).get("status", {})
    conditions = [*_workload(resource, seen), *_traffic(resource, seen.tuning)]
    out: dict[str, Any] = {
        "observedGeneration": meta.generation,
        "replicas": deployment.get("replicas", 0),
        "readyReplicas": deployment.get("readyReplicas", 0),
        "selector": ",".join(f"{k}={v}" for k, v in sorted(selector(resource).items())),
        "url": f"http://{meta.name}.{meta.namespace}.svc:{HTTP_PORT}",
        "model": served_name(resource.spec),
        "conditions": merged(conditions, resource.status.get("conditions", ()), meta.generation, seen.now),
    }
    tuning = seen.tuning.status if seen.tuning else resource.status.get("tuning")
    if tuning is not None:
        out["tuning"] = tuning
    return out


def invalid_status(raw: Mapping[str, Any], trouble: Condition, now: str) -> dict[str, Any]:
    """Status of a resource whose spec this operator cannot read: what was there, with Ready saying which field it is."""
    before, generation = raw.get("status") or {}, raw["metadata"].get("generation", 0)
    kept = [c for c in before.get("conditions", ()) if c.get("type") != trouble.type]
    return {
        **before,
        "observedGeneration": generation,
        "conditions": merged([trouble], before.get("conditions", ()), generation, now) + kept,
    }
