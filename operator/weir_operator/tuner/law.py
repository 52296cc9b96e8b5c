"""The set-point law of the tuner: one pure function.

A tick of one pod: learn from what is new; stop where nothing may move (paused, draining, stale); emergencies; the verdict on
the last move; preemption and memory; and if none of these had cause, the best predicted setting. One of batch, watermark and
budget moves per settled window; the queue depth may always. docs/tuning-law.md states the law, its constants and its flaws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weir_operator.tuner import canary, learn, memory, recall
from weir_operator.tuner.case import Case, Change, Shown, Step, carry_out, hold, open_case
from weir_operator.tuner.chain import Model, predict
from weir_operator.tuner.knobs import back_inside, limits
from weir_operator.tuner.pressure import emergency, pressure, watch, with_ceiling
from weir_operator.tuner.setpoint import NIL, SURGE, Choice, Reach, certain, choose
from weir_operator.tuner.settle import adopt, settle
from weir_operator.tuner.types import Canary, Decision, Learned, Outcome, PodState, PodView, Record, TunerSpec, TunerState
from weir_operator.tuner.window import MIN_INTERVALS, Evidence, back_to, gather, share_good

REVERSAL_GAIN, REVERSAL_TICKS = 1.10, 2


def decide(state: TunerState, pods: Mapping[str, PodView], spec: TunerSpec, now: float) -> Decision:
    """Called at every poll. Between ticks only emergencies act and leave a record; at a tick every pod gets one record.

    A pod that is not in `pods` is forgotten, what it taught is not. The first call starts the clock; a clock that jumps starts
    it again.
    """
    waits = state.next_tick is not None and now < state.next_tick <= now + spec.tick_seconds
    due = state.next_tick is not None and now >= state.next_tick
    cases, steps = {}, {}
    for name, view in pods.items():
        known = state.pods.get(name)
        peers = [p for other, p in pods.items() if other != name and p.pod_class == view.pod_class]
        case = open_case(known, view, spec, now, state.learned, peers)
        if case is None:
            steps[name] = _unread(known, view, now) if due else Step(known)
            continue
        cases[name] = case
        steps[name] = _tick(case) if due else emergency(case) or Step(case.state)
    learned, canaries = state.learned, dict(state.canaries)
    if due:
        learned, canaries = _together(state, cases, steps, now)
    found = [steps[name] for name in pods]
    after = {name: step.state for name, step in steps.items() if step.state is not None}
    return Decision(
        TunerState(state.next_tick if waits else now + spec.tick_seconds, after, learned, canaries),
        tuple(s.move for s in found if s.move), tuple(s.record for s in found if s.record),
    )


def _together(
    state: TunerState, cases: dict[str, Case], steps: dict[str, Step], now: float
) -> tuple[tuple[Learned, ...], dict[str, Canary]]:
    """What the pods of one deployment owe each other at a tick: canaries, ceilings, and what was learned. Edits `steps`."""
    running = canary.still_running(state.canaries, {n: s.state for n, s in steps.items() if s.state}, now)
    for kind, ended in state.canaries.items():
        if kind not in running and canary.failed(steps.get(ended.pod)):
            for name, case in cases.items():
                if case.view.pod_class == kind and name != ended.pod:
                    cases[name] = replace(case, state=with_ceiling(case, ended.batch))
                    steps[name] = _tick(cases[name])
    reasons, begun = canary.held_back(state, cases, steps, running, now)
    for name, why in reasons.items():
        case = cases[name]
        steps[name] = canary.waiting(_tick(replace(case, highest=case.last.target.max_batch_size)), why)
    for new in begun.values():
        steps[new.pod] = _measured_beside(cases[new.pod], steps[new.pod])
    learned = state.learned
    for name, case in cases.items():
        if entry := recall.lesson(case, steps[name]):
            learned = memory.remember(learned, entry)
    return learned, {**running, **begun}


def _measured_beside(case: Case, step: Step) -> Step:
    """A canary remembers how the pods beside it fared until now, for its verdict."""
    if step.state is None or step.state.pending is None:
        return step
    before = share_good(case.peers, case.now - case.spec.tick_seconds, case.now)
    return replace(step, state=replace(step.state, pending=replace(step.state.pending, peers_before=before)))


def _unread(known: PodState | None, view: PodView, now: float) -> Step:
    outcome = Outcome.STALE_METRICS if known else Outcome.WARMING
    return Step(known, record=Record(now, view.name, "gate", outcome, "no window of this pod is at hand"))


def _tick(case: Case) -> Step:
    evidence = gather(case.windows, case.spec.tick_seconds)
    if evidence is not None and not case.stale:
        case = replace(case, state=learn.absorb(case.state, case.windows, evidence, _of_class(case)))
        case = replace(case, state=watch(case))
    if case.frozen:
        return hold(case, Outcome.FROZEN, case.frozen)
    if case.stale:
        return hold(case, Outcome.STALE_METRICS, "no window in the last three polls: nothing moves on old news")
    if evidence is None:
        return hold(case, Outcome.WARMING, "the pod is new: there is no difference of windows yet")
    if step := emergency(case):
        return step
    outside = back_inside(case.last.target, case.last, case.spec)
    into_bounds = Change("bounds", "the value in force lies outside the bounds", outside)
    if outside and case.spec.mode == "Auto":
        return carry_out(case, into_bounds)
    case, knobs = recall.recalled(case, evidence)
    step = adopt(case) or (carry_out(case, knobs) if knobs else _weigh(case, evidence))
    nothing_else = outside and step.record is not None and not step.record.changes
    return carry_out(replace(case, state=step.state or case.state), into_bounds) if nothing_else else step


def _of_class(case: Case) -> list[Learned]:
    return [entry for entry in case.learned if entry.pod_class == case.view.pod_class]


def _weigh(case: Case, evidence: Evidence) -> Step:
    """Rule 4 on the move before, then the rules that may move next."""
    if case.state.distrust == 2:
        if case.now < case.state.hold_until:
            return hold(case, Outcome.MISPREDICTED, "predictions failed four times: holding the verified setting", "verdict")
        case = case.with_state(distrust=0, pending=None, spread={}, prefill={}, sums={})
    if pending := case.state.pending:
        settled = settle(case, pending, evidence, lambda c, free: _setpoint(c, evidence, free))
        if isinstance(settled, Step):
            return settled
        case, came_out = settled
        return _beside(came_out, _next(case, evidence))
    return _next(case, evidence)


def _next(case: Case, evidence: Evidence) -> Step:
    """Pressure before the set-point; the queue depth, which always may, beside either."""
    step = pressure(case)
    if step is None or step.state is None or step.record is None:
        return _setpoint(case, evidence, batch_free=True)
    depth = _setpoint(replace(case, state=step.state), evidence, batch_free=False)
    if depth.record is None or not depth.record.changes:
        return step
    record = replace(
        step.record, reason=f"{step.record.reason}; {depth.record.reason}", predicted=depth.record.predicted,
        changes={**step.record.changes, **depth.record.changes}, inputs={**step.record.inputs, **depth.record.inputs},
    )
    move = replace(step.move, knobs={**step.move.knobs, **depth.move.knobs}) if step.move and depth.move else None
    return Step(depth.state, move, record)


def _beside(came_out: Shown, step: Step) -> Step:
    """The tick's record with what was observed of the move before, and what had been predicted for it unless a new one is."""
    if step.record is None:
        return step
    predicted = step.record.predicted or came_out.predicted
    return replace(step, record=replace(step.record, predicted=predicted, observed=came_out.observed))


def _setpoint(case: Case, evidence: Evidence, batch_free: bool) -> Step:
    """Rule 5, and rule 3 where there is something to go by."""
    spec, span = case.spec, evidence.span
    if spec.ttft is None or spec.tpot is None:
        return hold(case, Outcome.NO_OBJECTIVES, "both latency objectives are needed to weigh one setting against another")
    recent = back_to(case.windows, spec.tick_seconds - 1.0)
    if recent is not None and recent.offered == 0 and case.last.running == 0 and case.last.waiting == 0:
        return hold(case, Outcome.IDLE, "no traffic: what was learned is kept and nothing is lowered", "idle")
    pod = learn.model(case.state, case.windows, span)
    if pod is None or not can_predict(case, evidence):
        shown = {"intervals": float(evidence.intervals), "completions": evidence.completions, "seconds": span.seconds}
        return hold(case, Outcome.INSUFFICIENT_DATA, "too few finished rows to predict from", "set-point", Shown(shown))
    reach = reach_of(case, span.head_wait)
    if not batch_free:
        reach = reach.held()
    choice = choose(pod, spec.ttft, spec.tpot, reach)
    case, choice, confirming = _turn(case, pod, reach, choice, spec.ttft, spec.tpot)
    inputs = _inputs(pod, choice)
    knobs = _differences(reach, choice)
    turns = (choice.batch - reach.batch) * case.state.direction < 0
    doubtful = choice.gains and choice.batch != reach.batch and not certain(pod, spec.ttft, spec.tpot, reach, choice, turns)
    if doubtful:  # the queue alone may be worth a move
        choice = choose(pod, spec.ttft, spec.tpot, reach.held())
        inputs, knobs = _inputs(pod, choice), _differences(reach, choice)
    if not knobs or not choice.gains:
        if confirming:
            reason = "the batch is wanted the other way: a second tick must want it too"
            return hold(case, Outcome.CONFIRMING, reason, "set-point", Shown(inputs))
        why = "the gain of another batch lies within the error of its prediction" if doubtful else None
        held = hold(case, Outcome.HOLDING, why or _why_hold(choice, pod, span.head_wait), "set-point", Shown(inputs))
        return replace(held, best=not doubtful and case.state.pending is None)
    expected = predict(pod, spec.ttft, spec.tpot, choice.batch, choice.depth)
    reason = f"{choice.goodput:.2f} rows/s are predicted to meet both objectives, {choice.present:.2f} as it is"
    if choice.surge:
        reason = f"as good now, and with {SURGE:g} × the load {reason}"
    comparable = span.old.monotonic >= max(case.last.settled_at, case.state.objectives_since) and span.steady
    return carry_out(case, Change(
        "set-point", reason, knobs, Shown(inputs, expected.shown), expected,
        goodput_before=span.good / span.seconds if comparable else None,
    ))


def can_predict(case: Case, evidence: Evidence) -> bool:
    """Whether enough rows have finished to predict from: in the span, and in what is remembered of their times per token."""
    return evidence.enough and sum(case.state.spread.values()) >= MIN_INTERVALS - 0.5


def reach_of(case: Case, head_wait: Mapping[str, float]) -> Reach:
    """The batch may be raised only where slots are what the head of the queue waits for most."""
    state, target = case.state, case.last.target
    low, high = case.batch_limits()
    if state.ceiling is not None and case.now < state.ceiling_until:
        high = max(min(high, state.ceiling - 1), min(high, target.max_batch_size))
    if case.highest is not None:
        high = max(low, min(high, case.highest))
    shallow, deep = limits("max_queue_depth", case.last, case.spec) or (target.max_queue_depth,) * 2
    slots = head_wait.get("slots", 0.0)
    return Reach(
        target.max_batch_size, target.max_queue_depth, (low, high), (int(shallow), int(deep)),
        may_raise=slots > 0 and slots >= max(head_wait.values()), one_step=state.distrust == 1,
    )


def _turn(case: Case, pod: Model, reach: Reach, choice: Choice, ttft: float, tpot: float) -> tuple[Case, Choice, bool]:
    """A change of direction must gain 10 % in two ticks running; until then the batch stays."""
    if (choice.batch - reach.batch) * case.state.direction >= 0:
        return case.with_state(reversal_ticks=0), choice, False
    ticks = case.state.reversal_ticks + 1 if choice.goodput >= REVERSAL_GAIN * choice.present else 0
    case = case.with_state(reversal_ticks=ticks)
    if ticks >= REVERSAL_TICKS:
        return case, choice, False
    return case, choose(pod, ttft, tpot, reach.held()), ticks > 0


def _differences(reach: Reach, choice: Choice) -> dict[str, float]:
    pairs = {"max_batch_size": (reach.batch, choice.batch), "max_queue_depth": (reach.depth, choice.depth)}
    return {knob: new for knob, (old, new) in pairs.items() if new != old}


def _why_hold(choice: Choice, pod: Model, head_wait: Mapping[str, float]) -> str:
    if choice.present <= NIL * pod.mix.offered:
        return "no setting within reach is predicted to meet the objectives"
    bound = max(head_wait, key=lambda k: head_wait[k], default="slots")
    if bound != "slots" and head_wait[bound] > 0:
        return f"the queue waits for {bound}, not for slots: a larger batch would not help"
    return "no other setting is predicted to be better by 2 %"


def _inputs(pod: Model, choice: Choice) -> dict[str, float]:
    p, m = pod.plant, pod.mix
    return {
        "a": p.a, "b": p.b, "c": p.c, "p": p.p, "offered": m.offered, "output": m.output, "prefill": m.prefill,
        "context": m.context, "present_goodput": choice.present, "best_goodput": choice.goodput,
    }
