"""Windows of one pod turned into differences, and differences into evidence.

Counters are differenced per pod, never summed first; a new process or a counter that went back ends the history before it.
A failed or old poll is no reading at all: absent is not zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weir_operator.tuner.types import HISTORY_SECONDS, PodView, Poll
from weir_server.contract import HIST_EDGES, STEP_PRODUCTS, STEP_SUMS, Histogram, Window

READS = (
    "instance", "monotonic", "settled_at", "target", "effective", "envelope", "draining", "running", "waiting", "oldest_wait",
    "memory_used", "memory_limit", "kv_used_bytes", "decoding_seconds", "running_seconds", "head_wait_seconds",
    "kv_used_byte_seconds", "step", "products", "recompute_seconds", "queued", "retried", "admitted", "refused", "finished",
    "preempted", "cached_tokens", "generated_tokens", "slo_good", "slo_total", "histograms", "settled",
)
"""The fields of a window that the law reads; a test holds this list, the contract and the code together."""

RETRYABLE = ("queue_full", "draining", "kv_budget")
"""Refusals that are load; the others are requests that this pod could never have served."""
STALE_POLLS = 3
MIN_INTERVALS = 15  # z: times per token
MIN_COMPLETIONS = 5
STEADY = 0.1  # of the rows offered, by which the rows in a pod may have grown
LONGEST = 300.0  # seconds over which evidence is gathered


def remember(polls: deque[Poll], poll: Poll) -> None:
    """Keep one more, and let go of what is older than HISTORY_SECONDS."""
    polls.append(poll)
    while polls[0].at < poll.at - HISTORY_SECONDS:
        polls.popleft()


def readings(polls: Sequence[Poll]) -> list[Window]:
    """The windows of the newest process, oldest first; nothing from before a reset."""
    kept: list[Window] = []
    for window in (p.window for p in polls):
        if window is None or (kept and window.monotonic == kept[-1].monotonic and window.instance == kept[-1].instance):
            continue
        if kept and (window.instance != kept[-1].instance or _went_back(kept[-1], window)):
            kept = []
        kept.append(window)
    return kept


def _went_back(old: Window, new: Window) -> bool:
    return (
        new.monotonic < old.monotonic or new.queued < old.queued or new.generated_tokens < old.generated_tokens
        or new.step["steps"] < old.step["steps"]
    )


def fresh(polls: Sequence[Poll], now: float, poll_seconds: float) -> bool:
    """Whether a window was read in the last three polls' time."""
    return any(p.window is not None and now - p.at <= STALE_POLLS * poll_seconds for p in reversed(polls))


def is_settled(window: Window, chunk_bytes: int | None) -> bool:
    """Whether batch, watermark and budget are in force. The budget's effective value is whole chunks."""
    t, e = window.target, window.effective
    if t.max_batch_size != e.max_batch_size or abs(t.admission_watermark - e.admission_watermark) > 1e-6:
        return False
    if t.kv_cache_budget is None or e.kv_cache_budget is None:
        return t.kv_cache_budget == e.kv_cache_budget
    return abs(t.kv_cache_budget - e.kv_cache_budget) < (chunk_bytes or max(1, t.kv_cache_budget // 50))


@dataclass(frozen=True)
class Span:
    """What happened between two readings `old` and `new` of one process. Rates are per second of the pod's clock."""

    old: Window
    new: Window

    @property
    def seconds(self) -> float:
        return self.new.monotonic - self.old.monotonic

    def total(self, name: str) -> float:
        return max(0.0, float(getattr(self.new, name)) - float(getattr(self.old, name)))

    @cached_property
    def sums(self) -> dict[str, float]:
        """STEP_SUMS and STEP_PRODUCTS of the span."""
        step = {k: self.new.step[k] - self.old.step[k] for k in STEP_SUMS}
        return step | {k: self.new.products[k] - self.old.products[k] for k in STEP_PRODUCTS}

    @property
    def steps(self) -> float:
        return self.sums["steps"]

    @property
    def mean_step(self) -> float | None:
        return self.sums["step_seconds"] / self.steps if self.steps > 0 else None

    @property
    def company(self) -> float | None:
        """Decoding rows in the step as a decoding row meets them: Σn² ÷ Σn."""
        return self.sums["nn"] / self.sums["decode_rows"] if self.sums["decode_rows"] > 0 else None

    @property
    def mean_running(self) -> float:
        """r: rows in the batch while anything decodes."""
        decoding = self.total("decoding_seconds")
        return self.total("running_seconds") / decoding if decoding > 0 else 0.0

    @property
    def tax(self) -> float:
        """Share of the forward time that went into tokens computed before."""
        seconds = self.sums["step_seconds"]
        return self.total("recompute_seconds") / seconds if seconds > 0 else 0.0

    @property
    def offered(self) -> float:
        """Rows offered: queued and refused ones, less those that said they were retries."""
        refused = sum(_refused(self.new, r) - _refused(self.old, r) for r in RETRYABLE)
        return max(0.0, self.total("queued") + refused - self.total("retried"))

    @property
    def steady(self) -> bool:
        """Whether the pod holds about as many rows as at the start. While a queue fills, those before it are still in time."""
        grown = self.new.running + self.new.waiting - self.old.running - self.old.waiting
        return grown <= STEADY * self.offered

    @property
    def completed(self) -> float:
        return sum(self.new.finished.get(r, 0) - self.old.finished.get(r, 0) for r in ("stop", "length"))

    @property
    def good(self) -> float:
        """Rows that met the objectives in force when they finished. A change of objectives does not restart the counter, so
        a span over one counts by two measures: `Case.counted` keeps such spans out."""
        return max(0.0, self.new.slo_good["both"] - self.old.slo_good["both"])

    @property
    def head_wait(self) -> Mapping[str, float]:
        """Seconds for which the head of the queue waited, by what it waited for."""
        return {k: v - self.old.head_wait_seconds.get(k, 0.0) for k, v in self.new.head_wait_seconds.items()}

    @property
    def row_bytes(self) -> float | None:
        """Mean KV bytes that one row in the batch holds."""
        rows = self.total("running_seconds")
        return self.total("kv_used_byte_seconds") / rows if rows > 0 else None

    def histogram(self, name: str) -> list[int]:
        return _difference(self.old.histograms[name], self.new.histograms[name])

    def settled(self, name: str) -> list[int]:
        """Like `histogram`, of what began after the last settled move only."""
        if self.new.settled_at != self.old.settled_at:
            return list(self.new.settled[name].counts)
        return _difference(self.old.settled[name], self.new.settled[name])


def refusals(window: Window) -> int:
    """Rows refused since the process started, for whatever reason."""
    return sum(_refused(window, reason) for reason in window.refused)


def _refused(window: Window, reason: str) -> int:
    return sum(window.refused.get(reason, {}).values())


def _difference(old: Histogram, new: Histogram) -> list[int]:
    if old is new:  # as readings of a quiet pod hold it in common
        return [0] * (HIST_EDGES + 1)
    return [max(0, b - a) for a, b in zip(old.counts, new.counts, strict=True)]


def back_to(windows: Sequence[Window], seconds: float) -> Span | None:
    """From the newest reading that is at least `seconds` old (else the oldest there is) to the last."""
    if len(windows) < 2:
        return None
    last = windows[-1]
    old = next((w for w in reversed(windows[:-1]) if last.monotonic - w.monotonic >= seconds), windows[0])
    return Span(old, last)


def begun(windows: Sequence[Window]) -> Sequence[Window]:
    """From the last reading before the first row was offered: an idle start is no part of the traffic."""
    first = next((i for i, w in enumerate(windows) if Span(windows[0], w).offered > 0), len(windows))
    return windows[max(0, first - 1):] if not windows[0].running else windows


@dataclass(frozen=True)
class Evidence:
    """The shortest span that holds enough, and whether it does. `source` is the histogram that times per token come from."""

    span: Span
    enough: bool
    source: str
    intervals: int
    completions: float


def gather(windows: Sequence[Window], tick_seconds: float) -> Evidence | None:
    """One tick's span, reaching back up to five minutes for what it lacks."""
    evidence, reach = None, tick_seconds
    while True:
        span = back_to(windows, reach - 1.0)  # a poll is never quite on time
        if span is None:
            return None
        evidence = _weigh(span)
        if evidence.enough or reach >= LONGEST or span.old is windows[0]:
            return evidence
        reach = min(LONGEST, reach + tick_seconds)


def _weigh(span: Span) -> Evidence:
    finished, running = sum(span.settled("tpot")), sum(span.settled("decode_interval"))
    source, intervals = ("tpot", finished) if finished >= MIN_INTERVALS else ("decode_interval", running)
    completions = span.completed
    enough = intervals >= MIN_INTERVALS and completions >= MIN_COMPLETIONS
    return Evidence(span, enough, source, intervals, completions)


def share_good(peers: Sequence[PodView], since: float, until: float) -> float | None:
    """Of the rows offered to these pods between two times of the operator's clock, the share that met both objectives."""
    good = offered = 0.0
    for view in peers:
        windows = readings([p for p in view.polls if since <= p.at <= until])
        if len(windows) > 1:
            span = Span(windows[0], windows[-1])
            good, offered = good + span.good, offered + span.offered
    return good / offered if offered > 0 else None
