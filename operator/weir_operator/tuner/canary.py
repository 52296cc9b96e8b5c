"""A larger batch is tried on one pod first, where there are others of its class.

A raise needs no canary up to the largest batch that came out as predicted for this class and workload, nor while the pod's
last prediction came true. Otherwise the least loaded pod that wants one tries it; the others keep their batch (their queues
stay free) until its verdict: kept, then they may follow, a quarter of them a tick; reverted, then its batch is a ceiling for
all of them; inconclusive, then nobody follows. A canary ends with its pod, its process, its move or its deadline, so none of
a rollout, a restart, an edit of the bounds or a change of leader leaves one behind. Two pods: one tries, one is the measure.
One pod: it moves, and takes it back by itself if that was worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from weir_operator.tuner import memory
from weir_operator.tuner.case import Case, Step
from weir_operator.tuner.types import Canary, Outcome, PodState, TunerState

DEADLINE = 900.0
SHARE = 0.25
"""Of a class's pods, how many follow a canary in one tick."""
STARTING_TICKS = 2
"""Raises wait for so long after another pod appeared: what it will take over is not known yet."""


def wants_raise(case: Case, step: Step) -> int | None:
    """The larger batch that a set-point step asks for, where it is going to be carried out."""
    if step.move is None or step.move.rule != "set-point":
        return None
    batch = int(step.move.knobs.get("max_batch_size", 0))
    return batch if batch > case.last.target.max_batch_size else None


def still_running(canaries: Mapping[str, Canary], pods: Mapping[str, PodState], now: float) -> dict[str, Canary]:
    """Those whose move still waits for its verdict."""
    kept = {}
    for kind, canary in canaries.items():
        state = pods.get(canary.pod)
        pending = state.pending if state and state.instance == canary.instance else None
        if pending and pending.after.get("max_batch_size") == canary.batch and now - canary.since < DEADLINE:
            kept[kind] = canary
    return kept


def held_back(
    state: TunerState, cases: Mapping[str, Case], steps: Mapping[str, Step], running: Mapping[str, Canary], now: float
) -> tuple[dict[str, str], dict[str, Canary]]:
    """Pods whose raise must wait, each with the reason; and the canaries that begin with this tick."""
    reasons: dict[str, str] = {}
    begun: dict[str, Canary] = {}
    for kind, names in _classes(cases).items():
        wanting = {name: batch for name in names if (batch := wants_raise(cases[name], steps[name]))}
        if len(names) < 2 or not wanting:
            continue
        fresh = {n for n in names if now - cases[n].state.since < STARTING_TICKS * cases[n].spec.tick_seconds}
        if fresh:
            reasons |= dict.fromkeys(set(wanting) - fresh, "another pod has just started")
        unproven = {n: b for n, b in wanting.items() if n not in reasons and not _proven(state, cases[n], b)}
        chosen = None
        if unproven and kind not in running:
            chosen = min(unproven, key=lambda n: (cases[n].last.running + cases[n].last.waiting, n))
            begun[kind] = Canary(chosen, cases[chosen].state.instance, unproven[chosen], now)
        first = running.get(kind) or begun.get(kind)
        if first:
            reasons |= dict.fromkeys(set(unproven) - {chosen}, f"{first.pod} tries a batch of {first.batch} first")
        following = sorted(n for n in wanting if n not in reasons and n != chosen and not cases[n].state.trusted)
        late = following[max(1, math.ceil(SHARE * len(names))):]
        reasons |= dict.fromkeys(late, "a quarter of the pods follow in one tick")
    return reasons, begun


def _proven(state: TunerState, case: Case, batch: int) -> bool:
    known = memory.largest(state.learned, case.view.pod_class, case.state.mix)
    return case.state.trusted or batch <= known


def _classes(cases: Mapping[str, Case]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, case in cases.items():
        found.setdefault(case.view.pod_class, []).append(name)
    return found


def waiting(step: Step, why: str) -> Step:
    """The record of a pod whose batch waits: its queue may have moved all the same."""
    if step.record is None or step.record.changes:
        return step
    return replace(step, record=replace(step.record, outcome=Outcome.WAITING, reason=f"a larger batch is wanted: {why}"))


def failed(step: Step | None) -> bool:
    """Whether a canary's verdict was that it made things worse."""
    return bool(step and step.record and step.record.outcome is Outcome.REVERTED)
