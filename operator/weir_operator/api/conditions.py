"""Conditions and their reasons: a closed catalogue, each entry with the sentence that documents it.

`condition()` is the only maker of conditions, so a reason outside the catalogue cannot reach a status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CATALOGUE: Mapping[str, Mapping[str, str]] = {
    "Ready": {
        "Serving": "Every wanted pod serves.",
        "ScaledToZero": "No pod is wanted.",
        "Starting": "Pods are on their way, none failed.",
        "SomePodsUnready": "Some wanted pods do not serve.",
        "ImagePullFailed": "A node cannot fetch the image: check spec.image and the registry's credentials.",
        "CrashLooping": "The server exits again and again; the message has its last words.",
        "OutOfMemory": "A container was killed at its memory limit: raise it, or lower engine.limits.",
        "Unschedulable": "No node has room or fits the pod's demands: make room, or change the requests in spec.template.",
        "VolumeNotReady": "The claim that the model lies on cannot be used yet: check that it exists and is bound.",
        "ConfigError": "A container cannot be created as configured: check the Secrets and volumes that the spec names.",
        "DownloadFailed": "The model cannot be downloaded; the message has the download's own sentence. It is tried again.",
        "ProbeFailing": "A server runs and does not answer its readiness probe: look at its log and at its CPU time.",
        "SpecInvalid": "The spec cannot be used; the message names the field.",
        "ApplyRefused": "The API server refused an object; the message is its own.",
        "NameTaken": "An object of a name that Weir needs belongs to somebody else; Weir goes on when it is gone.",
    },
    "Available": {"PodsServing": "At least one pod serves.", "NoPodServes": "No pod serves."},
    "Progressing": {
        "RollingOut": "Pods of the present template are being made.",
        "Complete": "Every pod has the present template.",
        "DeadlineExceeded": (
            "The rollout made no progress for its whole deadline and has stopped; pods of the template before go on. Correct "
            "the spec, or put the one before back."
        ),
    },
    "Degraded": {"AllPodsServe": "Nothing is missing.", "PodsMissing": "Fewer pods serve than are wanted."},
    "ModelLoaded": {
        "Loaded": "A pod has loaded the model.",
        "Downloading": "The model is being downloaded; the log of the container `fetch` shows how far it is.",
        "Loading": "No pod has loaded the model yet.",
        "DownloadFailed": "The model cannot be downloaded; the message says why.",
        "LoadFailed": "The server ended while loading; the message has its last words.",
    },
    "AutoscalerOwned": {
        "OnDeployment": "An autoscaler on the Deployment sets the number of pods; spec.replicas is not read.",
        "BySpec": "spec.replicas is the number of pods; autoscalers whose target is this resource write it there.",
        "ByOperator": "The operator sets the number of pods, status.desiredReplicas; spec.replicas is not read.",
        "AtMaximum": "The operator sets the number of pods, and more are needed than autoscaling.maxReplicas allows.",
        "CapacityUnknown": (
            "The operator sets the number of pods and holds it: too few pods answer, or nothing is known of what one can do."
        ),
        "AnotherOnDeployment": (
            "An autoscaler that Weir did not make has the Deployment as its target. It sets the number of pods, whatever "
            "autoscaling.mode says, until it is deleted: set the mode to External to keep it."
        ),
        "AnotherOnResource": (
            "The operator sets the number of pods. An autoscaler that has the resource as its target writes spec.replicas "
            "without effect: delete it, or set autoscaling.mode to Disabled."
        ),
        "FixedHere": "Local mode starts a fixed number of servers: nothing on this machine spreads requests over more.",
    },
    "Contested": {
        "OneOperator": "No other operator asks for this resource.",
        "OtherOperator": (
            "Another operator serves this namespace, too. The one that status.operator names goes on, the other leaves this "
            "resource alone and asks again every ten minutes: give each namespaces of its own, or remove one."
        ),
    },
    "IntegrationsReady": {
        "Complete": "Whatever the spec asks for beside the pods is made: a budget, scalers, monitors.",
        "KindMissing": "The spec asks for an object of a kind that the cluster lacks; it is made as soon as the kind is there.",
        "Refused": "A budget, scaler or monitor cannot be made; pods serve all the same, and it is tried again.",
    },
    "MetricsAvailable": {
        "Polled": "Every ready pod answers on its control port.",
        "SomePodsSilent": "Some ready pods do not answer on their control port.",
        "NoPodAnswers": "No ready pod answers on its control port: nothing is raised.",
        "NoPods": "There is no ready pod to ask.",
    },
    "SLOMet": {
        "Met": "Enough of the recent requests met both objectives.",
        "Missed": "Fewer of the recent requests than slo.percentile met both objectives.",
        "NoObjectives": "spec.slo is not set, and no preset.",
        "NoTraffic": "Too few requests finished to say.",
    },
    "Tuned": {
        "Holding": "The tuner sees no better setting.",
        "Moving": "A move is on its way or being judged.",
        "GatheringEvidence": "There is not enough traffic, or not yet, to decide on.",
        "Advising": "Advise: moves are recorded, not made.",
        "Frozen": "The tuner makes no moves now; the message says why.",
        "Mispredicted": "Predictions failed: the last verified setting is held.",
        "KnobDrift": "A knob that was set does not read back.",
    },
    "Saturated": {
        "Refusing": "Rows are refused with a 503.",
        "NotRefusing": "No row was refused lately.",
    },
    "Paused": {"BySpec": "spec.tuning.paused is true.", "NotPaused": "Tuning is not paused."},
    "KnobsUnsupported": {
        "Supported": "The pods' control API is of this operator's version.",
        "OtherContract": "A pod's control API has another major version: its knobs are left alone.",
    },
}


MAX_MESSAGE = 1024
"""Characters: some messages name every pod, and a status must stay small."""


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: bool | None  # None = Unknown
    reason: str
    message: str = ""

    def __post_init__(self) -> None:
        if self.reason not in CATALOGUE[self.type]:
            raise KeyError(f"{self.type}: {self.reason} is not in the catalogue")

    def to_json(self, generation: int, since: str) -> dict[str, Any]:
        return {
            "type": self.type,
            "status": {True: "True", False: "False", None: "Unknown"}[self.status],
            "reason": self.reason,
            "message": self.message[:MAX_MESSAGE] or CATALOGUE[self.type][self.reason],
            "lastTransitionTime": since,
            "observedGeneration": generation,
        }


def reference() -> str:
    """The catalogue as a page of documentation."""
    lines = ["# Conditions", "", "Generated by `make generate` from `operator/weir_operator/api/conditions.py`.", ""]
    for kind, reasons in CATALOGUE.items():
        lines += [f"## {kind}", "", "| reason | meaning |", "|---|---|"]
        lines += [f"| `{reason}` | {text} |" for reason, text in reasons.items()] + [""]
    return "\n".join(lines)


def merged(
    conditions: Iterable[Condition], previous: Iterable[Mapping[str, Any]], generation: int, now: str,
) -> list[dict[str, Any]]:
    """The status list. `lastTransitionTime` moves only when a status flips, so an unchanged state is an unchanged list."""
    before = {c.get("type"): c for c in previous}
    out = []
    for condition in conditions:
        fresh = condition.to_json(generation, now)
        old = before.get(condition.type)
        if old and old.get("status") == fresh["status"] and old.get("lastTransitionTime"):
            fresh["lastTransitionTime"] = old["lastTransitionTime"]
        out.append(fresh)
    return out
