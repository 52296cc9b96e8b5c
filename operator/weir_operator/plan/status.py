"""What is true of one InferenceDeployment, from what was seen: counts, conditions, and the tuner's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weir_operator.api.conditions import Condition, merged
from weir_operator.api.types import InferenceDeployment
from weir_operator.plan.envelope import envelope_status
from weir_operator.plan.manifests import missing_kinds
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.pods import selector
from weir_operator.plan.replicas import desired_replicas, owner, wanted_replicas
from weir_operator.plan.sources import served_name
from weir_operator.plan.trouble import downloading, load_failure, troubles
from weir_operator.tuner.types import Outcome


def _ready(resource: InferenceDeployment, seen: Observed, wanted: int, ready: int, found: list[tuple[str, str]]) -> Condition:
    counted = f"{ready} of {wanted} pods serve"
    if seen.trouble:
        return seen.trouble
    if wanted == 0:
        return Condition("Ready", False, "ScaledToZero")
    if ready >= wanted:
        return Condition("Ready", True, "Serving", counted)
    if found:
        return Condition("Ready", False, found[0][0], f"{counted}; {found[0][1]}")
    return Condition("Ready", False, "SomePodsUnready" if ready else "Starting", counted)


def _progressing(seen: Observed, wanted: int, ready: int, found: list[tuple[str, str]]) -> Condition:
    """Of the present template: counts of the one before say nothing. A rollout that is stuck leaves the old pods alone."""
    deployment, words = seen.deployment or {}, found[0][1] if found else ""
    status = deployment.get("status", {})
    rollout = {c.get("type"): c for c in status.get("conditions") or []}.get("Progressing", {})
    current = seen.applied and status.get("observedGeneration", 0) >= deployment.get("metadata", {}).get("generation", 0)
    if current and rollout.get("reason") == "ProgressDeadlineExceeded":
        old = max(0, status.get("replicas", 0) - status.get("updatedReplicas", 0))
        said = f"{old} pods of the template before go on; {words or str(rollout.get('message', ''))}"
        return Condition("Progressing", False, "DeadlineExceeded", said)
    updated = status.get("updatedReplicas", 0) >= wanted and status.get("replicas", 0) <= wanted and ready >= wanted
    if current and updated and seen.deployment is not None:
        return Condition("Progressing", False, "Complete")
    return Condition("Progressing", True, "RollingOut", words)


def _loaded(seen: Observed, ready: int, found: list[tuple[str, str]]) -> Condition:
    if ready:
        return Condition("ModelLoaded", True, "Loaded")
    if words := load_failure(seen.pods):
        return Condition("ModelLoaded", False, "LoadFailed", words)
    if failed := [words for reason, words in found if reason == "DownloadFailed"]:
        return Condition("ModelLoaded", False, "DownloadFailed", failed[0])
    return Condition("ModelLoaded", False, "Downloading" if downloading(seen.pods) else "Loading")


def _contested(seen: Observed) -> Condition:
    if not seen.other_operator:
        return Condition("Contested", False, "OneOperator")
    said = f"The operator of {seen.other_operator} asks for this resource, too. Give each namespaces of its own."
    return Condition("Contested", True, "OtherOperator", said)


def _integrations(resource: InferenceDeployment, seen: Observed) -> Condition:
    if lacking := missing_kinds(resource, seen):
        lack = f"The cluster has no {' and no '.join(lacking)}: install what brings it, or do not ask for it."
        return Condition("IntegrationsReady", False, "KindMissing", lack)
    if seen.refused:
        return Condition("IntegrationsReady", False, "Refused", seen.refused)
    return Condition("IntegrationsReady", True, "Complete")


def _counts(seen: Observed) -> dict[str, int]:
    return {name: (seen.deployment or {}).get("status", {}).get(name, 0) for name in ("replicas", "readyReplicas")}


def _pods(seen: Observed, wanted: int, found: list[tuple[str, str]]) -> list[Condition]:
    """What is seen of pods whatever the spec says now. `wanted`: how many there are to be; `found`: their troubles."""
    ready = _counts(seen)["readyReplicas"]
    missing = wanted > 0 and ready < wanted
    counted = f"{ready} of {wanted} pods serve" if missing else ""
    return [
        Condition("Available", ready > 0, "PodsServing" if ready else "NoPodServes"),
        _progressing(seen, wanted, ready, found),
        Condition("Degraded", missing, "PodsMissing" if missing else "AllPodsServe", counted),
        _loaded(seen, ready, found),
        _contested(seen),
    ]


def _workload(resource: InferenceDeployment, seen: Observed) -> list[Condition]:
    wanted, found = wanted_replicas(resource, seen), troubles(seen.pods, seen.now)
    return [
        _ready(resource, seen, wanted, _counts(seen)["readyReplicas"], found),
        *_pods(seen, wanted, found),
        owner(resource, seen),
        _integrations(resource, seen),
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
        goal = resource.spec.slo.percentile
        met = report.good_percent >= goal
        slo = Condition("SLOMet", met, "Met" if met else "Missed", f"The goal is {goal} % of recent requests.")
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
    meta = resource.metadata
    conditions = [*_workload(resource, seen), *_traffic(resource, seen.tuning)]
    out: dict[str, Any] = {
        "observedGeneration": meta.generation,
        **_counts(seen),
        "desiredReplicas": desired_replicas(resource, seen),
        "selector": ",".join(f"{k}={v}" for k, v in sorted(selector(resource).items())),
        "url": f"http://{meta.name}.{meta.namespace}.svc:{resource.spec.service.port}",
        "model": served_name(resource.spec.model),
        "conditions": merged(conditions, resource.status.get("conditions", ()), meta.generation, seen.now),
    }
    tuning = seen.tuning.status if seen.tuning else resource.status.get("tuning")
    if tuning is not None:
        rolled_out = any(c.type == "Progressing" and c.reason == "Complete" for c in conditions)
        envelope = envelope_status(resource, seen, rolled_out)
        out["tuning"] = {**{k: v for k, v in tuning.items() if k != "envelope"}, **({"envelope": envelope} if envelope else {})}
    return out


def invalid_status(raw: Mapping[str, Any], trouble: Condition, seen: Observed) -> dict[str, Any]:
    """Status of a resource whose spec this operator cannot read: its pods as they are, and in Ready which field it is. What
    takes a spec to say stays as it was, of the spec that it was said of. Without a Deployment no rollout is told of."""
    before, generation = raw.get("status") or {}, raw["metadata"].get("generation", 0)
    wanted = (seen.deployment or {}).get("spec", {}).get("replicas", before.get("desiredReplicas", 0))
    said = [trouble, *_pods(seen, wanted, troubles(seen.pods, seen.now))]
    known = before.get("conditions", ())
    kept = [c for c in known if c.get("type") not in {c.type for c in said}]
    if seen.deployment is None:
        said = [c for c in said if c.type != "Progressing"]
    return {
        **before,
        **_counts(seen),
        "observedGeneration": generation,
        "conditions": merged(said, known, generation, seen.now) + kept,
    }
