"""One pod at one call of decide(), what a rule wants done about it, and how that becomes a move, a record and a new state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weir_operator.tuner.chain import Prediction
from weir_operator.tuner.knobs import limits
from weir_operator.tuner.types import Learned, Move, Outcome, Pending, PodState, PodView, Record, TunerSpec
from weir_operator.tuner.window import fresh, readings
from weir_server.contract import Plant, Window

SETTLED_KNOBS = ("max_batch_size", "admission_watermark", "kv_cache_budget")
"""One of these moves per settled window; the queue depth may always."""


@dataclass(frozen=True)
class Case:
    state: PodState
    view: PodView
    windows: Sequence[Window]  # of the present process, oldest first, at least one
    spec: TunerSpec
    now: float
    learned: Sequence[Learned] = ()
    peers: Sequence[PodView] = ()  # the other pods of its class
    highest: int | None = None  # the batch is not to be raised above it in this tick

    @property
    def last(self) -> Window:
        return self.windows[-1]

    @property
    def counted(self) -> list[Window]:
        """The readings since the objectives were changed: only between these can good rows be compared."""
        return [w for w in self.windows if w.monotonic >= self.state.objectives_since]

    @property
    def chunk(self) -> int | None:
        """Bytes of the KV budget's unit."""
        return self.view.control.kv.chunk_bytes if self.view.control else None

    @property
    def frozen(self) -> str | None:
        """Why nothing may move, emergencies included."""
        if self.spec.mode == "Disabled":
            return "tuning is disabled"
        if self.spec.paused:
            return "tuning is paused"
        return "the pod drains" if self.last.draining else None

    @property
    def stale(self) -> bool:
        return not fresh(self.view.polls, self.now, self.spec.poll_seconds)

    def batch_limits(self) -> tuple[int, int]:
        low, high = limits("max_batch_size", self.last, self.spec) or (self.last.target.max_batch_size,) * 2
        return int(low), int(high)

    def with_state(self, **changes: object) -> Case:
        return replace(self, state=replace(self.state, **changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Step:
    """What one call did to one pod. `state` is None for a pod that has never been read. `best`: the setting in force is
    predicted to be the best there is, not just kept for want of evidence."""

    state: PodState | None
    move: Move | None = None
    record: Record | None = None
    best: bool = False


@dataclass(frozen=True)
class Shown:
    """The numbers of a record."""

    inputs: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)


NOTHING = Shown()


@dataclass(frozen=True)
class Change:
    """What a rule wants done, before the mode says whether it is."""

    rule: str
    reason: str
    knobs: Mapping[str, float]
    shown: Shown = NOTHING
    expected: Prediction | None = None  # what the verdict on this change will go by
    outcome: Outcome = Outcome.MOVED
    emergency: bool = False
    goodput_before: float | None = None


def open_case(
    state: PodState | None, view: PodView, spec: TunerSpec, now: float, learned: Sequence[Learned] = (),
    peers: Sequence[PodView] = (),
) -> Case | None:
    """None where no window of the pod is at hand. A new process starts from what its class is known to do, else from what it
    measured of itself."""
    windows = readings(view.polls)
    if not windows:
        return None
    if state is None or state.instance != windows[-1].instance:
        state = PodState(windows[-1].instance, seen=windows[0].monotonic, since=now, prior=_known_plant(learned, view))
    objectives = {k: v for k, v in (("ttft", spec.ttft), ("tpot", spec.tpot)) if v is not None}
    if state.objectives != objectives:
        state = _weighed_anew(state, objectives, windows[-1].monotonic)
    if state.prior is None and view.control is not None and view.control.instance == state.instance:
        state = replace(state, prior=view.control.plant)
    return Case(state, view, windows, spec, now, learned, peers)


def _known_plant(learned: Sequence[Learned], view: PodView) -> Plant | None:
    """What traffic taught of such pods: better than what one measured of itself while it was idle."""
    return next((entry.plant for entry in learned if entry.pod_class == view.pod_class), None)


def _weighed_anew(state: PodState, objectives: Mapping[str, float], since: float) -> PodState:
    """Under new objectives goodput is another quantity: what was predicted of the old one judges nothing. The server's
    totals of good rows go on, so they are compared only from here on."""
    pending = state.pending and replace(state.pending, predicted_goodput=None, goodput_before=None, peers_before=None)
    return replace(state, objectives=objectives, objectives_since=since, pending=pending)


def hold(case: Case, outcome: Outcome, reason: str, rule: str = "gate", shown: Shown = NOTHING) -> Step:
    record = Record(case.now, case.view.name, rule, outcome, reason, {}, shown.inputs, shown.predicted, shown.observed)
    return Step(case.state, record=record)


def carry_out(case: Case, change: Change) -> Step:
    """In Auto a move, a record, and a move to be judged; in Advise the record alone, for nothing has moved."""
    acts, shown = case.spec.mode == "Auto", change.shown
    changes = {k: (getattr(case.last.target, k), v) for k, v in change.knobs.items()}
    record = Record(
        case.now, case.view.name, change.rule, change.outcome if acts else Outcome.ADVISED, change.reason, changes,
        shown.inputs, shown.predicted, shown.observed,
    )
    if not acts:
        return Step(case.state, record=record)
    move = Move(case.view.name, dict(change.knobs), change.rule, change.reason, change.emergency)
    return Step(_after(case, change), move, record)


def _after(case: Case, change: Change) -> PodState:
    state, target, expected = case.state, case.last.target, change.expected
    goodput, interval = (expected.goodput, expected.interval) if expected else (None, None)
    if not any(k in change.knobs for k in SETTLED_KNOBS):
        if state.pending and expected and "max_batch_size" in state.pending.after:  # so does what is expected
            return replace(state, pending=replace(state.pending, predicted_goodput=goodput, predicted_interval=interval))
        return state
    state = replace(state, pending=Pending(
        at=case.now, before={k: getattr(target, k) for k in change.knobs}, after=dict(change.knobs),
        offered=state.mix.offered if state.mix else 0.0, goodput_before=change.goodput_before,
        predicted_goodput=goodput, predicted_interval=interval,
    ))
    grown = change.knobs.get("max_batch_size", target.max_batch_size) - target.max_batch_size
    return replace(state, direction=1 if grown > 0 else -1, reversal_ticks=0) if grown else state
