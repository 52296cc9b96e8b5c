"""Why a pod is steered as it is, read from what the law itself knows: nothing here decides.

The functions call the law's own parts (evidence, plant, chain, reach), so an explanation cannot tell another story than the
next tick. Cost: at most MOST_SETTINGS evaluations of the chain a pod, milliseconds each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weir_operator.tuner import learn
from weir_operator.tuner.case import Case, open_case
from weir_operator.tuner.chain import Model, predict
from weir_operator.tuner.law import REVERSAL_GAIN, REVERSAL_TICKS, can_predict, reach_of
from weir_operator.tuner.plant import fit, normal_equations, solve
from weir_operator.tuner.setpoint import GAIN, NIL, SURGE, Choice, Reach, choose
from weir_operator.tuner.types import Outcome, PodState, PodView, Record, TunerSpec
from weir_operator.tuner.window import LONGEST, MIN_COMPLETIONS, MIN_INTERVALS, Evidence, back_to, gather, refusals
from weir_server.contract import BOUNDS, Plant, Window

MOST_SETTINGS = 9


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One part of the step time in seconds. `error`: its standard error, None where the fit holds it at zero."""

    value: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Fit:
    """step = a + b·rows + c·context + p·prefill tokens. `residual`: share of the mean step that it leaves unexplained."""

    coefficients: Mapping[str, Coefficient]
    prefill_tokens: int
    steps: float  # real ones, the old ones discounted
    residual: float | None


@dataclass(frozen=True, slots=True)
class Limit:
    """What holds the pod back now. `what`: one of BOUNDS, or `nothing`. `head_wait`: share of the last tick by bound."""

    what: str
    running: int
    batch: int
    waiting: int
    queue: int
    kv_use: float | None  # of the budget
    refused: float  # rows in the last tick
    head_wait: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """A batch and a queue depth with what is predicted of them. `mark`: `present`, `best`, or nothing."""

    batch: int
    queue: int
    goodput: float  # rows per second that meet both objectives
    interval: float  # seconds per token
    accepted: float  # share of arrivals
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One pod. What is not known yet is None or empty."""

    pod: str
    record: Record | None  # of its last tick
    next_tick: float | None  # operator's clock
    limit: Limit | None = None
    fit: Fit | None = None
    traffic: Mapping[str, float] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    reachable: bool | None = None  # whether any setting within reach is predicted to meet the objectives
    would_change: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(
    state: PodState | None, view: PodView, spec: TunerSpec, now: float, record: Record | None, next_tick: float | None,
) -> Explanation:
    """Of one pod, from the law's memory of it (`state`), its readings and the record of its last tick."""
    case = open_case(state, view, spec, now)
    if case is None:
        return Explanation(view.name, record, next_tick, would_change=("A reading of the pod: none is at hand.",))
    evidence = gather(case.windows, spec.tick_seconds)
    model = learn.model(case.state, case.windows, evidence.span) if evidence else None
    reach = reach_of(case, evidence.span.head_wait) if evidence else None
    choice = choose(model, spec.ttft, spec.tpot, reach) if model and reach and spec.ttft and spec.tpot else None
    mix = case.state.mix
    return Explanation(
        view.name, record, next_tick,
        limit=limit_of(case.windows, spec.tick_seconds),
        fit=fit_of(case.state.sums, case.state.prior),
        traffic={k: getattr(mix, k) for k in ("offered", "output", "prefill", "context")} if mix else {},
        settings=_settings(model, spec, reach, choice) if model and reach and choice else (),
        reachable=choice.goodput > NIL * model.mix.offered if model and choice else None,
        would_change=tuple(_would_change(case, evidence, model, reach, choice, record)),
    )


# ---------------------------------------------------------------- what limits it now

def limit_of(windows: Sequence[Window], seconds: float) -> Limit:
    """Over the readings of the last `seconds`: what the head of the queue waited for most, if anybody waited."""
    last, span = windows[-1], back_to(windows, seconds - 1.0)
    spent = span.head_wait if span and span.seconds > 0 else {}
    waits = {b: min(1.0, spent.get(b, 0.0) / span.seconds) if span and spent else 0.0 for b in BOUNDS}
    longest = max(BOUNDS, key=lambda b: waits[b])
    what = last.bound or (longest if waits[longest] > 0 else "nothing")
    budget = last.effective.kv_cache_budget
    refused = refusals(span.new) - refusals(span.old) if span else 0
    return Limit(
        what, last.running, last.effective.max_batch_size, last.waiting, last.effective.max_queue_depth,
        last.kv_used_bytes / budget if budget else None, float(refused), waits,
    )


# ---------------------------------------------------------------- the plant and how sure it is

def fit_of(sums: Mapping[str, float], prior: Plant | None) -> Fit | None:
    """The regression with its errors; None before anything was measured. The boot measurement counts as the steps that the
    fit gives it."""
    fitted = fit(sums, prior)
    if fitted is None:
        return None
    values = {name: getattr(fitted, name) for name in "abcp"}
    steps = sums.get("steps", 0.0)
    used = [i for i, name in enumerate("abcp") if values[name] > 0]
    left = _unexplained(sums, [values[name] for name in "abcp"]) if steps > len(used) else None
    errors = _errors(sums, prior, used, left / (steps - len(used))) if left is not None else {}
    mean = sums["step_seconds"] / steps if steps else 0.0
    return Fit(
        {name: Coefficient(values[name], errors.get(i)) for i, name in enumerate("abcp")},
        fitted.prefill_tokens, steps, math.sqrt(left / steps) / mean if left is not None and mean else None,
    )


def _unexplained(sums: Mapping[str, float], x: Sequence[float]) -> float:
    """Σ(y − ŷ)² over the real steps."""
    matrix, vector = normal_equations(sums, None)
    explained = sum(x[i] * (2 * vector[i] - sum(matrix[i][j] * x[j] for j in range(4))) for i in range(4))
    return max(0.0, sums["yy"] - explained)


def _errors(sums: Mapping[str, float], prior: Plant | None, used: Sequence[int], variance: float) -> dict[int, float]:
    """Standard errors: the roots of the diagonal of variance · (XᵀX)⁻¹ over the coefficients that are above zero."""
    matrix, _ = normal_equations(sums, prior)
    scale = [math.sqrt(matrix[i][i]) or 1.0 for i in range(4)]
    system = [[matrix[i][j] / scale[i] / scale[j] for j in used] for i in used]
    out = {}
    for at, i in enumerate(used):
        column = solve(system, [1.0 if k == at else 0.0 for k in range(len(used))])
        if column and column[at] > 0:
            out[i] = math.sqrt(variance * column[at]) / scale[i]
    return out


# ---------------------------------------------------------------- the neighbours

def _settings(model: Model, spec: TunerSpec, reach: Reach, choice: Choice) -> tuple[Setting, ...]:
    """The present setting, its neighbours inside the limits, and the best within reach, in order."""
    assert spec.ttft and spec.tpot
    b, q = reach.batch, reach.depth
    near = [(b, q), (choice.batch, choice.depth)]
    near += [(n, q) for n in (math.ceil(b / 2), b - 1, b + 1, 2 * b)] + [(b, n) for n in (q // 2, 2 * max(1, q))]
    (low, high), (shallow, deep) = reach.batch_limits, reach.depth_limits
    inside = [(n, d) for n, d in dict.fromkeys(near) if (n, d) == (b, q) or (low <= n <= high and shallow <= d <= deep)]
    found = []
    for n, d in sorted(inside[:MOST_SETTINGS]):
        p = predict(model, spec.ttft, spec.tpot, n, d)
        mark = "present" if (n, d) == (b, q) else "best" if (n, d) == (choice.batch, choice.depth) else ""
        found.append(Setting(n, d, p.goodput, p.interval, p.accepted, mark))
    return tuple(found)


# ---------------------------------------------------------------- what would change its mind

def _would_change(
    case: Case, evidence: Evidence | None, model: Model | None, reach: Reach | None, choice: Choice | None,
    record: Record | None,
) -> list[str]:
    """Sentences, the nearest condition first."""
    if gate := _gate(case, evidence):
        return [gate]
    state, now = case.state, case.now
    said = []
    if state.pending:
        asked = ", ".join(f"{k} {v:g}" for k, v in state.pending.after.items())
        said.append(
            f"A clean window behind the move to {asked}, made {max(0.0, now - state.pending.at):.0f} s ago: "
            "until it is judged only the queue depth moves."
        )
    elif model and reach and choice:
        said += _about_settings(case.spec, model, reach, choice)
    if record and record.outcome is Outcome.CONFIRMING:
        said.append(f"The next tick: a turn of the batch must gain {REVERSAL_GAIN - 1:.0%} in {REVERSAL_TICKS} ticks running.")
    if state.distrust == 2 and now < state.hold_until:
        said.append(f"Time: predictions failed four times; the last good setting is held for {state.hold_until - now:.0f} s.")
    elif state.distrust == 1:
        said.append("A prediction that comes true: two missed, so the batch moves by one row at a time.")
    if state.ceiling is not None and now < state.ceiling_until:
        said.append(f"Time: a batch of {state.ceiling} failed and is not tried again for {state.ceiling_until - now:.0f} s.")
    return said or ["A row that generates tokens: there is nothing to predict from yet."]


def _gate(case: Case, evidence: Evidence | None) -> str | None:
    """What must be true before anything is weighed at all; the first that is not."""
    if case.frozen:
        return f"An end of what freezes it: {case.frozen}."
    if case.stale:
        return "An answer of the pod: its last readings are too old to act on."
    if case.spec.ttft is None or case.spec.tpot is None:
        return "Objectives: without spec.slo there is no goodput to raise."
    if evidence is None:
        return "A second reading: the pod is new."
    if evidence.span.offered <= 0 and not case.last.running:
        return "Traffic: nothing has arrived, and an idle pod is left as it is."
    if not can_predict(case, evidence):
        return (
            f"More finished rows: {MIN_COMPLETIONS} completions and {MIN_INTERVALS} times per token are needed within "
            f"{LONGEST / 60:.0f} minutes, there are {evidence.completions:.0f} and {evidence.intervals}."
        )
    return None


def _about_settings(spec: TunerSpec, model: Model, reach: Reach, choice: Choice) -> list[str]:
    if choice.goodput <= NIL * model.mix.offered:
        least = min(reach.batch_limits[0], reach.batch)
        each = predict(model, spec.ttft or 0.0, spec.tpot or 0.0, least, reach.depth).interval
        said = [
            "Objectives that this pod can meet, or less load: no setting in reach meets them. With a batch of "
            f"{least} a token is predicted to take {each * 1e3:.0f} ms, spec.slo asks for {(spec.tpot or 0.0) * 1e3:.0f} ms."
        ]
    elif choice.stays(reach) or not choice.gains:
        said = [
            f"A setting predicted to serve {GAIN * choice.present:.2f} rows/s in time: {GAIN - 1:.0%} above the present "
            f"{choice.present:.2f}."
        ]
    else:
        under = f" with {SURGE:g} × the load, and to as many as now without" if choice.surge else ""
        said = [
            f"Nothing: batch {choice.batch} with queue {choice.depth} is predicted to lead to {choice.goodput:.2f} rows/s in "
            f"time against {choice.present:.2f}{under}."
        ]
    low, high = reach.batch_limits
    if not reach.may_raise:
        said.append("A queue whose head waits for slots: for anything else a larger batch would not help.")
    elif reach.batch >= high:
        said.append(f"A higher limit: the batch is at the largest value allowed, {high} (bound, envelope or ceiling).")
    if reach.batch <= low:
        said.append(f"A lower limit: the batch is at the smallest value allowed, {low}.")
    return said
