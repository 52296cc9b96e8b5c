"""What the parent alone sees of requests: latencies, outcomes, objectives. Pure: every time (monotonic) is an argument.

Rows are counted, not HTTP requests. Definitions, as in the contract: TTFT from the arrival of the HTTP request to the
row's first token; prefill from admission to first token; TPOT is a finished row's mean time between tokens; a decode
interval is a running row's mean time between its last 64 tokens, taken each 16 tokens or 5 s. The settled histograms
count only what began after `settled_at`. Objectives are counted for rows that ended by themselves (stop, length) or by
an error, which is a miss; a row that its client or a drain took away says nothing about them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weir_server.contract import BOUNDS, FINISH_REASONS, HISTOGRAMS, SETTLED_HISTOGRAMS, SLOS, Histogram, Slo

INTERVAL_TOKENS, INTERVAL_EVERY, INTERVAL_SECONDS = 64, 16, 5.0
RATE_WINDOW = 30.0  # seconds of finished rows that the drain rate is measured over

REFUSED: dict[str, tuple[str, ...]] = {
    "queue_full": BOUNDS, "draining": ("drain",), "kv_budget": ("kv",),
    "kv_impossible": ("none",), "context_length": ("none",), "invalid": ("none",),
}  # fmt: skip
"""Every (reason, bound) that can occur."""
RETRYABLE = ("queue_full", "draining", "kv_budget")
"""Refusals after which a client may come back: these and what was queued are the arrivals that `retried` is a part of."""

LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""vLLM's own edges (vllm/v1/metrics/buckets.py)."""


class Buckets:
    """A Prometheus histogram: counts over fixed upper edges, the last one open."""

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = sorted(set(map(float, edges)))
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times


def token_buckets(longest: int) -> list[int]:
    """1, 2, 5, 10, … up to the longest row."""
    return [m * 10**e for e in range(8) for m in (1, 2, 5) if m * 10**e <= longest]


@dataclass(slots=True)
class Row:
    """One row's times. `arrived` is its request's."""

    arrived: float
    prompt_tokens: int
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=INTERVAL_TOKENS + 1))
    counted_at: float = 0.0  # when this row last gave a decode interval
    counted_tokens: int = 0


class Observations:
    """Totals since the process started, fed by the event stream."""

    def __init__(self, slo: Slo, longest_row: int, now: float) -> None:
        self.settled_at = now
        self.queued = self.admitted = self.retried = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.surplus_tokens = 0
        self.refused = {reason: dict.fromkeys(bounds, 0) for reason, bounds in REFUSED.items()}
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.slo_good, self.slo_total = dict.fromkeys(SLOS, 0), 0
        self.by_generation: dict[int, tuple[dict[str, int], list[int]]] = {}
        self._slo = slo
        self.set_slo(slo)
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.settled = {name: Histogram() for name in SETTLED_HISTOGRAMS}
        self.buckets = {
            "ttft": Buckets([*TTFT_BUCKETS, slo.ttft]), "tpot": Buckets([*ITL_BUCKETS, slo.tpot]),
            "decode_interval": Buckets([*ITL_BUCKETS, slo.tpot]), "itl": Buckets([*ITL_BUCKETS, slo.tpot]),
            "queue_time": Buckets(LATENCY_BUCKETS), "e2e": Buckets(LATENCY_BUCKETS),
            "prompt_tokens": Buckets(token_buckets(longest_row)), "generation_tokens": Buckets(token_buckets(longest_row)),
        }  # fmt: skip
        self.plain = {"ttft": Buckets(TTFT_BUCKETS), "tpot": Buckets(ITL_BUCKETS), "itl": Buckets(ITL_BUCKETS)}
        self._ends: deque[float] = deque(maxlen=4096)

    # ---- changes of what is measured against

    def set_slo(self, slo: Slo) -> None:
        """New objectives; the counters by generation keep the last two."""
        self._slo = slo
        self.by_generation.setdefault(slo.generation, (dict.fromkeys(SLOS, 0), [0]))
        for old in sorted(self.by_generation)[:-2]:
            del self.by_generation[old]

    def settle(self, now: float) -> None:
        """A move of batch, watermark or budget is in force: the settled histograms start anew."""
        self.settled_at = now
        self.settled = {name: Histogram() for name in SETTLED_HISTOGRAMS}

    # ---- the life of a row

    def refuse(self, reason: str, bound: str, rows: int = 1, retry: bool = False) -> None:
        """`retry`: the client says that it was refused before."""
        self.refused[reason][bound] += rows
        if retry and reason in RETRYABLE:
            self.retried += rows

    def queue(self, rows: Sequence[Row], retry: bool = False) -> None:
        self.queued += len(rows)
        if retry:
            self.retried += len(rows)

    def admit(self, row: Row, t: float, cached: int) -> None:
        row.admitted = t
        self.admitted += 1
        self.prompt_tokens += row.prompt_tokens
        self.cached_tokens += cached
        self._observe("queue_time", t - row.arrived, began=row.arrived)
        self.buckets["prompt_tokens"].observe(row.prompt_tokens)

    def tokens(self, row: Row, t: float, count: int) -> None:
        """`count` new tokens of a running row at `t`."""
        if not count:
            return
        if row.first is None:
            row.first = row.counted_at = t
            self._observe("ttft", t - row.arrived, began=row.arrived)
            if row.admitted is not None:
                self.histograms["prefill_seconds"].observe(t - row.admitted)
        elif row.last is not None:
            for b in (self.buckets["itl"], self.plain["itl"]):
                b.observe((t - row.last) / count, count)
        row.last = t
        row.tokens += count
        row.recent.extend([t] * min(count, INTERVAL_TOKENS + 1))
        self.generated_tokens += count
        if row.tokens - row.counted_tokens >= INTERVAL_EVERY:
            self._interval(row, t)

    def overdue(self, running: Iterable[Row], now: float) -> None:
        """Rows that gave no decode interval for 5 s give one now: a collapse is seen before anything finishes."""
        for row in running:
            if row.first is not None and now - row.counted_at >= INTERVAL_SECONDS:
                self._interval(row, now)

    def finish(self, row: Row, t: float, reason: str) -> None:
        self.finished[reason] += 1
        if row.admitted is not None:
            self._ends.append(t)
            self.buckets["e2e"].observe(t - row.arrived)
            self.buckets["generation_tokens"].observe(row.tokens)
        ended = reason in ("stop", "length")
        tpot = None
        if row.first is not None and row.last is not None and row.tokens > 1:
            tpot = (row.last - row.first) / (row.tokens - 1)
            if ended:
                self._observe("tpot", tpot, began=row.first)
        if ended or reason == "error":
            answered = t if row.first is None else row.first  # a prompt that is only scored has no first token
            ttft_ok = ended and answered - row.arrived <= self._slo.ttft
            tpot_ok = ended and (tpot is None or tpot <= self._slo.tpot)
            self._count_slo({"ttft": ttft_ok, "tpot": tpot_ok, "both": ttft_ok and tpot_ok})

    def rows_per_second(self, now: float) -> float:
        """Rows that left the batch, per second, over the last half minute; 0 where fewer than two did."""
        while self._ends and self._ends[0] < now - RATE_WINDOW:
            self._ends.popleft()
        return len(self._ends) / max(now - self._ends[0], 1e-3) if len(self._ends) > 1 else 0.0

    # ---- inside

    def _interval(self, row: Row, now: float) -> None:
        start, steps = row.recent[0], max(len(row.recent) - 1, 1)
        row.counted_at, row.counted_tokens = now, row.tokens
        self._observe("decode_interval", (now - start) / steps, began=start)

    def _observe(self, name: str, value: float, began: float) -> None:
        value = max(value, 0.0)
        if name in self.histograms:
            self.histograms[name].observe(value)
        if name in self.settled and began >= self.settled_at:
            self.settled[name].observe(value)
        for table in (self.buckets, self.plain):
            if name in table:
                table[name].observe(value)

    def _count_slo(self, good: dict[str, bool]) -> None:
        self.slo_total += 1
        good_now, total_now = self.by_generation[self._slo.generation]
        total_now[0] += 1
        for name, ok in good.items():
            self.slo_good[name] += ok
            good_now[name] += ok
