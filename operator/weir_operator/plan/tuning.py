"""Between the manifest and the tuner: what the user declared as a TunerSpec, and what the tuner did as a status."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from weir_operator.api.quantity import parse_bytes, parse_duration
from weir_operator.api.types import InferenceDeployment, Spec
from weir_operator.plan.args import initial_knobs
from weir_operator.plan.observed import TuningReport
from weir_operator.tuner.replicas import ReplicaDecision, ReplicaState
from weir_operator.tuner.types import Learned, Outcome, PodView, Poll, Record, TunerSpec, TunerState
from weir_operator.tuner.window import STALE_POLLS
from weir_server.contract import Knobs, Window

HISTORY_LENGTH = 20
MAX_PODS = 50
MAX_CEILINGS = 32
MAX_STATUS_BYTES = 32 * 1024
OTHER_BYTES = 8 * 1024
"""Of the status, for what is not status.tuning: the conditions above all."""
MIN_FINISHED = 10
"""Fewer finished requests say nothing about attainment."""
RECENT_SECONDS = 60.0
ALL_PODS = "(all)"
"""In the history: what was not done to one pod."""

_CALMEST_FIRST = (
    Outcome.HOLDING, Outcome.INCONCLUSIVE, Outcome.ADVISED, Outcome.IDLE, Outcome.WARMING, Outcome.INSUFFICIENT_DATA,
    Outcome.NO_OBJECTIVES, Outcome.CONFIRMING, Outcome.WAITING, Outcome.SETTLING, Outcome.MOVED, Outcome.REVERTED,
    Outcome.DRAIN_OVERDUE, Outcome.NOT_SET, Outcome.FROZEN, Outcome.MISPREDICTED, Outcome.STALE_METRICS,
)
_ACTS = {Outcome.MOVED, Outcome.REVERTED}


def tuner_spec(spec: Spec, tick_seconds: float, poll_seconds: float) -> TunerSpec:
    """The manifest's objectives and bounds in the tuner's units. A bound that is not declared is the envelope's (None).

    Without objectives Auto is Advise: there is nothing to steer for, so the declared start values are in force.
    """
    knobs = spec.tuning.knobs
    watermark, budget = knobs.admission_watermark_percent, knobs.kv_cache_budget
    bounds: dict[str, tuple[float | None, float | None]] = {
        "max_batch_size": (knobs.max_batch_size.min, knobs.max_batch_size.max),
        "max_queue_depth": (knobs.max_queue_depth.min, knobs.max_queue_depth.max),
        "kv_cache_budget": (_bytes(budget.min), _bytes(budget.max)),
        "admission_watermark": (_share(watermark.min), _share(watermark.max)),
    }
    return TunerSpec(
        ttft=parse_duration(spec.slo.ttft) if spec.slo else None,
        tpot=parse_duration(spec.slo.tpot) if spec.slo else None,
        bounds={knob: ends for knob, ends in bounds.items() if ends != (None, None)},
        initial=initial_knobs(knobs),
        mode="Advise" if spec.tuning.mode == "Auto" and not spec.slo else spec.tuning.mode,
        paused=spec.tuning.paused,
        tick_seconds=tick_seconds,
        poll_seconds=poll_seconds,
    )


def _bytes(text: str | None) -> int | None:
    return parse_bytes(text) if text is not None else None


def _share(percent: int | None) -> float | None:
    return percent / 100 if percent is not None else None


def came_out(records: Iterable[Record], failed: Mapping[str, str]) -> tuple[Record, ...]:
    """Decisions as they came out. `failed`: pod → why its move was not applied; what was not set did not move."""
    return tuple(
        replace(r, outcome=Outcome.NOT_SET, reason=f"{failed[r.pod]}; wanted: {r.reason}") if r.pod in failed else r
        for r in records
    )


def remembered(history: Sequence[Mapping[str, Any]], records: Iterable[Record]) -> list[dict[str, Any]]:
    """History, newest first, with what `records` add: every act, and otherwise only what a pod was not already said to do,
    or advised to."""
    out = [dict(h) for h in history]
    for record in records:
        latest, entry = next((h for h in out if h["pod"] == record.pod), {}), _entry(record)
        said = ("outcome", "rule", "changes") if record.outcome is Outcome.ADVISED else ("outcome", "rule")
        if record.outcome in _ACTS or any(latest.get(k) != entry.get(k) for k in said):
            out.insert(0, entry)
    return out[:HISTORY_LENGTH]


def scaled(history: Sequence[Mapping[str, Any]], before: int, decision: ReplicaDecision, now: float) -> list[dict[str, Any]]:
    """History with another number of pods, which is nobody's but the deployment's."""
    outcome = decision.outcome.value if decision.outcome else ""
    entry = {
        "time": _clock(now), "pod": ALL_PODS, "rule": "replicas", "outcome": outcome, "reason": decision.reason,
        "changes": {"replicas": [before, decision.desired]},
    }
    return [entry, *(dict(h) for h in history)][:HISTORY_LENGTH]


def counted(
    news: TuningReport, wanted: int, last: ReplicaDecision | None, shown: Mapping[str, Any] | None, generation: int,
) -> TuningReport:
    """A report with the number of pods in it, where the operator sets it."""
    status = {**news.status, **({"replicas": shown} if shown else {})}
    return replace(news, status=status, desired=wanted, scaling=last.outcome if last else None, generation=generation)


def proposed(news: TuningReport, rows: int | None) -> TuningReport:
    """A report with the envelope that is proposed, if one is."""
    return news if rows is None else replace(news, status={**news.status, "proposal": {"maxBatchSize": rows}}, proposal=rows)


def _clock(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _entry(record: Record) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "time": _clock(record.t),
        "pod": record.pod, "rule": record.rule, "outcome": record.outcome.value, "reason": record.reason,
    }
    if record.changes:
        entry["changes"] = {knob: [_short(a), _short(b)] for knob, (a, b) in record.changes.items()}
    for name in ("predicted", "observed"):
        if values := getattr(record, name):
            entry[name] = {k: short for k, v in values.items() if (short := _short(v, 3)) is not None}
    return entry


def _short(value: float, digits: int = 10) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.{digits}g}")


def knobs_status(knobs: Knobs) -> dict[str, Any]:
    """Knobs as a user writes them in the manifest."""
    out: dict[str, Any] = {
        "maxBatchSize": knobs.max_batch_size,
        "maxQueueDepth": knobs.max_queue_depth,
        "admissionWatermarkPercent": round(knobs.admission_watermark * 100),
    }
    if knobs.kv_cache_budget is not None:
        out["kvCacheBudget"] = f"{knobs.kv_cache_budget // 2**20}Mi"
    return out


def _span(polls: Sequence[Poll], seconds: float) -> tuple[Window, Window] | None:
    """The first and last window of the same process within the last `seconds`, answered or not."""
    windows = [p.window for p in polls if p.window and polls[-1].at - p.at <= seconds]
    if not windows:
        return None
    first = next(w for w in windows if w.instance == windows[-1].instance)
    return (first, windows[-1]) if first is not windows[-1] else None


def good_percent(pods: Iterable[PodView]) -> int | None:
    """Whole percent of the rows that finished in the polls kept and met both objectives; None where too few did."""
    good = total = 0
    for pod in pods:
        if (span := _span(pod.polls, math.inf)) and span[1].slo_total >= span[0].slo_total:
            total += span[1].slo_total - span[0].slo_total
            good += span[1].slo_good["both"] - span[0].slo_good["both"]
    return round(100 * good / total) if total >= MIN_FINISHED else None


def refused_lately(pods: Iterable[PodView]) -> bool:
    """Whether rows were refused for want of room in the last minute; draining pods and bad requests do not count."""
    def count(window: Window) -> int:
        return sum(sum(window.refused.get(reason, {}).values()) for reason in ("queue_full", "kv_budget"))

    spans = [span for pod in pods if (span := _span(pod.polls, RECENT_SECONDS))]
    return any(count(last) > count(first) for first, last in spans)


def report(
    resource: InferenceDeployment, pods: Mapping[str, PodView], ready: Set[str], outcomes: Mapping[str, Record],
    state: TunerState, history: Sequence[Mapping[str, Any]], silent: Mapping[str, str], drift: str,
    other_contract: tuple[str, ...],
) -> TuningReport:
    """What is published of one deployment, but for what is kept to go on from (`resumable`). `ready`: the pods that should
    answer; `outcomes`: each pod's record of the last tick."""
    tuning, percent = resource.spec.tuning, good_percent(pods.values())
    effective = {name: w.effective for name, pod in sorted(pods.items()) if (w := _last(pod))}
    status: dict[str, Any] = {
        "mode": "Paused" if tuning.paused and tuning.mode != "Disabled" else tuning.mode,
        "pods": [_pod_status(name, knobs, outcomes.get(name)) for name, knobs in list(effective.items())[:MAX_PODS]],
        "history": list(history),
    }
    if percent is not None:
        status["slo"] = f"{percent}%"
    if effective:
        status["knobs"] = knobs_status(next(iter(effective.values())))
    if state.learned:
        status["learned"] = [rounded(_learned_status(entry)) for entry in state.learned]
    now = max((pod.polls[-1].at for pod in pods.values() if pod.polls), default=math.inf)
    under = sorted((name, p.ceiling) for name, p in state.pods.items() if p.ceiling is not None and now < p.ceiling_until)
    if under:
        status["ceilings"] = [{"pod": name, "maxBatchSize": batch - 1} for name, batch in under[:MAX_CEILINGS]]
    quiet = {name: why for name, why in silent.items() if name in ready}
    said = (record for name, record in outcomes.items() if name in ready)
    worst = max(said, key=lambda r: _CALMEST_FIRST.index(r.outcome), default=None)
    return TuningReport(
        status=status, ready=len(ready), answering=len(ready) - len(quiet), silent=quiet, good_percent=percent,
        refusing=refused_lately(pods.values()), outcome=worst.outcome if worst else None, reason=worst.reason if worst else "",
        drift=drift, other_contract=other_contract,
    )


def resumable(news: TuningReport, state: TunerState, replicas: ReplicaState | None) -> TuningReport:
    """A report with what the next operator goes on from. Alone it is not worth a write, and of a thousand deployments it is
    most of what a report costs: so it comes last."""
    saved = _bounded(state, MAX_STATUS_BYTES - OTHER_BYTES - len(json.dumps(news.status)))
    count = {"replicas": rounded(replicas.to_json())} if replicas else {}
    return replace(news, status={**news.status, "state": {**saved, **count}})


def _learned_status(entry: Learned) -> dict[str, Any]:
    """Without its time and in two digits: what hardly changed is not worth a write."""
    return {
        "pods": entry.pod_class, "maxBatchSize": entry.batch, "maxQueueDepth": entry.depth,
        "rowsPerSecond": _short(entry.capacity, 2),
        "workload": {"output": _short(entry.output, 1), "prefillPerToken": _short(entry.prefill, 1)},
    }


def _pod_status(name: str, knobs: Knobs, record: Record | None) -> dict[str, Any]:
    return {"name": name, "knobs": knobs_status(knobs), **({"outcome": record.outcome.value} if record else {})}


def _last(pod: PodView) -> Window | None:
    """What the pod said of itself, while that is fresh."""
    return next((p.window for p in reversed(pod.polls[-STALE_POLLS:]) if p.window), None)


def _bounded(state: TunerState, room: int) -> dict[str, Any]:
    """The state to resume from, as many pods as fit into `room` bytes: one that is left out resumes from what it reads back."""
    whole = rounded(state.to_json())
    pods = whole.pop("pods")
    kept = {}
    for name, pod in sorted(pods.items()):
        room -= len(json.dumps({name: pod}))
        if room < 0:
            break
        kept[name] = pod
    return {**whole, "pods": kept}


def rounded(value: Any) -> Any:
    """`value` with floats cut to nine digits (times since 1970 to tenths), since a status must stay small, and without the
    keys that hold None, since null in a merge patch means "delete": the API server would never give them back."""
    if isinstance(value, float):
        return None if not math.isfinite(value) else round(value, 1) if abs(value) >= 1e8 else float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {str(k): short for k, v in value.items() if (short := rounded(v)) is not None}
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    return value

