"""Rule 4 in the tick: what the verdict on the last move leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from weir_operator.tuner import learn, plant
from weir_operator.tuner.case import SETTLED_KNOBS, Case, Change, Shown, Step, carry_out, hold
from weir_operator.tuner.knobs import limits
from weir_operator.tuner.pressure import with_ceiling
from weir_operator.tuner.types import Outcome, Pending
from weir_operator.tuner.verdict import Finding, Verdict, judge
from weir_operator.tuner.window import Evidence, share_good

MISSES, HOLD_SECONDS = 2, 600.0
VERIFIED_KNOBS = ("max_batch_size", "max_queue_depth", "admission_watermark")
"""What a return to a verified setting sets. Not the KV budget: memory may have cut it since, and no prediction is about it."""


def adopt(case: Case) -> Step | None:
    """Give up a move that never arrived or that somebody else has overwritten (a user, another operator, an expired lease):
    the pod's own values are the truth, and the next tick goes on from them."""
    pending = case.state.pending
    if pending is None or case.now - pending.at < case.spec.poll_seconds:
        return None
    for knob in SETTLED_KNOBS:
        value, now = pending.after.get(knob), getattr(case.last.target, knob)
        tolerance = (case.chunk or 1) if knob == "kv_cache_budget" else 1e-6
        if value is not None and (now is None or abs(now - value) >= tolerance):
            return hold(
                case.with_state(pending=None), Outcome.INCONCLUSIVE,
                f"{knob} was set to {value:g} and is not: the pod's own values are adopted", "verdict", Shown(_asked(pending)),
            )
    return None


def _asked(pending: Pending) -> dict[str, float]:
    return {f"asked_{knob}": value for knob, value in pending.after.items()}


def settle(
    case: Case, pending: Pending, evidence: Evidence, setpoint: Callable[[Case, bool], Step]
) -> Step | tuple[Case, Shown]:
    """The tick's step; or, where the tick may go on to the next move, the case with this one behind it and how it came out.

    `setpoint(case, batch_free)` is rule 3; while the move is not judged the queue depth alone is free.
    """
    state = case.state
    fitted = plant.fit(state.sums, state.prior)
    seconds = learn.row_seconds(fitted, state.mix, state.prefill, evidence.span.mean_running)
    verdict = judge(pending, case.counted, seconds, case.chunk, case.spec, case.now, _drift(case, pending))
    predicted = {"goodput": pending.predicted_goodput, "interval": pending.predicted_interval}
    shown = Shown(predicted={k: v for k, v in predicted.items() if v is not None}, observed=verdict.observed)
    if verdict.finding in (Finding.WAIT, Finding.OVERDUE):
        step = setpoint(case, False)
        if step.move:
            return step
        outcome = Outcome.SETTLING if verdict.finding is Finding.WAIT else Outcome.DRAIN_OVERDUE
        return hold(case, outcome, verdict.why, "verdict", shown)
    case = case.with_state(pending=None)
    if verdict.finding in (Finding.WORSE, Finding.UNUSED):
        case = case.with_state(trusted=False)
    if verdict.finding is Finding.WORSE:
        return _revert(case, pending, verdict, shown)
    if verdict.finding is Finding.MISSED:
        return _missed(case, verdict, shown, setpoint)
    if verdict.finding is Finding.UNUSED:
        return hold(case, Outcome.INCONCLUSIVE, verdict.why, "verdict", shown)
    target = case.last.target
    verified = {k: getattr(target, k) for k in VERIFIED_KNOBS}
    trusted = pending.predicted_goodput is not None
    return case.with_state(misses=0, distrust=0, verified=verified, trusted=trusted), shown


def _drift(case: Case, pending: Pending) -> float:
    """How the pods beside a canary fared meanwhile, as a factor on what it had before."""
    if not pending.peers_before:
        return 1.0
    now = share_good(case.peers, pending.at, case.now)
    return min(2.0, max(0.5, now / pending.peers_before)) if now is not None else 1.0


def _revert(case: Case, pending: Pending, verdict: Verdict, shown: Shown) -> Step:
    batch, old = pending.after.get("max_batch_size", 0), pending.before.get("max_batch_size", 0)
    if batch > old:
        case = replace(case, state=with_ceiling(case, int(batch)))
    return carry_out(case, Change("verdict", verdict.why, inside(case, pending.before), shown, outcome=Outcome.REVERTED))


def _missed(case: Case, verdict: Verdict, shown: Shown, setpoint: Callable[[Case, bool], Step]) -> Step:
    """One miss: what was seen since corrects the prediction, and the batch may turn round at once. Two: learn the spreads anew
    and go by ones. Two more: back to what was verified, and hold."""
    case, misses = case.with_state(trusted=False), case.state.misses + 1
    if misses < MISSES:
        case, reason = case.with_state(misses=misses, direction=0), f"{verdict.why}, once so far"
        step = setpoint(case, True)
        if step.record is None or not step.record.changes:
            return hold(case, Outcome.MISPREDICTED, reason, "verdict", shown)
        return replace(step, record=replace(step.record, reason=f"{reason}; {step.record.reason}", observed=shown.observed))
    if case.state.distrust == 0:
        case = case.with_state(misses=0, distrust=1, spread={}, prefill={})
        return hold(case, Outcome.MISPREDICTED, f"{verdict.why}, twice: learning the spread anew", "verdict", shown)
    case = case.with_state(misses=0, distrust=2, hold_until=case.now + HOLD_SECONDS)
    reason = f"{verdict.why}, four times: back to the last setting that came out as predicted, and hold"
    return carry_out(case, Change("verdict", reason, inside(case, _safe(case)), shown, outcome=Outcome.MISPREDICTED))


def _safe(case: Case) -> Mapping[str, float]:
    """The last verified setting; before there is one, what the user declared or the pod booted with."""
    if case.state.verified or case.view.control is None:
        return case.state.verified
    boot = case.view.control.boot
    return {"max_batch_size": boot.max_batch_size, "max_queue_depth": boot.max_queue_depth, **case.spec.initial}


def inside(case: Case, knobs: Mapping[str, float]) -> dict[str, float]:
    found = {k: (v, limits(k, case.last, case.spec)) for k, v in knobs.items()}
    return {k: min(max(v, bounds[0]), bounds[1]) for k, (v, bounds) in found.items() if bounds is not None}
