"""The values that go into one decision of the tuner and come out of it.

`decide(state, pods, spec, now) -> Decision` is pure: what it may know is in these types, and what it wants done is too. They
go to JSON and back without loss, so any decision can be saved, resumed after a restart, and replayed. Units: seconds, rows,
bytes, rows per second. Clocks: `Poll.at` and `now` are the operator's; times inside a `Window` are the pod's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from weir_server.contract import ControlState, Plant, Window

HISTORY_SECONDS = 330.0
"""How long the caller keeps polls: evidence is gathered over at most five minutes, plus one tick."""


class Outcome(StrEnum):
    """What came of one pod in one tick. A closed catalogue: "nothing changed" always says why."""

    MOVED = "Moved"  # knobs were changed for the reason given
    NOT_SET = "NotSet"  # they would have been, but the pod did not take them: said by the caller, who knows
    ADVISED = "Advised"  # they would have been, but the mode is Advise
    REVERTED = "Reverted"  # the last move made goodput worse: the values before it are back
    HOLDING = "Holding"  # nothing is predicted to be better by enough
    CONFIRMING = "Confirming"  # a change of direction waits for a second tick that wants it too
    WAITING = "Waiting"  # a larger batch is wanted, but another pod tries it first, or pods are just starting
    SETTLING = "Settling"  # the last move is not effective yet, or has no clean window behind it
    DRAIN_OVERDUE = "DrainOverdue"  # it should have settled long ago: the batch is frozen, the queue is not
    WARMING = "Warming"  # the pod is new: no difference of windows yet
    INSUFFICIENT_DATA = "InsufficientData"  # five minutes did not bring the evidence that a move needs
    IDLE = "Idle"  # no traffic: what was learned is kept, nothing is lowered
    NO_OBJECTIVES = "NoObjectives"  # without both latency objectives there is no goodput to raise
    STALE_METRICS = "StaleMetrics"  # no fresh window: nothing is raised
    MISPREDICTED = "Mispredicted"  # predictions failed: back to the last verified setting, and hold
    INCONCLUSIVE = "Inconclusive"  # the move could not be judged (the new slots were not used): kept, not trusted
    FROZEN = "Frozen"  # paused, disabled, or draining


@dataclass(frozen=True, slots=True)
class TunerSpec:
    """What the user declared. `bounds`: knob → (min, max), where None means the envelope's end. `initial`: knob → value."""

    ttft: float | None
    tpot: float | None
    bounds: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    initial: Mapping[str, float] = field(default_factory=dict)
    mode: str = "Auto"  # Auto | Advise | Disabled
    paused: bool = False
    tick_seconds: float = 30.0
    poll_seconds: float = 5.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TunerSpec:
        """Raises TypeError for a field that is not known."""
        values = dict(data)
        values["bounds"] = {knob: (low, high) for knob, (low, high) in data.get("bounds", {}).items()}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Poll:
    """One attempt to read a pod's window; None means that it failed. Absent is not zero."""

    at: float
    window: Window | None


@dataclass(frozen=True, slots=True)
class PodView:
    """What is known of one pod. `polls`: oldest first, the last HISTORY_SECONDS; `control`: the last state that was read."""

    name: str
    pod_class: str
    control: ControlState | None
    polls: tuple[Poll, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pod_class": self.pod_class,
            "control": self.control.to_wire() if self.control else None,
            "polls": [{"at": p.at, "window": p.window.to_wire() if p.window else None} for p in self.polls],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PodView:
        """Raises KeyError, TypeError or ValueError on another shape."""
        return cls(
            name=data["name"],
            pod_class=data["pod_class"],
            control=ControlState.from_wire(data["control"]) if data["control"] else None,
            polls=tuple(Poll(p["at"], Window.from_wire(p["window"]) if p["window"] else None) for p in data["polls"]),
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """The traffic as the law sees it, smoothed. `quantiles` are λ's where it spreads more than Poisson, else (λ,)."""

    offered: float  # λ: rows per second, refusals included, retries discounted
    quantiles: tuple[float, ...]
    output: float  # O: generated tokens per row
    prefill: float  # ρ: prefilled tokens (uncached and recomputed) per generated token
    context: float  # context tokens read per decoding row and step
    ticks: int = 1  # how many are in the means
    rows: float = 0.0  # how many are in the means of O, ρ and context
    output_variance: float = 0.0  # of one tick's O and ρ about their means
    prefill_variance: float = 0.0
    offered_variance: float = 0.0  # of one tick's λ about its mean
    rate_ticks: int = 1  # how many are in the mean of λ
    odd_rate: int = 0  # ticks in a row whose λ lay far from its mean, signed by the side
    odd_ticks: int = 0  # ticks in a row whose ρ did
    clump: float = 1.0  # mean rows that come at once, beyond what the rates of polls tell
    odd_square: float = 0.0  # of the last such tick's distance in ρ, until it is known whether it was a shift


@dataclass(frozen=True, slots=True)
class Pending:
    """A move of batch, watermark or budget that is not judged yet, with what was predicted for it."""

    at: float  # operator's clock
    before: Mapping[str, float]
    after: Mapping[str, float]
    offered: float  # λ then
    predicted_goodput: float | None = None  # rows per second; None where the rule predicts none
    predicted_interval: float | None = None  # mean time per output token, seconds
    goodput_before: float | None = None  # of the window that led to the move
    peers_before: float | None = None  # share of the rows offered that was good on the pods beside a canary


@dataclass(frozen=True, slots=True)
class PodState:
    """All that the tuner remembers of one pod between two calls."""

    instance: str
    seen: float  # pod's clock: the last window that went into the sums
    since: float = 0.0  # operator's clock when the process was first read
    placed: bool = False  # what was learned before was considered as a start
    recall: bool = False  # the workload shifted, and what is known of the new one was not looked up yet
    trusted: bool = False  # the last prediction came true
    prior: Plant | None = None  # as the server measured itself at boot
    sums: Mapping[str, float] = field(default_factory=dict)  # discounted sums of the regression
    mix: Mix | None = None
    objectives: Mapping[str, float] = field(default_factory=dict)  # ttft and tpot, where they are declared
    objectives_since: float = 0.0  # pod's clock: good rows before this reading were counted by others
    spread: Mapping[int, float] = field(default_factory=dict)  # z: weights by histogram bucket
    prefill: Mapping[int, float] = field(default_factory=dict)  # f, in units of y: weights by histogram bucket
    pending: Pending | None = None
    direction: int = 0  # sign of the last batch move
    reversal_ticks: int = 0  # ticks in a row that wanted the other one
    misses: int = 0  # predictions off in a row
    distrust: int = 0  # 0: moves are free; 1: steps of one; 2: hold the verified setting
    hold_until: float = 0.0
    verified: Mapping[str, float] = field(default_factory=dict)  # last setting whose prediction came true
    ceiling: int | None = None  # a batch size that failed
    ceiling_until: float = 0.0
    ceiling_times: int = 0
    emergency_at: float | None = None
    memory_cut_at: float | None = None
    kv_bound_ticks: int = 0  # settled windows in a row that waited for KV
    calm_since: float | None = None  # no preemption since
    calm_admitted: int = 0  # rows admitted since then with the KV budget well used

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PodState:
        """Raises KeyError or TypeError on another shape. None may be left out: a status in a cluster cannot hold it."""
        v = {f.name: data[f.name] for f in fields(cls) if data.get(f.name) is not None}
        if mix := v.get("mix"):
            v["mix"] = Mix(**{**mix, "quantiles": tuple(mix["quantiles"])})
        for name, kind in (("prior", Plant), ("pending", Pending)):
            if name in v:
                v[name] = kind(**v[name])
        for name in ("spread", "prefill"):  # JSON has string keys only
            v[name] = {int(k): w for k, w in v.get(name, {}).items()}
        return cls(**v)


@dataclass(frozen=True, slots=True)
class Learned:
    """A setting that did well for one workload on one class of pods; outlives the pods that taught it."""

    pod_class: str
    output: float  # the workload's fingerprint: a mix without its rate
    prefill: float
    context: float
    batch: int
    depth: int
    watermark: float
    largest: int  # the largest batch that came out as predicted: up to it no canary is needed
    capacity: float  # rows per second that one pod serves within the objectives
    plant: Plant
    verified_at: float  # operator's clock


@dataclass(frozen=True, slots=True)
class Canary:
    """A pod that tries a batch which its class has not been seen with. `since`: operator's clock."""

    pod: str
    instance: str
    batch: int
    since: float


@dataclass(frozen=True, slots=True)
class TunerState:
    """Of one InferenceDeployment. `TunerState()` is the start; the rest comes from `Decision.state`."""

    next_tick: float | None = None  # operator's clock
    pods: Mapping[str, PodState] = field(default_factory=dict)
    learned: tuple[Learned, ...] = ()  # newest first
    canaries: Mapping[str, Canary] = field(default_factory=dict)  # by class of pods

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TunerState:
        """Raises KeyError or TypeError on another shape."""
        return cls(
            data.get("next_tick"), {name: PodState.from_json(p) for name, p in data["pods"].items()},
            tuple(Learned(**{**v, "plant": Plant(**v["plant"])}) for v in data.get("learned", ())),
            {kind: Canary(**v) for kind, v in data.get("canaries", {}).items()},
        )


@dataclass(frozen=True, slots=True)
class Move:
    """Knobs to set on one pod. `emergency` moves do not wait for anything."""

    pod: str
    knobs: Mapping[str, float]  # max_batch_size, kv_cache_budget and max_queue_depth are whole numbers
    rule: str
    reason: str
    emergency: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One decision about one pod, "no change" included: what an engineer reads when asking why."""

    t: float
    pod: str
    rule: str
    outcome: Outcome
    reason: str  # one sentence
    changes: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # knob → (from, to)
    inputs: Mapping[str, float] = field(default_factory=dict)  # what the rule looked at
    predicted: Mapping[str, float] = field(default_factory=dict)
    observed: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Decision:
    state: TunerState
    moves: tuple[Move, ...] = ()
    records: tuple[Record, ...] = ()
