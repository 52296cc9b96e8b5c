"""What is remembered of a workload (`memory`): when it is learned, and when it is taken up again."""

from __future__ import annotations

import math
from collections.abc import Mapping

from weir_operator.tuner import learn, memory
from weir_operator.tuner.case import Case, Change, Shown, Step
from weir_operator.tuner.chain import goodputs
from weir_operator.tuner.settle import inside
from weir_operator.tuner.types import Learned
from weir_operator.tuner.window import Evidence, gather, is_settled

RECENT = 600.0
STEADY_TICKS = 3
"""Ticks of one workload before what suits it is remembered without a verdict."""


def lesson(case: Case, step: Step) -> Learned | None:
    """A setting that is predicted to be the best for traffic that is steady, or that has just come out as predicted."""
    state, target = step.state, case.last.target
    if state is None or state.mix is None or case.spec.tpot is None or step.record is None:
        return None
    proven = state.verified != case.state.verified and state.trusted
    evidence = gather(case.windows, case.spec.tick_seconds)
    if not (proven or (step.best and state.mix.ticks >= STEADY_TICKS)) or evidence is None:
        return None
    pod = learn.model(state, case.windows, evidence.span)
    if pod is None:
        return None
    batch, mix = target.max_batch_size, state.mix
    known = int(state.verified.get("max_batch_size", 0)) if state.trusted else 0
    return Learned(
        case.view.pod_class, mix.output, mix.prefill, mix.context, batch, target.max_queue_depth, target.admission_watermark,
        known, pod.departures(batch) * pod.in_time(batch, case.spec.tpot), pod.plant, case.now,
    )


def recalled(case: Case, evidence: Evidence) -> tuple[Case, Change | None]:
    """What is known of a workload that has just come back, or a start for a pod that nobody has set yet: one look-up each.
    What is predicted to do worse than the present setting under the present rate is left."""
    state, target, control = case.state, case.last.target, case.view.control
    if not (state.recall or not state.placed) or case.spec.mode != "Auto" or not is_settled(case.last, case.chunk):
        return case, None
    untouched = control is not None and target == control.boot
    found = memory.nearest(case.learned, case.view.pod_class, state.mix)
    case = case.with_state(recall=False, placed=True)
    if found is None or (state.recall and found[1] > memory.SAME) or not (state.recall or untouched):
        return case, None
    entry, far = found
    if state.mix is None and case.now - entry.verified_at < RECENT:
        far = 0.0  # the pods beside it have just been serving it
    batch = entry.batch if far <= memory.SAME else max(1, int(memory.CAUTION * entry.batch))
    knobs = inside(case, {"max_batch_size": batch, "max_queue_depth": entry.depth})
    knobs = {k: v for k, v in knobs.items() if v != getattr(target, k)}
    if far > memory.SAME and knobs.get("max_queue_depth", math.inf) < target.max_queue_depth:
        del knobs["max_queue_depth"]  # a shallow queue suits the load that it was learned under
    if _loses(case, evidence, knobs):
        return case, None
    reason = "what did best under this workload" if far <= memory.SAME else "what did well on such pods, with some caution"
    return case, Change("learned", reason, knobs, Shown({"distance": far} if far < math.inf else {})) if knobs else None


def _loses(case: Case, evidence: Evidence, knobs: Mapping[str, float]) -> bool:
    pod, spec, target = learn.model(case.state, case.windows, evidence.span), case.spec, case.last.target
    if pod is None or spec.ttft is None or spec.tpot is None:
        return False
    batch, depth = (int(knobs.get(k, getattr(target, k))) for k in ("max_batch_size", "max_queue_depth"))
    present = goodputs(pod, spec.ttft, spec.tpot, target.max_batch_size, target.max_queue_depth)[target.max_queue_depth]
    return goodputs(pod, spec.ttft, spec.tpot, batch, depth)[depth] < present
