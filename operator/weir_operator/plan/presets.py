"""Presets: objectives and bounds by name, for what the manifest leaves out.

Bound: a preset fills, it never overrules: what `slo` or `tuning.knobs` say stands, and a bound of the preset's that would
contradict it gives way. Cost: none, since nothing that it fills in is part of the pod template. Reason: most people know what
kind of traffic they have and not its milliseconds (kserve/kserve#5137). The figures: `latency` is a person who waits for the
first word and reads along, `balanced` the same with some patience, `throughput` work that nobody watches; the queue's bound is
what may wait without missing the first objective by much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weir_operator.api.knobs import RowsKnob
from weir_operator.api.types import Slo, Spec

PRESETS: Mapping[str, tuple[Slo, Mapping[str, int]]] = {
    "latency": (Slo(ttft="1s", tpot="50ms"), {"initial": 8, "max": 32}),
    "balanced": (Slo(ttft="2s", tpot="80ms"), {"initial": 32, "max": 256}),
    "throughput": (Slo(ttft="30s", tpot="250ms"), {"initial": 256, "max": 1024}),
}
"""Objectives, and the bounds of maxQueueDepth."""


def filled(spec: Spec) -> Spec:
    """`spec` with its preset's values where it says nothing."""
    if spec.tuning.preset is None:
        return spec
    slo, bounds = PRESETS[spec.tuning.preset]
    declared = spec.tuning.knobs.max_queue_depth
    knobs = spec.tuning.knobs.model_copy(update={"max_queue_depth": _bounded(declared, bounds)})
    return spec.model_copy(update={"slo": spec.slo or slo, "tuning": spec.tuning.model_copy(update={"knobs": knobs})})


def _bounded(declared: RowsKnob, bounds: Mapping[str, int]) -> RowsKnob:
    """The declared knob, and of `bounds` what agrees with it."""
    given: dict[str, Any] = {k: v for k, v in declared.model_dump().items() if v is not None}
    ends = {**bounds, **given}
    low, high = given.get("min", 0), max(ends["max"], given.get("min", 0), given.get("initial", 0))
    ends["max"] = given.get("max", high)
    ends["initial"] = given.get("initial", min(max(ends["initial"], low), ends["max"]))
    return RowsKnob(**ends)


