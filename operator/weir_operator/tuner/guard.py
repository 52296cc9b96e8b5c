"""The rules that need no prediction: collapse and preemption (1, 2), relaxing the watermark (6), memory (7).

Each is a predicate on windows and gives the new value, or None. They cut relative to the rows that really ran, not to the cap:
a cap far above the traffic would otherwise have to be halved many times before anything changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weir_operator.tuner.plant import mean_step
from weir_operator.tuner.window import Span, back_to
from weir_server.contract import Plant, Window

COLLAPSE = 1.5  # × S_tpot
UNEXPLAINED = 2.0  # × what the plant predicts for the same steps
HIGH_TAX, SOME_TAX, NO_TAX = 0.20, 0.03, 0.01
WATERMARK_UP, WATERMARK_DOWN, WATERMARK_FLOOR = 0.02, 0.01, 0.01
RELAX_SECONDS, RELAX_ROWS, RELAX_USE = 600.0, 100, 0.70
MEMORY_FULL, MEMORY_CUT, MEMORY_EVERY = 0.92, 0.9, 60.0
MEMORY_ROOM, MEMORY_RAISE = 0.85, 1.15
KV_WAIT, KV_WAIT_TICKS = 0.20, 2


def cut(factor: float, batch: int, running: float, least: float) -> int:
    """Rule 1 and 2: floor(factor · min(B, r + 1)), not below the limit."""
    return max(int(least), math.floor(factor * min(batch, running + 1)), 1)


def collapsed(windows: Sequence[Window], plant: Plant | None, tpot: float | None) -> dict[str, float] | None:
    """Rule 1, first half: the measured and the predicted step of the last two polls, where both say collapse.

    Long prompts make long steps too, but those the plant predicts. Looks only at steps after the last move took effect.
    """
    if plant is None or tpot is None or len(windows) < 3 or windows[-3].monotonic < windows[-1].settled_at:
        return None
    worst = None
    for old, new in ((windows[-3], windows[-2]), (windows[-2], windows[-1])):
        span = Span(old, new)
        step = span.mean_step
        if step is None or not span.company or step <= COLLAPSE * tpot:
            return None
        expected = mean_step(plant, span.sums)
        if step <= UNEXPLAINED * expected:
            return None
        worst = {"step_seconds": step, "expected_step_seconds": expected, "running": span.mean_running}
    return worst


def thrashing(windows: Sequence[Window], tick_seconds: float) -> dict[str, float] | None:
    """Rule 1, second half: the preemption tax of the last tick, where it is over 20 % and all of it after the last move."""
    span = back_to(windows, tick_seconds - 1.0)
    if span is None or span.old.monotonic < span.new.settled_at or span.tax <= HIGH_TAX:
        return None
    return {"tax": span.tax, "running": span.mean_running}


def memory_full(windows: Sequence[Window]) -> float | None:
    """Rule 7: the share of the memory limit in use, where the last two polls are over 92 %."""
    if len(windows) < 2 or any(not w.memory_limit for w in windows[-2:]):
        return None
    shares = [w.memory_used / w.memory_limit for w in windows[-2:] if w.memory_limit]
    return min(shares) if min(shares) > MEMORY_FULL else None


def memory_room(window: Window, budget: int) -> bool:
    """Rule 7: whether a budget 15 % larger, all of it used, would leave memory under 85 %. An unknown limit is no room."""
    if not window.memory_limit:
        return False
    return window.memory_used + MEMORY_RAISE * budget - window.kv_used_bytes < MEMORY_ROOM * window.memory_limit
