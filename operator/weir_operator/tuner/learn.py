"""What one tick teaches about a pod: the plant, the traffic, and the spreads z and f that neither explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weir_operator.tuner import chain, mix, plant
from weir_operator.tuner.chain import Model
from weir_operator.tuner.types import Learned, Mix, PodState
from weir_operator.tuner.window import Evidence, Span, begun
from weir_server.contract import Plant, Window

SAMPLES = 600.0
"""About so many times per token, and prefill times, are remembered."""
COMPANY_POLLS = 3
"""The rows that a finished row had beside it are taken over this many polls."""
CLUMPS = tuple(1.5**i for i in range(10))
CLUMP_ROWS, NEARLY_ALL = 50, 0.98
SURE = 4.0
"""Standard errors, of single rows, that the share accepted must lie under what single rows explain: rates vary, too."""


def unseen(state: PodState, windows: Sequence[Window]) -> list[Window]:
    """The readings that are not in the sums yet, after the one that is."""
    first = max((i for i, w in enumerate(windows) if w.monotonic <= state.seen), default=0)
    return list(windows[first:])


def absorb(state: PodState, windows: Sequence[Window], evidence: Evidence, learned: Sequence[Learned] = ()) -> PodState:
    """The state after one more tick. An idle tick changes nothing: what was learned stays.

    Steps are taken from what is new. The traffic is taken from the evidence, which reaches back until rows have finished: where
    a row outlasts a tick, ticks that finish none would be left out and rows would look short.
    """
    new = unseen(state, windows)
    if len(new) < 2:
        return state
    span = Span(new[0], new[-1])
    state = replace(state, seen=span.new.monotonic)
    if span.steps <= 0:
        return state
    seen = evidence.span
    if state.mix is None:  # the first of it weighs most: a load that began within the tick would look light for minutes
        seen = Span(max(seen.old, begun(windows)[0], key=lambda w: w.monotonic), seen.new)
    traffic, shifted = mix.smooth(state.mix, mix.observe(seen), seen.offered, learned)
    state = replace(state, sums=plant.forget(state.sums, span.sums), mix=traffic)
    if shifted:
        state = _another_workload(state)
    fitted = plant.fit(state.sums, state.prior)
    if fitted is None or traffic is None:
        return state
    return _spreads(state, Model(fitted, traffic, {}, {}), windows, len(new) - 1, evidence.source)


def _another_workload(state: PodState) -> PodState:
    """What was said of the one before judges nothing now: neither what a move was promised to yield nor what failed."""
    pending = state.pending and replace(
        state.pending, predicted_goodput=None, predicted_interval=None, goodput_before=None, peers_before=None
    )
    return replace(
        state, prefill={}, direction=0, reversal_ticks=0, misses=0, pending=pending, ceiling=None, ceiling_times=0,
        recall=True, trusted=False,
    )


def _spreads(state: PodState, model: Model, windows: Sequence[Window], fresh: int, source: str) -> PodState:
    """Add the finished rows of the last `fresh` polls, each measured against y with the rows that ran then."""
    z: dict[int, float] = {}
    f: dict[int, float] = {}
    for at in range(len(windows) - fresh, len(windows)):
        piece = Span(windows[at - 1], windows[at])
        company = Span(windows[max(0, at - COMPANY_POLLS)], windows[at]).company
        if company is None:
            continue
        y = model.interval(company)
        if y <= 0:
            continue
        z = chain.blend(z, chain.scaled(piece.settled(source), model.between(company)), SAMPLES)
        f = chain.blend(f, chain.scaled(piece.histogram("prefill_seconds"), y * model.stretch(company)), SAMPLES)
    return replace(state, spread=chain.blend(state.spread, z, SAMPLES), prefill=chain.blend(state.prefill, f, SAMPLES))


def model(state: PodState, windows: Sequence[Window], evidence: Span) -> Model | None:
    """The pod as the chain needs it, or None while something is not known."""
    fitted = plant.fit(state.sums, state.prior)
    if fitted is None or state.mix is None or not state.spread:
        return None
    pod = Model(fitted, mix.spread(state.mix, windows), state.spread, state.prefill, _kv_rows(windows[-1], evidence))
    return replace(pod, mix=replace(pod.mix, clump=_clump(pod, windows)))


def _clump(pod: Model, windows: Sequence[Window]) -> float:
    """How many rows come at once, for as many to be refused as are with the present knobs; 1 where hardly any is, or where rows
    that come singly explain it. Bound: at most the arrivals since the knobs were set count, and SURE standard errors of them
    are needed. Cost: eleven passes of the chain."""
    def knobs(window: Window) -> tuple[int, int]:
        return window.effective.max_batch_size, window.effective.max_queue_depth

    batch, depth = knobs(windows[-1])
    since = next((w.monotonic for w in reversed(windows) if knobs(w) != (batch, depth)), -math.inf)
    span = Span(next(w for w in windows if w.monotonic > since), windows[-1])
    if span.offered < CLUMP_ROWS or (share := min(1.0, span.total("queued") / span.offered)) > NEARLY_ALL:
        return 1.0

    def of(clump: float) -> float:
        return chain.accepted(replace(pod, mix=replace(pod.mix, clump=clump)), batch, depth)

    if of(1.0) - share < SURE * math.sqrt(share * (1.0 - share) / span.offered):
        return 1.0
    return min(CLUMPS, key=lambda clump: abs(of(clump) - share))


def _kv_rows(window: Window, evidence: Span) -> float:
    budget, each = window.effective.kv_cache_budget, evidence.row_bytes
    if budget is None or not each:
        return math.inf
    return budget * (1.0 - window.effective.admission_watermark) / each


def row_seconds(fitted: Plant | None, traffic: Mix | None, prefill: Mapping[int, float], rows: float) -> float:
    """About how long a row is served with so many in the batch."""
    if fitted is None or traffic is None:
        return 0.0
    m = Model(fitted, traffic, {}, prefill)
    return (traffic.output + m.mean_prefill) * m.interval(m.decoding(max(1, math.ceil(rows))))
