"""How many pods: offered work over learned capacity. Pure, as the law of the knobs is, and at least four times slower.

Knobs first: what a pod can do is what its plant allows at the best batch within the objectives, whatever its knobs are now,
so moving knobs does not distort the demand (a queue's depth, which HPAs go by, they do). Offered counts refusals and discounts
retries. n* = the fewest pods that carry it with a fifth to spare.

- Out: n* is above what there is in two ticks running and no knob is under way; at once where the deficit is obvious (a third
  more than all pods can do). Never while pods that were asked for do not answer yet, for at most their deadline.
- In: only to the most that was wanted over the whole stabilisation, so what stays can carry what was offered then.
- Half of the pods silent, or no capacity known: no change. Absent is not zero.

Bound: `least` … `most`. Sources: WVA's capacity (llm-d), Dynamo's consolidation test, Knative's one-way ratchet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from weir_operator.tuner import learn, memory
from weir_operator.tuner.chain import Model
from weir_operator.tuner.types import PodView, TunerSpec, TunerState
from weir_operator.tuner.window import Span, back_to, fresh, gather, readings

SPARE = 0.8
OBVIOUS = 1.3
OUT_TICKS = 2
SLOWER = 4.0
LEAST_TICK = 120.0
START_DEADLINE = 600.0
"""Pods that do not answer for so long hold nothing back any more."""


class Scaling(StrEnum):
    """What came of one replica tick. A closed catalogue."""

    OUT = "ScaledOut"
    IN = "ScaledIn"
    ENOUGH = "Enough"  # what there is carries what is offered
    CONFIRMING = "Confirming"  # more are wanted: a second tick must want them too, and knobs come first
    STABILISING = "Stabilising"  # fewer would do, but more were wanted within the stabilisation
    PENDING = "Pending"  # pods that were asked for do not answer yet
    AT_MOST = "AtMost"  # more are wanted than are allowed
    UNKNOWN = "Unknown"  # too few pods answer, or nothing is known of what one can do


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """`tick`: seconds between two looks, if the knobs' own ticks do not ask for more."""

    least: int
    most: int
    stabilise: float = 300.0
    tick: float = LEAST_TICK


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Times are the operator's clock. `looked`: when an obvious deficit was last looked for. `wanted`: (time, n*) of the ticks
    within the stabilisation. `short_since`: fewer answer than asked for."""

    next_tick: float | None = None
    looked: float = 0.0
    wanted: tuple[tuple[float, int], ...] = ()
    out_ticks: int = 0
    short_since: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaState:
        """Raises TypeError or ValueError on another shape."""
        return cls(**{**data, "wanted": tuple((float(t), int(n)) for t, n in data.get("wanted", ()))})


@dataclass(frozen=True, slots=True)
class ReplicaDecision:
    """`outcome` is None between ticks. `offered` and `capacity` (of one pod) in rows per second, None where unknown."""

    state: ReplicaState
    desired: int
    outcome: Scaling | None = None
    reason: str = ""
    offered: float | None = None
    capacity: float | None = None


def decide_replicas(
    state: ReplicaState, pods: Mapping[str, PodView], tuner: TunerState, spec: TunerSpec, replicas: ReplicaSpec, desired: int,
    now: float,
) -> ReplicaDecision:
    """`desired`: how many were asked for until now. Call it at every poll: it looks at the tuner's ticks, acts at its own."""
    desired = min(max(desired, replicas.least), replicas.most)
    tick = max(replicas.tick, SLOWER * spec.tick_seconds)
    answering = _answering(pods, spec, now)
    since = None if len(answering) >= desired else state.short_since if state.short_since is not None else now
    state = replace(state, short_since=since)
    due = state.next_tick
    if due is None or due > now + tick:
        return ReplicaDecision(replace(state, next_tick=now + tick, looked=now), desired)
    if now < due and now - state.looked < spec.tick_seconds:
        return ReplicaDecision(state, desired)
    state = replace(state, looked=now)
    offered, capacity = demand(answering, tuner, spec, tick)
    obvious = bool(offered and capacity and offered > OBVIOUS * capacity * desired and desired < replicas.most)
    if now < due and not obvious:
        return ReplicaDecision(state, desired)
    state = replace(state, next_tick=now + tick)
    known = ReplicaDecision(state, desired, Scaling.UNKNOWN, "", offered, capacity)
    if 2 * len(answering) < max(1, len(pods)) or offered is None or not capacity:
        return replace(known, reason="too few pods answer, or nothing is known of what one can do")
    return _weigh(known, tuner, replicas, offered, capacity, obvious, tick, now)


def _weigh(
    known: ReplicaDecision, tuner: TunerState, replicas: ReplicaSpec, offered: float, capacity: float, obvious: bool,
    tick: float, now: float,
) -> ReplicaDecision:
    state, desired = known.state, known.desired
    needed = max(1, math.ceil(offered / (SPARE * capacity)))
    wanted = min(max(needed, replicas.least), replicas.most)
    recent = (*((t, n) for t, n in state.wanted if now - t < replicas.stabilise), (now, wanted))
    state = replace(state, wanted=recent, out_ticks=state.out_ticks + 1 if wanted > desired else 0)
    known = replace(known, state=state)
    load = f"{offered:.2g} rows/s are offered, a pod carries {capacity:.2g}"
    if wanted > desired:
        if state.short_since is not None and now - state.short_since < START_DEADLINE:
            return replace(known, outcome=Scaling.PENDING, reason="pods that were asked for do not answer yet")
        moving = any(pod.pending is not None for pod in tuner.pods.values())
        if obvious or (state.out_ticks >= OUT_TICKS and not moving):
            return replace(
                known, state=replace(state, out_ticks=0), desired=wanted, outcome=Scaling.OUT, reason=f"{load}: {wanted} pods"
            )
        return replace(known, outcome=Scaling.CONFIRMING, reason=f"{load}; knobs first, and a second look")
    most = max(n for _, n in recent)
    whole = now - recent[0][0] >= replicas.stabilise - tick
    if most < desired and whole:
        return replace(known, desired=most, outcome=Scaling.IN, reason=f"{load}: {most} pods carry it")
    if wanted < desired:
        return replace(known, outcome=Scaling.STABILISING, reason=f"{load}; more were wanted lately")
    if needed > replicas.most:
        return replace(known, outcome=Scaling.AT_MOST, reason=f"{load}: {needed} pods would be needed")
    return replace(known, outcome=Scaling.ENOUGH, reason=load)


def _answering(pods: Mapping[str, PodView], spec: TunerSpec, now: float) -> dict[str, PodView]:
    return {name: view for name, view in pods.items() if fresh(view.polls, now, spec.poll_seconds)}


def demand(
    pods: Mapping[str, PodView], tuner: TunerState, spec: TunerSpec, seconds: float
) -> tuple[float | None, float | None]:
    """(rows per second offered to all of them over so long, rows per second that one of them can serve within the objectives),
    None where unknown. Neither depends on where the knobs stand."""
    return _offered(pods, seconds), _capacity(pods, tuner, spec)


def load_ratio(pods: Mapping[str, PodView], tuner: TunerState, spec: TunerSpec, now: float) -> float | None:
    """What is offered over what the pods that answer can serve, for autoscalers of others: 1 is all that they can do."""
    answering = _answering(pods, spec, now)
    offered, capacity = demand(answering, tuner, spec, SLOWER * spec.tick_seconds)
    return offered / (capacity * len(answering)) if offered is not None and capacity else None


def least_cached(pods: Mapping[str, PodView], count: int) -> tuple[str, ...]:
    """The pods whose end costs least: whose prefix caches saved the fewest prompt tokens over the readings kept, then those
    with the fewest rows. A pod of which nothing is known has nothing to lose."""

    def value(name: str) -> tuple[float, int, str]:
        windows = readings(pods[name].polls)
        if not windows:
            return -1.0, 0, name
        last = windows[-1]
        return Span(windows[0], last).total("cached_tokens"), last.running + last.waiting, name

    return tuple(sorted(pods, key=value)[:max(0, count)])


def _offered(pods: Mapping[str, PodView], seconds: float) -> float | None:
    """Rows per second offered to all of them over the last tick; None where none has a window to go by."""
    spans = [span for view in pods.values() if (span := back_to(readings(view.polls), seconds)) and span.seconds > 0]
    return sum(span.offered / span.seconds for span in spans) if spans else None


def _capacity(pods: Mapping[str, PodView], tuner: TunerState, spec: TunerSpec) -> float | None:
    """Rows per second that one pod serves within the objectives: the mean over those of which something is known."""
    found = [c for name, view in pods.items() if (c := _pod_capacity(name, view, tuner, spec))]
    return sum(found) / len(found) if found else None


def _pod_capacity(name: str, view: PodView, tuner: TunerState, spec: TunerSpec) -> float | None:
    state, windows = tuner.pods.get(name), readings(view.polls)
    evidence = gather(windows, spec.tick_seconds)
    mix = state.mix if state else None
    if state and evidence and spec.tpot is not None and (pod := learn.model(state, windows, evidence.span)):
        return best_rate(pod, spec.tpot, *windows[-1].envelope.max_batch_size)
    known = memory.nearest(tuner.learned, view.pod_class, mix)
    return known[0].capacity if known else None


def best_rate(model: Model, tpot: float, low: int, high: int) -> float:
    """The most rows per second that meet the time per token, over all batches that KV and prefill allow."""
    rates, batch = [], max(1, low)
    while batch <= high and batch <= max(model.kv_rows, low):
        rates.append(model.departures(batch) * model.in_time(batch, tpot))
        batch = max(batch + 1, math.ceil(batch * 1.1))
    return max(rates, default=0.0)
