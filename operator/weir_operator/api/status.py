"""The schema of the status: typed where people read it, open where the tuner keeps its state or another version may write more.

Whatever the operator writes is declared here, or `kubectl explain` would not know it; a test holds a whole status against it.
"""

from __future__ import annotations

from typing import Any

_CONDITION = {
    "type": "object",
    "description": "One aspect of the present state.",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": {"type": "string", "description": "Which aspect."},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it holds."},
        "reason": {"type": "string", "description": "Why, in one word of a closed catalogue."},
        "message": {"type": "string", "description": "Why, in a sentence."},
        "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When the status last changed."},
        "observedGeneration": {"type": "integer", "format": "int64", "description": "Of which spec this was said."},
    },
}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _integer(description: str) -> dict[str, Any]:
    return {"type": "integer", "format": "int32", "description": description}


def _number(description: str) -> dict[str, Any]:
    return {"type": "number", "description": description}


def _open(description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """An object that keeps what is not declared; without properties it is a place for anything."""
    found = {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "description": description}
    return {**found, "properties": properties} if properties else found


def _list(most: int | None, description: str, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", **({"maxItems": most} if most else {}), "description": description, "items": items}


def _knobs(description: str) -> dict[str, Any]:
    return _open(
        description,
        maxBatchSize=_integer("Rows that may run at once."),
        maxQueueDepth=_integer("Rows that may wait."),
        kvCacheBudget=_text("KV budget as a quantity."),
        admissionWatermarkPercent=_integer("Share of the KV budget kept free at admission."),
    )


_POD = _open(
    "One pod.",
    name=_text("The pod."),
    knobs=_knobs("Its knobs as read back."),
    outcome=_text("What came of the tuner's last look at it."),
)
_DECISION = _open(
    "One decision.",
    time=_text("When it was taken."),
    pod=_text("The pod that it was about; (all) where it was about their number."),
    rule=_text("The rule that held."),
    outcome=_text("What came of it."),
    reason=_text("Why, in a sentence."),
    changes=_open("By knob: what it was, and what it became."),
    predicted=_open("By figure: what was predicted of the setting."),
    observed=_open("By figure: what was observed of the decision before."),
)
_LEARNED = _open(
    "A setting that did well.",
    pods=_text("The class of pods that it holds for."),
    maxBatchSize=_integer("Rows that may run at once."),
    maxQueueDepth=_integer("Rows that may wait."),
    rowsPerSecond=_number("What one such pod serves within the objectives."),
    workload=_open(
        "The traffic that it holds for.",
        output=_number("Tokens that are generated for a request."),
        prefillPerToken=_number("Tokens prefilled for each that is generated."),
    ),
)
_TUNING = _open(
    "What the tuner does and why.",
    mode=_text("The mode in force, or Paused."),
    slo=_text("Share of recent requests that met both objectives, in whole percent."),
    knobs=_knobs("Effective values of the first pod, by name, that answers."),
    pods=_list(50, "Each pod's knobs as read back.", _POD),
    history=_list(20, "The last decisions, newest first.", _DECISION),
    learned=_list(None, "What did best for the workloads that were seen, newest first.", _LEARNED),
    ceilings=_list(None, "Batches that failed lately and are not tried again for a while.", _open(
        "The ceiling of one pod.",
        pod=_text("The pod."),
        maxBatchSize=_integer("Most rows that the tuner lets run at once."),
    )),
    replicas=_open(
        "What came of the last look at the number of pods, where the operator sets it.",
        outcome=_text("What came of it."),
        leaving=_list(None, "The pods that end first.", _text("A pod.")),
    ),
    proposal=_open(
        "A larger engine.limits.maxBatchSize that is predicted to serve better.",
        maxBatchSize=_integer("Most rows that may ever run at once."),
    ),
    envelope=_open(
        "What that limit has grown to, where tuning.envelope is Roll.",
        **{"from": _integer("The limit in the spec that it grew from.")},
        maxBatchSize=_integer("What pods are started with."),
        since=_text("When it last grew."),
    ),
    state=_open("What the tuner resumes from after a restart."),
)


def schema() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "What is true now, written by the operator.",
        "properties": {
            "observedGeneration": {"type": "integer", "format": "int64", "description": "The spec that this status is about."},
            "replicas": _integer("Pods that exist."),
            "desiredReplicas": _integer("Pods that are wanted now, whoever says so."),
            "readyReplicas": _integer("Pods that serve."),
            "selector": _text("Label selector of the pods, for the scale subresource."),
            "url": _text("Where clients inside the cluster send requests."),
            "model": _text("The id under /v1/models."),
            "operator": _text("The operator that serves it: its Lease's NAMESPACE or NAMESPACE/NAME."),
            "conditions": {
                "type": "array", "description": "The present state, aspect by aspect.", "items": _CONDITION,
                "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
            },
            "tuning": _TUNING,
        },
    }
