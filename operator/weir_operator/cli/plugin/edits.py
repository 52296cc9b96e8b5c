"""The changes that the plugin makes in its user's name. Each is an edit of the spec: what a GitOps tool sees, and can revert.

`tuning rollback` pins knobs to what they were before the last move: min = initial = max, so the tuner's own rule of bounds
brings every pod there and holds it, and no second writer of knobs is needed. What the bounds were is kept in an annotation,
from which `tuning release` restores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weir_operator.api import names
from weir_operator.api.knobs import ENDS
from weir_operator.cli.plugin.api import Api
from weir_operator.cli.plugin.texts import tuning_of
from weir_operator.io.apply import Writer

MANAGER = "kubectl-infd"
BEFORE = f"{names.GROUP}/bounds-before-rollback"
FIELDS = {
    "max_batch_size": "maxBatchSize", "max_queue_depth": "maxQueueDepth", "kv_cache_budget": "kvCacheBudget",
    "admission_watermark": "admissionWatermarkPercent",
}
"""The contract's knobs by the manifest's names."""
_MOVES = ("Moved", "Reverted")


class NothingToDo(Exception):
    """The text says why."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A merge patch of the spec and of annotations, and what it does in a sentence."""

    spec: dict[str, Any]
    annotations: dict[str, str | None]
    says: str


def to_rollback(raw: Mapping[str, Any]) -> Edit:
    """Pin the knobs of the newest move to what they were before it. Raises NothingToDo."""
    move = next((h for h in tuning_of(raw).get("history", ()) if h["outcome"] in _MOVES and h.get("changes")), None)
    if move is None:
        raise NothingToDo("the status tells of no move")
    before = {FIELDS[knob]: in_manifest(knob, values[0]) for knob, values in move["changes"].items()}
    known, now = _pinned(raw), _knobs(raw)
    saved = {field: known.get(field, {end: (now.get(field) or {}).get(end) for end in ENDS}) for field in before}
    spec = {"tuning": {"knobs": {field: dict.fromkeys(ENDS, value) for field, value in before.items()}}}
    told = ", ".join(f"{field} {value}" for field, value in before.items())
    return Edit(
        spec, {BEFORE: json.dumps({**known, **saved}, sort_keys=True)},
        f"pinned to {told}, as before the move of {move['pod']} at {move['time']}; tuning release lets them move again",
    )


def to_release(raw: Mapping[str, Any]) -> Edit:
    """Restore the bounds that a rollback replaced. Raises NothingToDo."""
    known = _pinned(raw)
    if not known:
        raise NothingToDo("no knob is pinned")
    return Edit({"tuning": {"knobs": known}}, {BEFORE: None}, f"released: {', '.join(known)}")


def in_manifest(knob: str, value: float) -> int | str:
    """A knob's value as a manifest has it: rows, whole percent, bytes as a quantity."""
    if knob == "admission_watermark":
        return round(value * 100)
    return str(int(value)) if knob == "kv_cache_budget" else int(value)


def _knobs(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return (raw["spec"].get("tuning") or {}).get("knobs") or {}


def _pinned(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Field → the bounds that were declared before it was pinned; null where none was. Someone else's edit of the annotation is
    no pin of ours."""
    try:
        found = json.loads((raw["metadata"].get("annotations") or {}).get(BEFORE) or "{}")
        return {f: {end: found[f].get(end) for end in ENDS} for f in FIELDS.values() if f in found}
    except (ValueError, AttributeError, TypeError):
        return {}


async def make(api: Api, namespace: str, name: str, edit: Edit) -> None:
    """Raises ApiError: the API server's own sentence where the spec may not be so."""
    await Writer(api).patch_spec(namespace, name, edit.spec, MANAGER, edit.annotations)


# ---------------------------------------------------------------- earlier specs

@dataclass(frozen=True, slots=True)
class Revision:
    """A spec that pods were made from. `number`: the Deployment's revision."""

    number: int
    created: str
    spec: dict[str, Any]


async def revisions(api: Api, namespace: str, name: str) -> list[Revision]:
    """Newest first, from the annotations that a Deployment hands to its ReplicaSets."""
    found = []
    for rs in await api.list("ReplicaSet", namespace, f"{names.OWNER_LABEL}={name}"):
        notes = rs["metadata"].get("annotations") or {}
        try:
            number, spec = int(notes["deployment.kubernetes.io/revision"]), json.loads(notes[names.SPEC_ANNOTATION])
        except (KeyError, ValueError):
            continue
        found.append(Revision(number, rs["metadata"]["creationTimestamp"], spec))
    return sorted(found, key=lambda r: -r.number)


def restored(raw: Mapping[str, Any], revision: Revision) -> dict[str, Any]:
    """The revision's spec with today's number of pods and today's autoscaling: a rollback of pods must not scale them."""
    kept = {k: v for k, v in revision.spec.items() if k not in ("replicas", "autoscaling")}
    return {**kept, **{k: raw["spec"][k] for k in ("replicas", "autoscaling") if k in raw["spec"]}}


def chosen(found: Sequence[Revision], number: int | None) -> Revision:
    """The revision of that number, or the one before the present. Raises NothingToDo."""
    if number is not None:
        for revision in found:
            if revision.number == number:
                return revision
        known = ", ".join(str(r.number) for r in found) or "none"
        raise NothingToDo(f"there is no revision {number}; kept are: {known}")
    if len(found) < 2:
        raise NothingToDo("no earlier revision is kept: the pods' template has not changed since Weir keeps specs")
    return found[1]
