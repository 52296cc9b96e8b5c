"""What keeps a pod from serving, in the pod's own words, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weir_operator.api import names
from weir_operator.api.quantity import parse_time

Pod = Mapping[str, Any]
NEVER_READY_SECONDS = 600.0
"""A server that runs for so long and was never ready is said to fail its probe."""

_WAITING = {
    "ErrImagePull": "ImagePullFailed", "ImagePullBackOff": "ImagePullFailed", "InvalidImageName": "ImagePullFailed",
    "ErrImageNeverPull": "ImagePullFailed", "ImageInspectError": "ImagePullFailed", "RegistryUnavailable": "ImagePullFailed",
    "CrashLoopBackOff": "CrashLooping", "CreateContainerConfigError": "ConfigError", "CreateContainerError": "ConfigError",
    "RunContainerError": "ConfigError",
}
ADVICE = {
    "ImagePullFailed": "check spec.image and, for a private registry, template.spec.imagePullSecrets",
    "CrashLooping": "see `kubectl logs --previous`",
    "OutOfMemory": "raise the container's memory limit in spec.template, or lower engine.limits.kvCache or maxBatchSize",
    "Unschedulable": "make room, or change the requests, node selection or tolerations in spec.template",
    "ConfigError": "check what spec.template, spec.auth and model.secretRef name",
    "DownloadFailed": "check model.source, model.secretRef and the way out of the cluster; it is tried again",
    "ProbeFailing": "see `kubectl logs`; a server without CPU time answers too late",
    "VolumeNotReady": "check the claim that the model lies on",
}
_ORDER = ("OutOfMemory", "DownloadFailed", "CrashLooping", "ImagePullFailed", "ConfigError", "VolumeNotReady", "Unschedulable",
          "ProbeFailing")
"""What is said where pods suffer from different things: what happened inside a pod before what keeps it from starting."""


def is_over(pod: Pod) -> bool:
    """It serves no more, whatever comes: on its way out, or evicted, say, and listed still while another takes its place."""
    return bool(pod["metadata"].get("deletionTimestamp")) or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Pod) -> bool:
    """Ready, and not on its way out."""
    return _condition(pod, "Ready").get("status") == "True" and not is_over(pod)


def is_running(pod: Pod) -> bool:
    """Its processes run, and it is not on its way out."""
    return pod.get("status", {}).get("phase") == "Running" and not is_over(pod)


def _condition(pod: Pod, kind: str) -> Mapping[str, Any]:
    found: Iterable[Mapping[str, Any]] = pod.get("status", {}).get("conditions") or ()
    return next((c for c in found if c.get("type") == kind), {})


def containers(pod: Pod) -> Iterator[Mapping[str, Any]]:
    """Statuses, in the order in which containers start."""
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def last_words(container: Mapping[str, Any]) -> str:
    """The last line that an ended container wrote, else what the kubelet says of it."""
    ended, waiting = _ended(container), container.get("state", {}).get("waiting") or {}
    words = str(ended.get("message") or waiting.get("message") or waiting.get("reason") or "").strip()
    return words.splitlines()[-1][:600] if words else f"exit code {ended.get('exitCode')}"


def _ended(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """How it ended, until it has started again: from then on that is over. Until then it is why the pod does not serve, and the
    same is said whether the kubelet waits or tries once more."""
    state = container.get("state", {})
    before = {} if "running" in state and container.get("started") else container.get("lastState", {})
    return state.get("terminated") or before.get("terminated") or {}


def pod_trouble(pod: Pod, now: str) -> tuple[str, str] | None:
    """(reason of Ready, words) for a pod that cannot serve as things are; None where it serves, is on its way, or is over."""
    if is_over(pod) or is_ready(pod):
        return None
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("reason") == "Unschedulable":
        words = str(scheduled.get("message") or "no node fits")
        return "VolumeNotReady" if "persistentvolumeclaim" in words.lower() else "Unschedulable", words
    found = (_container_trouble(container, _condition(pod, "Ready"), now) for container in containers(pod))
    return next((trouble for trouble in found if trouble), None)


def _said(pod: Pod, reason: str, words: str) -> tuple[str, str]:
    return reason, f"{pod['metadata']['name']}: {words.rstrip('.')[:700]}; {ADVICE[reason]}"


def _container_trouble(container: Mapping[str, Any], ready: Mapping[str, Any], now: str) -> tuple[str, str] | None:
    name, state = container["name"], container.get("state", {})
    waiting, running, ended = state.get("waiting") or {}, state.get("running") or {}, _ended(container)
    if container.get("ready") or not (waiting or running or ended):
        return None
    if ended.get("reason") == "OOMKilled":
        return "OutOfMemory", f"container {name} was killed at its memory limit"
    if name == names.DOWNLOADER and ended.get("exitCode"):
        return "DownloadFailed", last_words(container)
    reason = _WAITING.get(str(waiting.get("reason", ""))) or ("CrashLooping" if ended.get("exitCode") else None)
    if reason:
        return reason, f"container {name}: {waiting.get('reason') or 'ended'}: {last_words(container)}"
    if running and container.get("started") and name == names.CONTAINER:
        began, lost = running.get("startedAt"), ready.get("lastTransitionTime")
        if began and lost and ready.get("status") == "False" and _seconds(began, lost) > 0:
            return "ProbeFailing", f"container {name} was ready and no longer answers its readiness probe"
        if began and _seconds(began, now) > NEVER_READY_SECONDS:
            return "ProbeFailing", f"container {name} runs and has never answered its readiness probe"
    return None


def _seconds(since: str, until: str) -> float:
    return (parse_time(until) - parse_time(since)).total_seconds()


def troubles(pods: Iterable[Pod], now: str) -> list[tuple[str, str]]:
    """Every pod's trouble in a sentence, the most telling first."""
    found = [_said(pod, *t) for pod in pods if (t := pod_trouble(pod, now))]
    return sorted(found, key=lambda t: (_ORDER.index(t[0]), t[1]))


def load_failure(pods: Iterable[Pod]) -> str | None:
    """Last words of a server that ended with status 2, which is how it says that what it was given cannot be loaded."""
    for container in (c for pod in pods if not is_over(pod) for c in containers(pod)):
        ended = _ended(container)
        if container["name"] == names.CONTAINER and not container.get("ready") and ended.get("exitCode") == 2:
            return str((ended.get("message") or "the server ended with status 2").strip().splitlines()[-1])[:1000]
    return None


def downloading(pods: Iterable[Pod]) -> bool:
    """Whether a pod fetches the model now."""
    return any(
        c["name"] == names.DOWNLOADER and c.get("state", {}).get("running")
        for pod in pods if not is_over(pod) for c in containers(pod)
    )
