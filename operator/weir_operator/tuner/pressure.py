"""Rules 1, 2, 6 and 7: what collapse, preemption and memory ask for. They need no completed row."""

from __future__ import annotations

import math
from dataclasses import replace

from weir_operator.tuner import guard, learn, plant
from weir_operator.tuner.case import Case, Change, Shown, Step, carry_out
from weir_operator.tuner.knobs import limits, watermark_top, whole_chunks
from weir_operator.tuner.types import PodState
from weir_operator.tuner.window import Span, back_to, is_settled

CEILING_SECONDS, CEILING_LONGEST = 600.0, 7200.0


def emergency(case: Case) -> Step | None:
    """Examined at every poll: rule 1, and the cut of rule 7."""
    if case.frozen or case.stale:
        return None
    return _collapse(case) or _memory_full(case)


def _collapse(case: Case) -> Step | None:
    """Rule 1. After a cut the next one waits for polls that are wholly after it, or one collapse would be cut for each poll."""
    state, spec, last = case.state, case.spec, case.last
    quiet = 3 * spec.poll_seconds if spec.mode == "Auto" else spec.tick_seconds
    if state.emergency_at is not None and case.now - state.emergency_at < quiet:
        return None
    batch = last.target.max_batch_size
    if batch != last.effective.max_batch_size:
        return None
    reason = "steps take more than 1.5 × the objective and twice what the plant explains"
    found = guard.collapsed(case.windows, plant.fit(state.sums, state.prior), spec.tpot)
    if found is None:
        reason = "more than a fifth of the forward time recomputes what preemption threw away"
        found = guard.thrashing(case.windows, spec.tick_seconds)
    if found is None or (smaller := guard.cut(0.5, batch, found["running"], case.batch_limits()[0])) >= batch:
        return None
    case = replace(case, state=replace(with_ceiling(case, batch), emergency_at=case.now))
    return carry_out(case, Change("emergency", reason, {"max_batch_size": smaller}, Shown(found), emergency=True))


def _memory_full(case: Case) -> Step | None:
    state, chunk, budget = case.state, case.chunk, case.last.target.kv_cache_budget
    bounds = limits("kv_cache_budget", case.last, case.spec)
    if bounds is None or budget is None or chunk is None:
        return None
    if state.memory_cut_at is not None and case.now - state.memory_cut_at < guard.MEMORY_EVERY:
        return None
    used = guard.memory_full(case.windows)
    if used is None or (smaller := whole_chunks(guard.MEMORY_CUT * budget, chunk, *bounds)) >= budget:
        return None
    reason = "memory is over 92 % of its limit: a smaller KV budget before the kernel ends the process"
    change = Change("memory", reason, {"kv_cache_budget": smaller}, Shown({"memory": used}), emergency=True)
    return carry_out(case.with_state(memory_cut_at=case.now), change)


def with_ceiling(case: Case, batch: int) -> PodState:
    """Remember for a while, longer each time, that this batch failed. A lower one is the same cliff, met closer."""
    state = case.state
    times = state.ceiling_times + 1
    seconds = min(CEILING_LONGEST, CEILING_SECONDS * 2.0 ** (times - 1))
    return replace(state, ceiling=batch, ceiling_until=case.now + seconds, ceiling_times=times)


def watch(case: Case) -> PodState:
    """Count, at a tick, the quiet time of rule 6 and the KV-bound windows of rule 7."""
    state, budget = case.state, case.last.effective.kv_cache_budget
    span = back_to(case.windows, case.spec.tick_seconds - 1.0)
    if span is None or span.seconds <= 0 or budget is None:
        return state
    if span.total("preempted") > 0 or state.calm_since is None:
        state = replace(state, calm_since=case.now, calm_admitted=0)
    elif span.total("kv_used_byte_seconds") / span.seconds > guard.RELAX_USE * budget:
        state = replace(state, calm_admitted=state.calm_admitted + int(span.total("admitted")))
    waits = span.head_wait.get("kv", 0.0) > guard.KV_WAIT * span.seconds and span.tax < guard.NO_TAX
    settled = is_settled(case.last, case.chunk) and span.old.monotonic >= case.last.settled_at
    return replace(state, kv_bound_ticks=state.kv_bound_ticks + 1 if waits and settled else 0)


def pressure(case: Case) -> Step | None:
    """At a tick with no move under way: preemption costs (2), a watermark that is no longer needed (6), more KV (7)."""
    span = back_to(case.windows, case.spec.tick_seconds - 1.0)
    if span is None or case.last.target.kv_cache_budget is None:
        return None
    return _taxed(case, span) or _relax(case) or _more_kv(case)


def _taxed(case: Case, span: Span) -> Step | None:
    if span.tax <= guard.SOME_TAX or span.old.monotonic < case.last.settled_at:
        return None
    reason, shown = "preemption costs more than 3 % of the forward time", Shown({"tax": span.tax, "running": span.mean_running})
    w, top, batch = case.last.target.admission_watermark, watermark_top(case.last, case.spec), case.last.target.max_batch_size
    if w < top:
        higher = round(min(top, w + guard.WATERMARK_UP), 6)
        return carry_out(case, Change("tax", reason, {"admission_watermark": higher}, shown))
    smaller = guard.cut(0.8, batch, span.mean_running, case.batch_limits()[0])
    if smaller >= batch or _loses_more(case, span, smaller):
        return None
    case = replace(case, state=with_ceiling(case, smaller + 1))  # or the set-point, blind to preemption, would undo it
    return carry_out(case, Change("tax", f"{reason} and the watermark is at its top", {"max_batch_size": smaller}, shown))


def _loses_more(case: Case, span: Span, smaller: int) -> bool:
    """Whether a cut from the rows that run costs more throughput than the tax that it could save: on a small pod it does."""
    pod = learn.model(case.state, case.windows, span)
    if pod is None:
        return False
    present = max(smaller, math.ceil(min(case.last.target.max_batch_size, span.mean_running)))
    return 1.0 - pod.departures(smaller) / pod.departures(present) > span.tax


def _relax(case: Case) -> Step | None:
    state, w = case.state, case.last.target.admission_watermark
    bounds = limits("admission_watermark", case.last, case.spec)
    if bounds is None or state.calm_since is None or case.now - state.calm_since < guard.RELAX_SECONDS:
        return None
    least = max(bounds[0], guard.WATERMARK_FLOOR)
    if state.calm_admitted < guard.RELAX_ROWS or w <= least:
        return None
    lower = round(max(least, w - guard.WATERMARK_DOWN), 6)
    change = Change("relax", "ten minutes with the KV budget well used and no preemption", {"admission_watermark": lower})
    return carry_out(case.with_state(calm_since=case.now, calm_admitted=0), change)


def _more_kv(case: Case) -> Step | None:
    chunk, budget = case.chunk, case.last.target.kv_cache_budget
    bounds = limits("kv_cache_budget", case.last, case.spec)
    if bounds is None or chunk is None or budget is None:
        return None
    if case.state.kv_bound_ticks < guard.KV_WAIT_TICKS or not guard.memory_room(case.last, budget):
        return None
    larger = whole_chunks(guard.MEMORY_RAISE * budget, chunk, *bounds)
    if larger <= budget:
        return None
    reason = "the queue waits for KV in two settled windows, and memory has room"
    return carry_out(case.with_state(kv_bound_ticks=0), Change("memory", reason, {"kv_cache_budget": larger}))
