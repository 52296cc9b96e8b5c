"""Whether pods would gain by a larger envelope than they were started with: a proposal, since it takes a restart. Pure.

A pod wants one where its batch has stood at the envelope's end, slots are what its queue waits for, and the law's own chain
predicts a gain beyond by as much as a live move has to gain. At least half of the pods must want it, ten ticks running: a
restart costs caches and minutes. At most doubled at a time, inside the user's maximum.

Only the batch: the KV pool is already as large as the memory limit leaves, or as the user said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weir_operator.tuner import learn
from weir_operator.tuner.case import open_case
from weir_operator.tuner.law import can_predict, reach_of
from weir_operator.tuner.setpoint import certain, choose
from weir_operator.tuner.types import PodView, TunerSpec, TunerState
from weir_operator.tuner.window import gather

TICKS = 10


@dataclass(frozen=True, slots=True)
class Proposal:
    """`rows` of the envelope that were wanted at each of the last `ticks`."""

    rows: int | None = None
    ticks: int = 0

    @property
    def standing(self) -> int | None:
        return self.rows if self.ticks >= TICKS else None


def propose(before: Proposal, pods: Mapping[str, PodView], tuner: TunerState, spec: TunerSpec, now: float) -> Proposal:
    """At each tick, of the pods that serve."""
    wanted = [rows for name, view in pods.items() if (rows := _wants(name, view, tuner, spec, now))]
    if not wanted or 2 * len(wanted) < len(pods):
        return Proposal()
    return Proposal(max(wanted), before.ticks + 1)


def _wants(name: str, view: PodView, tuner: TunerState, spec: TunerSpec, now: float) -> int | None:
    case = open_case(tuner.pods.get(name), view, spec, now)
    if case is None or case.frozen or case.stale or case.state.pending or spec.ttft is None or spec.tpot is None:
        return None
    end = case.last.envelope.max_batch_size[1]
    most = spec.bounds.get("max_batch_size", (None, None))[1]
    top = 2 * end if most is None else min(2 * end, int(most))
    evidence = gather(case.windows, spec.tick_seconds)
    if case.last.effective.max_batch_size < end or top <= end or evidence is None or not can_predict(case, evidence):
        return None
    model, reach = learn.model(case.state, case.windows, evidence.span), reach_of(case, evidence.span.head_wait)
    if model is None or not reach.may_raise or reach.batch_limits[1] < end:  # a batch of this size has failed
        return None
    reach = replace(reach, batch_limits=(reach.batch_limits[0], top), one_step=False)
    choice = choose(model, spec.ttft, spec.tpot, reach)
    gains = choice.batch > end and choice.gains and certain(model, spec.ttft, spec.tpot, reach, choice)
    return top if gains else None
