"""The queue-full rule, and what a refused client is told about coming back. Pure; no aiohttp.

Bound: never more than `max_queue_depth` rows wait beyond what free slots will take at once (a request wider than the whole
queue is taken when nothing waits, else it could never be served). Cost: a few comparisons, so a refusal needs no template,
no token and no word from the engine. Reason for the allowance: an idle server must not refuse a burst that it has slots
for; there is none while the head waits for KV, since slots that can't be filled do not shorten a queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weir_server.contract import Plant

RETRY_MIN, RETRY_MAX = 1, 600
"""Seconds; Retry-After has whole seconds, and nobody comes back after ten minutes."""


@dataclass(frozen=True, slots=True)
class Load:
    """Rows as the parent counts them now. `running` includes prefilling rows, `waiting` preempted ones."""

    waiting: int
    running: int
    bound: str | None  # what the head of the queue waits for


def allowance(load: Load, batch: int) -> int:
    """Waiting rows that do not count, because free slots of the effective batch size take them in the next step."""
    return 0 if load.bound == "kv" else max(0, batch - load.running)


def is_full(load: Load, rows: int, depth: int, batch: int) -> bool:
    """Must a request of `rows` rows be refused? `depth`: max_queue_depth; `batch`: the effective max_batch_size."""
    return load.waiting > 0 and load.waiting + rows > depth + allowance(load, batch)


@dataclass(frozen=True, slots=True)
class Pace:
    """What the wait is estimated from. `rows_per_second`: finished rows, measured lately; 0 where none finished yet."""

    rows_per_second: float
    queued_tokens: float  # uncached prompt tokens waiting
    remaining_tokens: float  # that one running row may still generate, on average
    plant: Plant | None


def wait_seconds(load: Load, pace: Pace) -> float | None:
    """Expected seconds until what waits now has left the queue; None where nothing is known yet.

    Measured drain rate where rows have finished; before that, from the plant: time for a running row to end, in turns.
    """
    prefill = pace.queued_tokens * pace.plant.p if pace.plant else 0.0
    if pace.rows_per_second > 0:
        return max(load.waiting / pace.rows_per_second, prefill)
    if pace.plant is None or not load.running:
        return None
    turn = pace.remaining_tokens * pace.plant.step_seconds(load.running)
    return math.ceil(max(load.waiting, 1) / load.running) * turn + prefill


def retry_after(load: Load, pace: Pace, dice: float) -> int:
    """Whole seconds for the header: the expected wait, ± 20 % by `dice` in [0, 1), so that those refused together part."""
    expected = wait_seconds(load, pace)
    jittered = (RETRY_MIN if expected is None else expected) * (0.8 + 0.4 * dice)
    return max(RETRY_MIN, math.ceil(min(RETRY_MAX, jittered)))
