"""Readings, spans, evidence: what the law knows of a pod, and that it knows no more than the contract gives."""

from __future__ import annotations

import ast
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from law_kit import BOOT, SPEC, FlowPod, Loop, started, with_boot

import weir_operator.tuner
from weir_operator.tuner import mix, window
from weir_operator.tuner.replicas import least_cached
from weir_operator.tuner.types import PodView, Poll
from weir_operator.tuner.window import LONGEST, READS, Span, back_to, fresh, gather, readings
from weir_server.contract import Window


def polled(pod: FlowPod, count: int) -> list[Poll]:
    out = []
    for i in range(count):
        pod.advance(5)
        out.append(Poll(5.0 * i, pod.window()))
    return out


class Watched:
    """A window that notes which of its fields are read."""

    def __init__(self, of: Window, seen: set[str]):
        self._of, self._seen = of, seen

    def __getattr__(self, name):
        self._seen.add(name)
        return getattr(self._of, name)


def test_the_list_of_fields_that_the_law_reads_is_true(monkeypatch):
    """Each is in the contract, the law reads no other, and each one is really read."""
    seen: set[str] = set()
    take = FlowPod.window
    monkeypatch.setattr(FlowPod, "window", lambda pod: Watched(take(pod), seen))
    loop = started(seconds=65)
    loop.pod.tax, loop.pod.memory_used = 0.05, 95
    loop.run(60)
    loop.pod.tax, loop.pod.kv_used = 0.0, 0.9
    loop.run(60)
    loop.pod.memory_used, loop.pod.kv_rows = 10, 3
    loop.run(120)
    least_cached({"p": PodView("p", "x", None, tuple(loop.polls))}, 1)  # how many pods, and which, goes by the same windows
    assert set(READS) <= {f.name for f in fields(Window)}
    assert seen == set(READS)


def test_no_module_reads_a_field_behind_the_lists_back():
    """`total("…")` and `histogram("…")` name fields as text: those must be fields too."""
    names = {f.name for f in fields(Window)}
    for path in Path(weir_operator.tuner.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "total":
                assert node.args[0].value in names & set(READS), path.name


def test_a_new_process_ends_the_history_before_it():
    pod = FlowPod()
    polls = polled(pod, 4)
    pod.restart("two")
    polls += polled(pod, 2)
    assert [w.instance for w in readings(polls)] == ["two", "two"]


def test_a_counter_that_goes_back_ends_it_too():
    pod = FlowPod()
    polls = polled(pod, 4)
    polls.append(Poll(20.0, replace(polls[-1].window, monotonic=99.0, queued=0)))
    assert len(readings(polls)) == 1


def test_failed_polls_and_repeated_readings_are_no_readings():
    polls = polled(FlowPod(), 3)
    assert len(readings([polls[0], Poll(1.0, None), polls[1], polls[1], polls[2]])) == 3


def test_freshness_is_three_polls():
    polls = [*polled(FlowPod(), 1), Poll(5.0, None), Poll(10.0, None)]
    assert fresh(polls, 15.0, 5.0)
    assert not fresh(polls, 15.1, 5.0)
    assert not fresh([], 0.0, 5.0)


def test_a_span_counts_refusals_that_are_load_and_not_the_others_nor_retries():
    old = polled(FlowPod(offered=0.0), 1)[0].window
    refused = {**old.refused, "queue_full": {"slots": 3, "kv": 2}, "invalid": {"none": 50}}
    new = replace(old, monotonic=old.monotonic + 10, queued=7, retried=4, refused=refused)
    assert Span(old, new).offered == 7 + 5 - 4


def test_a_move_within_the_span_leaves_only_what_began_after_it():
    pod = FlowPod()
    old = polled(pod, 3)[-1].window
    pod.set({"max_batch_size": 8})
    new = polled(pod, 2)[-1].window
    span = Span(old, new)
    assert 0 < sum(span.settled("tpot")) < span.completed + 1
    assert sum(span.settled("tpot")) == new.settled["tpot"].count


def test_evidence_reaches_back_only_as_far_as_it_must():
    busy = gather(readings(polled(FlowPod(offered=5.0), 60)), 30.0)
    assert busy.enough and 29 <= busy.span.seconds <= 36
    rare = gather(readings(polled(FlowPod(offered=0.1), 60)), 30.0)
    assert rare.enough and 36 < rare.span.seconds <= LONGEST
    poor = gather(readings(polled(FlowPod(offered=0.01), 60)), 30.0)
    assert not poor.enough and poor.span.seconds >= LONGEST - 10
    assert gather(readings(polled(FlowPod(), 1)), 30.0) is None


def test_long_rows_speak_through_their_intervals_before_they_finish():
    evidence = gather(readings(polled(FlowPod(offered=0.04, output=2000), 60)), 30.0)
    assert evidence.source == "decode_interval" and evidence.intervals >= 15


@given(dropped=st.lists(st.booleans(), min_size=10, max_size=30), reset=st.integers(0, 29))
@settings(deadline=None)
def test_no_mixture_of_gaps_and_resets_makes_a_rate_negative(dropped, reset):
    pod, polls = FlowPod(), []
    for i, gone in enumerate(dropped):
        if i == reset:
            pod.restart("two")
        pod.advance(5)
        polls.append(Poll(5.0 * i, None if gone else pod.window()))
    for seconds in (1, 29, 300):
        if span := back_to(readings(polls), seconds):
            assert span.offered >= 0 and span.completed >= 0 and span.steps >= 0 and span.mean_running >= 0
            assert all(v >= 0 for v in span.head_wait.values())


# ---------------------------------------------------------------- the traffic

def seen_mix(**pod: float):
    windows = readings(polled(FlowPod(**pod), 8))
    return mix.observe(Span(windows[0], windows[-1]))


def test_the_mix_is_what_flows():
    found = seen_mix(offered=1.6, prompt=128, output=64)
    assert abs(found.offered - 1.6) < 0.1 and abs(found.prefill - 2.0) < 0.01
    assert abs(found.output - 64) < 4 and abs(found.context - 160) < 1


def test_no_traffic_is_no_mix():
    assert seen_mix(offered=0.0) is None
    before = seen_mix()
    assert mix.smooth(before, None, 0) == (before, False)


def test_two_odd_ticks_on_one_side_are_a_shift_and_one_is_not():
    chat, documents = seen_mix(prompt=64), seen_mix(prompt=2000)
    once, shifted = mix.smooth(replace(chat, ticks=20, rows=400), documents, 40)
    assert not shifted and once.prefill < 0.2 * documents.prefill
    twice, shifted = mix.smooth(once, documents, 40)
    assert shifted and twice.prefill == documents.prefill
    back, shifted = mix.smooth(once, chat, 40)
    assert not shifted and abs(back.odd_ticks) <= 1


def test_prompts_that_scatter_are_no_shift():
    """A few prompts of very different lengths in each tick: ρ jumps about, the workload does not."""
    base, rng = seen_mix(prompt=500), random.Random(3)
    found, shifts = base, 0
    for _ in range(60):
        tick = replace(base, prefill=base.prefill * rng.choice([0.4, 0.8, 1.0, 1.9]))
        found, shifted = mix.smooth(found, tick, 9)
        shifts += shifted
    assert shifts <= 2 and mix.errors(found)["prefill"] > 0, "by the two-tick rule alone there were eight"


def test_no_mean_over_n_rows_is_surer_than_their_own_scatter_allows():
    young = replace(seen_mix(), ticks=1, rows=25)
    assert mix.errors(young)["output"] == pytest.approx(0.1 * young.output)
    assert mix.errors(replace(young, rows=2500))["prefill"] == pytest.approx(0.01 * young.prefill)
    wild = replace(young, ticks=10, rows=2500, prefill_variance=young.prefill**2)
    assert mix.errors(wild)["prefill"] > 0.2 * young.prefill


def test_a_tick_with_few_rows_says_little_of_their_lengths():
    many, few = seen_mix(output=64), seen_mix(output=8)
    found, _ = mix.smooth(replace(many, rows=300, ticks=9), few, 3)
    assert found.output > 0.98 * many.output
    found, _ = mix.smooth(replace(many, rows=3, ticks=9), few, 300)
    assert found.output < 1.2 * few.output


def test_a_few_rows_more_or_less_are_no_shift_of_the_rate():
    calm = seen_mix(offered=0.5)
    loud = replace(calm, offered=2.0)
    found, _ = mix.smooth(replace(calm, ticks=20), loud, mix.MIN_RATE_ROWS - 1)
    assert found.odd_rate == 0
    found, _ = mix.smooth(replace(calm, ticks=20), loud, mix.MIN_RATE_ROWS)
    assert found.odd_rate == 1


def rated(rates, before: float = 1.0):
    """The smoothed mixes after ticks of these rates, the first after many at `before`."""
    found = [replace(seen_mix(), offered=before, quantiles=(before,), ticks=20, rows=800, rate_ticks=20)]
    for rate in rates:
        after, shifted = mix.smooth(found[-1], replace(seen_mix(), offered=rate, quantiles=(rate,)), 40)
        assert not shifted, "another rate is no other workload"
        found.append(after)
    return found


def test_a_rate_that_stays_elsewhere_for_two_ticks_is_taken_at_once_and_lengths_are_kept():
    once, twice = rated([3.0, 3.0])[1:]
    assert once.offered < 1.5 and twice.offered == 3.0 and twice.rate_ticks == 1
    assert twice.ticks == 22 and twice.rows > 300


def test_another_rate_with_other_lengths_is_another_workload_however_ρ_scatters():
    """From documents, a few with very different lengths in a tick, back to chat, ten times as many rows."""
    scattered = replace(seen_mix(prompt=2000), offered=0.3, ticks=20, rows=80, rate_ticks=20, prefill_variance=1e4)
    chat = replace(seen_mix(prompt=64), offered=3.0)
    once, shifted = mix.smooth(scattered, chat, 90)
    assert not shifted
    twice, shifted = mix.smooth(once, chat, 90)
    assert shifted and twice.prefill == chat.prefill and twice.ticks == 1


def test_a_rate_that_goes_to_and_fro_within_a_few_ticks_is_scatter_and_one_that_stays_is_a_shift_again():
    to_and_fro = rated([3.0, 3.0, 1.0, 1.0] * 5)
    jumps = [b.rate_ticks == 1 for b in to_and_fro[1:]]
    assert sum(jumps) == 1 and all(1.3 < m.offered < 2.7 for m in to_and_fro[-4:])
    lasting = rated([3.0] * 12 + [1.0] * 2)
    assert lasting[-3].offered == pytest.approx(3.0, rel=0.01) and lasting[-1].offered == 1.0


def test_bursts_spread_the_rate_over_quantiles_and_a_steady_flow_does_not():
    pod, windows = FlowPod(), []
    for i in range(40):
        pod.offered = 8.0 if i % 8 == 0 else 0.5
        pod.advance(5)
        windows.append(pod.window())
    base = mix.observe(Span(windows[0], windows[-1]))
    burst = mix.spread(base, windows)
    assert len(burst.quantiles) == mix.QUANTILES and max(burst.quantiles) > 3 * min(burst.quantiles)
    assert abs(sum(burst.quantiles) / len(burst.quantiles) - base.offered) < 1e-6
    steady = readings(polled(FlowPod(), 40))
    assert mix.spread(base, steady).quantiles == (base.offered,)


def test_the_quiet_before_the_first_row_makes_no_bursts():
    pod = FlowPod(offered=0.0)
    windows = [p.window for p in polled(pod, 8)]
    pod.offered = 1.6
    windows += [p.window for p in polled(pod, 12)]
    base = mix.observe(Span(windows[8], windows[-1]))
    assert mix.spread(base, windows).quantiles == (base.offered,)
    assert window.begun(windows)[0] is windows[7]


def test_settled_allows_for_whole_chunks_of_the_budget():
    w = polled(FlowPod(), 1)[0].window
    assert window.is_settled(w, 1000)
    almost = replace(w, effective=replace(w.effective, kv_cache_budget=w.target.kv_cache_budget - 999))
    assert window.is_settled(almost, 1000)
    assert not window.is_settled(replace(almost, target=replace(BOOT, max_batch_size=9)), 1000)
    assert Loop(FlowPod(boot=with_boot(max_batch_size=2)), SPEC).pod.target.max_batch_size == 2
