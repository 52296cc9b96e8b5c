"""Where a knob may go: the user's bounds inside the envelope, whole numbers and whole chunks (invariant O1)."""

from __future__ import annotations

import math

from weir_operator.tuner.types import TunerSpec
from weir_server.contract import KNOBS, Knobs, Window

WATERMARK_TOP = 0.10
"""A watermark above this only where the user's own maximum says so."""


def limits(knob: str, window: Window, spec: TunerSpec) -> tuple[float, float] | None:
    """Lowest and highest value, or None where the server has no such knob. Bounds that miss the envelope end at its edge."""
    envelope = getattr(window.envelope, knob)
    if envelope is None:
        return None
    low, high = envelope
    user_low, user_high = spec.bounds.get(knob, (None, None))
    least = min(max(low, user_low), high) if user_low is not None else low
    most = max(min(high, user_high), least) if user_high is not None else high
    if knob == "admission_watermark":
        return least, most
    return math.ceil(least), math.floor(most)


def watermark_top(window: Window, spec: TunerSpec) -> float:
    found = limits("admission_watermark", window, spec)
    low, high = found if found else (0.0, 0.0)
    if spec.bounds.get("admission_watermark", (None, None))[1] is None:
        high = min(high, max(low, WATERMARK_TOP))
    return high


def whole_chunks(value: float, chunk: int, low: float, high: float) -> int:
    """`value` in whole chunks, rounded down, but not below `low`."""
    rounded = math.floor(value / chunk + 1e-9) * chunk
    if rounded < low:
        rounded = math.ceil(low / chunk) * chunk
    return int(min(rounded, high))


def back_inside(target: Knobs, window: Window, spec: TunerSpec) -> dict[str, float]:
    """Changes that bring every knob of `target` within its limits: the user may edit bounds at any time."""
    changes: dict[str, float] = {}
    for knob in KNOBS:
        value, found = getattr(target, knob), limits(knob, window, spec)
        if value is None or found is None:
            continue
        inside = min(max(value, found[0]), found[1])
        if inside != value:
            changes[knob] = inside
    return changes
