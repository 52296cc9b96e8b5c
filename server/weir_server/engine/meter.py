"""The engine's totals: every number of messages.Stats, kept as contract.Window defines them.

Time integrals are exact for gauges that change only at `advance`: call it before and after each step and each message.
"""

from __future__ import annotations

from weir_server.contract import BOUNDS, STEP_PRODUCTS, STEP_SUMS
from weir_server.engine.memory import memory_used
from weir_server.link.messages import Stats

MEMORY_EVERY = 1.0
"""Seconds between two readings of the process's memory."""


def accrue(s: Stats, seconds: float, decoding: bool) -> None:
    """Let so many seconds pass under the gauges as they are. `decoding`: whether any row decoded meanwhile."""
    if decoding:
        s.decoding_seconds += seconds
        s.running_seconds += seconds * s.running
    if s.waiting:
        s.waiting_seconds += seconds * s.waiting
        if s.bound:
            s.head_wait_seconds[s.bound] += seconds
    s.kv_used_byte_seconds += seconds * s.kv_used_bytes


class Meter:
    """`stats` is live: encode or copy it before the next step."""

    def __init__(self, now: float, chunk_bytes: int) -> None:
        self.stats = Stats(
            head_wait_seconds=dict.fromkeys(BOUNDS, 0.0),
            step=dict.fromkeys(STEP_SUMS, 0.0),
            decode_only=dict.fromkeys(STEP_SUMS, 0.0),
            products=dict.fromkeys(STEP_PRODUCTS, 0.0),
            preemptions_by_cause={"kv": 0, "priority": 0, "slots": 0},
            invariant_violations={f"I{i}": 0 for i in range(1, 10)},
        )
        self.chunk_bytes = chunk_bytes
        self._now = now
        self._decoding = False
        self._memory_at = float("-inf")

    def advance(
        self, now: float, *, running: int, prefilling: int, decoding: bool, waiting: int,
        oldest_arrival: float | None, bound: str | None, chunks: tuple[int, int, int], resident: int,
    ) -> None:
        """Integrate the gauges up to `now`, then set them. `chunks`: used, cached, free; `resident`: those with memory."""
        s = self.stats
        accrue(s, now - self._now, self._decoding)
        self._now, self._decoding = now, decoding
        s.running, s.prefilling, s.waiting = running, prefilling, waiting
        s.oldest_arrival, s.bound = oldest_arrival, bound
        s.kv_blocks_used, s.kv_blocks_cached, s.kv_blocks_free = chunks
        s.kv_used_bytes, s.kv_cached_bytes = chunks[0] * self.chunk_bytes, chunks[1] * self.chunk_bytes
        s.kv_resident_bytes = resident * self.chunk_bytes

    def count_step(self, seconds: float, rows: int, context: int, prefill: int, recomputed: int) -> None:
        """One step: decode rows, context tokens that they read, prompt tokens, of which computed before."""
        n, c, p, y = float(rows), float(context), float(prefill), seconds
        sums = (1.0, y, n, c, p)
        for totals in (self.stats.step,) if prefill else (self.stats.step, self.stats.decode_only):
            for name, value in zip(STEP_SUMS, sums, strict=True):
                totals[name] += value
        products = self.stats.products
        for name, value in zip(
            STEP_PRODUCTS, (n * n, n * c, n * p, c * c, c * p, p * p, n * y, c * y, p * y, y * y), strict=True
        ):
            products[name] += value
        if recomputed:
            self.stats.recomputed_tokens += recomputed
            self.stats.recompute_seconds += y * recomputed / (n + p)

    @property
    def first_time_tokens(self) -> float:
        """Tokens fed that had not been computed before: what grows while there is progress."""
        return self.stats.step["decode_rows"] + self.stats.step["prefill_tokens"] - self.stats.recomputed_tokens

    def read_memory(self, now: float) -> None:
        """Refresh the reading of the memory if it is old enough."""
        if now - self._memory_at >= MEMORY_EVERY:
            self._memory_at, self.stats.memory_used = now, memory_used()

    def memory_due(self, now: float) -> float | None:
        """Seconds until memory is to be read again; None once nothing has happened since the last reading."""
        if self._memory_at >= self._now:
            return None
        return max(0.0, self._memory_at + MEMORY_EVERY - now)
