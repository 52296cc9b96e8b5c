"""Laws to compare with: what others do with the same readings. Each has `decide`'s signature and is made fresh for a run.

- *proportional*: the batch scaled by objective ÷ p95 interval, the queue from Little's law; rules and constants of the design
  that the set-point law replaced, corrected (a raise only to ⌊r·θS/y⌋).
- *aimd*: one more slot while the p95 interval is within the objective and slots bind, a tenth fewer where it is not.
- *gradient*: Netflix's Gradient2 (concurrency-limits) on the time per token in place of the round-trip time.

All three set the queue by Little's law at every tick, which is worth more than anything that they do to the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weir_operator.tuner.knobs import limits
from weir_operator.tuner.replicas import ReplicaDecision, ReplicaSpec, ReplicaState, decide_replicas
from weir_operator.tuner.types import Decision, Move, PodView, TunerSpec, TunerState
from weir_operator.tuner.window import MIN_INTERVALS, Span, back_to, is_settled, readings
from weir_server.contract import Window, hist_edge

THETA = 0.92
WATERMARK_STEP, WATERMARK_TOP = 0.02, 0.10
LITTLE_SHARE, LEAST_DEPTH = 0.7, 1


@dataclass
class _Seen:
    """One pod at one tick, as these laws look at it."""

    window: Window
    span: Span
    p95: float  # of the times per token, seconds
    binding: bool

    @property
    def reference(self) -> float:
        return min(self.window.target.max_batch_size, self.span.mean_running + 1)


def _look(view: PodView, spec: TunerSpec) -> _Seen | None:
    windows = readings(view.polls)
    span = back_to(windows, spec.tick_seconds - 1.0)
    if span is None or not is_settled(windows[-1], None):
        return None
    counts = span.settled("decode_interval")
    if sum(counts) < MIN_INTERVALS:
        return None
    batch, waits = windows[-1].target.max_batch_size, span.head_wait
    slots = waits.get("slots", 0.0)
    binding = (span.mean_running >= 0.85 * batch or slots > 0.2 * span.seconds) and waits.get("kv", 0.0) <= slots
    return _Seen(windows[-1], span, percentile(counts, 0.95), binding)


def percentile(counts: Sequence[int], share: float) -> float:
    """Upper edge of the bucket that holds it; infinite for an empty histogram."""
    left = share * sum(counts)
    for i, n in enumerate(counts):
        left -= n
        if left <= 0:
            return hist_edge(i)
    return math.inf


Rule = Callable[[_Seen, TunerSpec, dict[str, float]], dict[str, float]]
"""(pod, spec, the pod's memory) → new values of batch or watermark."""


def _proportional(seen: _Seen, spec: TunerSpec, memory: dict[str, float]) -> dict[str, float]:
    objective, target = spec.tpot or math.inf, seen.window.target
    batch, watermark = target.max_batch_size, target.admission_watermark
    ratio, reference = THETA * objective / seen.p95, seen.reference
    if seen.p95 > 1.5 * objective or seen.span.tax > 0.2 or ratio < 0.93:
        return {"max_batch_size": math.floor(reference * max(0.5, ratio))}
    if seen.span.tax > 0.03:
        if watermark < WATERMARK_TOP:
            return {"admission_watermark": min(WATERMARK_TOP, watermark + WATERMARK_STEP)}
        return {"max_batch_size": math.floor(0.8 * reference)}
    most = math.floor(seen.span.mean_running * ratio)
    if ratio > 1.08 and seen.binding and most > batch:
        return {"max_batch_size": min(most, max(batch + 1, math.floor(1.25 * batch)))}
    return {}


def _aimd(seen: _Seen, spec: TunerSpec, memory: dict[str, float]) -> dict[str, float]:
    batch = seen.window.target.max_batch_size
    if seen.p95 > (spec.tpot or math.inf):
        return {"max_batch_size": math.floor(0.9 * seen.reference)}
    return {"max_batch_size": batch + 1} if seen.binding else {}


def _gradient(seen: _Seen, spec: TunerSpec, memory: dict[str, float]) -> dict[str, float]:
    batch, short = seen.window.target.max_batch_size, seen.p95
    long = memory["long"] = memory.get("long", short) + 0.02 * (short - memory.get("long", short))
    if seen.span.mean_running < batch / 2:
        return {}
    grad = min(1.0, max(0.5, 1.5 * long / short))
    return {"max_batch_size": round(0.8 * (batch * grad + math.sqrt(batch)) + 0.2 * batch)}


@dataclass
class _Rival:
    rule: Rule
    memory: dict[str, dict[str, float]] = field(default_factory=dict)

    def __call__(self, state: TunerState, pods: Mapping[str, PodView], spec: TunerSpec, now: float) -> Decision:
        due = state.next_tick is not None and now >= state.next_tick
        if state.next_tick is not None and not due:
            return Decision(state)
        moves = [move for view in pods.values() if due and (move := self._move(view, spec))]
        return Decision(TunerState(now + spec.tick_seconds), tuple(moves))

    def _move(self, view: PodView, spec: TunerSpec) -> Move | None:
        seen, memory = _look(view, spec), self.memory.setdefault(view.name, {})
        if seen is None:
            return None
        wanted = _little(seen, spec, memory) | self.rule(seen, spec, memory)
        knobs: dict[str, float] = {}
        for knob, value in wanted.items():
            ends = limits(knob, seen.window, spec)
            inside = min(max(value, ends[0]), ends[1]) if ends else value
            if inside != getattr(seen.window.target, knob):
                knobs[knob] = inside
        return Move(view.name, knobs, "rival", "") if knobs else None


def _little(seen: _Seen, spec: TunerSpec, memory: dict[str, float]) -> dict[str, float]:
    """Q = μ · (0.7·S_ttft − median prefill), at most doubled or halved, and only where it is off by a quarter."""
    rate = seen.span.total("admitted") / seen.span.seconds
    memory["rate"] = 0.3 * rate + 0.7 * memory.get("rate", rate)
    counts = seen.span.histogram("prefill_seconds")
    prefill = percentile(counts, 0.5) if sum(counts) else 0.0
    depth = seen.window.target.max_queue_depth
    wanted = max(LEAST_DEPTH, math.ceil(memory["rate"] * (LITTLE_SHARE * (spec.ttft or 0.0) - prefill)))
    if 0.8 * depth <= wanted <= 1.25 * depth:
        return {}
    return {"max_queue_depth": min(2 * depth, max(math.ceil(depth / 2), wanted))}


RIVALS: Mapping[str, Rule] = {"proportional": _proportional, "aimd": _aimd, "gradient": _gradient}


def rival(name: str) -> _Rival:
    """A fresh one. Raises KeyError."""
    return _Rival(RIVALS[name])


# ---------------------------------------------------------------- replicas

@dataclass
class CapacityScaler:
    """The operator's own: offered work over learned capacity."""

    spec: TunerSpec
    replicas: ReplicaSpec
    records: list[tuple[float, ReplicaDecision]] = field(default_factory=list)
    _state: ReplicaState = field(default_factory=ReplicaState)

    def __call__(self, now: float, pods: Sequence[PodView], started: int, tuner: TunerState) -> int:
        views = {view.name: view for view in pods}
        decision = decide_replicas(self._state, views, tuner, self.spec, self.replicas, started, now)
        self._state = decision.state
        if decision.outcome:
            self.records.append((now, decision))
        return decision.desired


@dataclass
class QueueDepthScaler:
    """An HPA on mean queue depth: ceil(n · depth ÷ target), tolerance 10 %, looked at each 15 s, down only by the most that
    was wanted in five minutes (autoscaling/v2's defaults)."""

    least: int
    most: int
    target: float = 4.0
    every: float = 15.0
    stabilise: float = 300.0
    _at: float = -math.inf
    _wanted: list[tuple[float, int]] = field(default_factory=list)

    def __call__(self, now: float, pods: Sequence[PodView], started: int, tuner: TunerState) -> int:
        if now - self._at < self.every or not pods:
            return started
        self._at = now
        waiting = [w[-1].waiting for view in pods if (w := readings(view.polls))]
        if not waiting:
            return started
        ratio = sum(waiting) / len(waiting) / self.target
        wanted = started if abs(ratio - 1) <= 0.1 else math.ceil(len(pods) * ratio)
        wanted = min(max(wanted, self.least), self.most)
        self._wanted = [(t, n) for t, n in self._wanted if now - t < self.stabilise] + [(now, wanted)]
        return max(started, wanted) if wanted >= started else min(started, max(n for _, n in self._wanted))
