"""The rules of the law, one by one, on a pod without noise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from law_kit import BOOT, CHUNK, CPU, SPEC, FlowPod, Loop, started, with_boot

from weir_operator.tuner.types import Outcome
from weir_server.contract import Plant


def test_overload_from_the_defaults_moves_batch_and_depth_at_the_first_tick_and_settles_within_four():
    loop = started()
    (move,) = loop.moves
    assert move.knobs["max_batch_size"] > 4 and move.knobs["max_queue_depth"] < 5
    assert [r.outcome for r in loop.records] == [Outcome.MOVED]
    loop.run(90)
    verdicts = [r for r in loop.records if r.observed]
    assert verdicts and verdicts[0].observed["interval"] == pytest.approx(verdicts[0].predicted["interval"], rel=0.15)
    assert loop.me.verified["max_batch_size"] == move.knobs["max_batch_size"]


@pytest.mark.parametrize("quiet", [15, 75])
def test_a_load_that_starts_between_two_ticks_is_seen_whole_at_the_first(quiet):
    """Half a tick of it, spread over the tick, would look like half the load; the quiet before, like the gap of a burst."""
    loop = Loop(FlowPod(offered=0.0))
    loop.run(quiet)
    loop.pod.offered = 1.6
    loop.run(20)
    assert loop.me.mix.offered == pytest.approx(1.6, rel=0.1)
    assert loop.moves and loop.moves[0].knobs["max_batch_size"] > 4 and loop.moves[0].knobs["max_queue_depth"] < 5


def test_every_tick_leaves_one_record_and_every_other_poll_none():
    loop = Loop(FlowPod())
    decisions = loop.run(605)
    assert sum(len(d.records) for d in decisions) == 20
    assert all(len(d.records) <= 1 for d in decisions)
    assert all(r.reason for r in loop.records)


def test_advise_never_moves_and_keeps_saying_what_it_would_do():
    loop = started(spec=replace(SPEC, mode="Advise"), seconds=185)
    assert not loop.moves
    assert set(loop.outcomes()) == {"Advised"} and len(loop.records) == 6
    assert all(r.changes["max_batch_size"][0] == 4 for r in loop.records)
    assert loop.me.pending is None and loop.me.direction == 0


@pytest.mark.parametrize("spec", [replace(SPEC, paused=True), replace(SPEC, mode="Disabled")])
def test_paused_and_disabled_hold_even_through_a_collapse(spec):
    loop = started(spec=spec)
    loop.pod.slowdown = 9.0
    loop.run(60)
    assert not loop.moves and set(loop.outcomes()) == {"Frozen"}


def test_a_draining_pod_is_left_alone():
    pod = FlowPod()
    pod.draining = True
    assert started(pod).outcomes() == ["Frozen"]


def test_without_objectives_nothing_is_weighed():
    loop = started(spec=replace(SPEC, tpot=None), seconds=65)
    assert not loop.moves and set(loop.outcomes()) == {"NoObjectives"}


def test_an_idle_pod_keeps_its_queue_and_what_it_learned():
    loop = started(FlowPod(offered=0.5), seconds=125)
    learned, loop.pod.offered = loop.me, 0.0
    moved = len(loop.moves)
    loop.run(3600)
    assert len(loop.moves) == moved
    assert loop.outcomes()[-1] == "Idle"
    assert loop.me.mix == learned.mix and loop.me.sums == learned.sums


def test_a_pod_without_traffic_since_its_start_keeps_its_boot_values():
    loop = started(FlowPod(offered=0.0), seconds=605)
    assert not loop.moves and set(loop.outcomes()) == {"Idle"}


def test_too_few_finished_rows_are_gathered_over_minutes_then_named():
    slow = FlowPod(offered=0.01, output=640)
    loop = started(slow, seconds=305)
    assert "InsufficientData" in loop.outcomes() and not loop.moves


def test_a_rare_row_every_ten_seconds_is_gathered_until_it_says_enough():
    pod = FlowPod(Plant(0.5, 0.05, 0.0, 0.01, 64), offered=0.3, output=64)
    pod.slo = replace(pod.slo, ttft=20.0, tpot=1.2)
    loop = started(pod, replace(SPEC, ttft=20.0, tpot=1.2), seconds=185)
    assert loop.outcomes()[0] == "InsufficientData"
    assert loop.moves and loop.moves[0].knobs["max_batch_size"] > 4


def test_rows_that_outlast_a_tick_are_not_taken_for_short_ones():
    """Two rows at a time, 400 s each: ticks that finish a row are rare, and those alone would say 30 tokens a row."""
    pod = FlowPod(Plant(0.9, 0.05, 0.0, 0.0, 64), boot=with_boot(max_batch_size=8), offered=0.02, output=400, prompt=16)
    loop = started(pod, replace(SPEC, ttft=60.0, tpot=9.0), seconds=1800)
    assert loop.me.mix is not None and loop.me.mix.output == pytest.approx(400, rel=0.25)


# ---------------------------------------------------------------- missing data

def test_nothing_moves_on_missing_windows():
    loop = Loop(FlowPod())
    for _ in range(3):
        loop.poll()
    for _ in range(12):
        loop.poll(dropped=True)
    assert not loop.moves and loop.outcomes() == ["StaleMetrics", "StaleMetrics"]


def test_no_window_ever_is_warming_not_idle():
    loop = Loop(FlowPod())
    for _ in range(8):
        loop.poll(dropped=True)
    assert loop.outcomes() == ["Warming"] and not loop.moves


def test_a_stale_pod_is_not_cut_either():
    loop = started()
    loop.pod.slowdown = 9.0
    for _ in range(6):
        loop.poll(dropped=True)
    assert len(loop.moves) == 1


def test_a_restart_starts_from_what_its_class_is_known_to_do_and_else_from_its_own_measurement():
    loop = started(seconds=400)
    was = loop.pod.target
    assert was.max_batch_size > 4 and loop.state.learned[0].batch == was.max_batch_size
    loop.pod.restart("two")
    loop.poll()
    assert loop.me.instance == "two" and not loop.me.sums and loop.me.pending is None
    assert loop.me.prior.a == pytest.approx(CPU.a, rel=0.01) and loop.me.prior != CPU, "what traffic taught of such pods"
    loop.run(30)
    assert next(m for m in reversed(loop.moves)).rule == "learned" and loop.pod.target.max_batch_size == was.max_batch_size
    blank = Loop(FlowPod())
    blank.poll()
    assert blank.me.prior == CPU


# ---------------------------------------------------------------- KV

def test_the_batch_is_never_raised_while_kv_is_what_the_queue_waits_for():
    pod = FlowPod(boot=with_boot(max_batch_size=8), offered=3.0)
    pod.kv_rows, pod.memory_limit = 3, None
    loop = started(pod, seconds=1205)
    assert all(m.knobs.get("max_batch_size", 0) <= 8 for m in loop.moves)
    assert loop.pod.target.max_batch_size <= 8
    assert loop.pod.target.max_queue_depth < 32
    assert any("kv" in r.reason for r in loop.records if r.outcome is Outcome.HOLDING)


def test_kv_bound_waiting_raises_the_budget_by_whole_chunks_where_memory_has_room():
    pod = FlowPod(boot=with_boot(kv_cache_budget=100 * CHUNK), offered=3.0)
    pod.kv_rows, pod.memory_used, pod.memory_limit = 3, 10 * CHUNK, 1000 * CHUNK
    loop = started(pod, seconds=305)
    raised = [m.knobs["kv_cache_budget"] for m in loop.moves if "kv_cache_budget" in m.knobs]
    assert raised[0] == 115 * CHUNK and all(k % CHUNK == 0 for k in raised)
    assert not any({"kv_cache_budget", "max_batch_size"} <= set(m.knobs) for m in loop.moves)


@pytest.mark.parametrize("limit", [None, 11 * CHUNK])
def test_the_budget_is_not_raised_into_unknown_or_full_memory(limit):
    pod = FlowPod(boot=with_boot(kv_cache_budget=100 * CHUNK), offered=3.0)
    pod.kv_rows, pod.memory_used, pod.memory_limit = 3, 10 * CHUNK, limit
    assert not any(m.knobs.get("kv_cache_budget", 0) > 100 * CHUNK for m in started(pod, seconds=305).moves)


def test_memory_that_kv_holds_already_is_not_counted_twice():
    """1.15 × 100 chunks over 20 of other memory fit under 85 % of 160, whether the KV in use is none or all of it."""
    for used in (0, 100 * CHUNK):
        pod = FlowPod(boot=with_boot(kv_cache_budget=100 * CHUNK), offered=3.0)
        pod.kv_rows, pod.memory_used, pod.memory_limit, pod.kv_used_bytes = 3, 20 * CHUNK + used, 160 * CHUNK, used
        assert max(m.knobs.get("kv_cache_budget", 0) for m in started(pod, seconds=125).moves) == 115 * CHUNK
        pod.memory_limit = 158 * CHUNK
        pod.restart("two")
        assert not any("kv_cache_budget" in m.knobs for m in started(pod, seconds=125).moves)


def test_full_memory_cuts_the_budget_between_ticks_once_a_minute():
    loop = started(seconds=40)
    loop.pod.memory_used = 95
    loop.run(10)
    cuts = [m for m in loop.moves if "kv_cache_budget" in m.knobs]
    assert [m.knobs["kv_cache_budget"] for m in cuts] == [900 * CHUNK] and cuts[0].emergency
    loop.run(50)
    assert len([m for m in loop.moves if "kv_cache_budget" in m.knobs]) == 1
    loop.run(10)
    assert loop.pod.target.kv_cache_budget == 810 * CHUNK


def test_one_full_reading_is_not_enough():
    loop = started(seconds=40)
    loop.pod.memory_used = 95
    loop.poll()
    loop.pod.memory_used = 10
    loop.run(30)
    assert not any("kv_cache_budget" in m.knobs for m in loop.moves)


# ---------------------------------------------------------------- collapse and preemption

def steady(batch: int = 8) -> Loop:
    """A pod that has settled on one setting: bounds keep it there."""
    spec = replace(SPEC, bounds={"max_batch_size": (1, batch), "max_queue_depth": (2, 2)})
    return started(FlowPod(boot=with_boot(max_batch_size=batch, max_queue_depth=2)), spec, seconds=125)


def test_a_collapse_halves_the_batch_within_two_polls_without_any_completion():
    loop = steady()
    loop.pod.slowdown, loop.pod.stalled = 5.0, True
    loop.run(10)
    (cut,) = [m for m in loop.moves if m.emergency]
    assert cut.knobs == {"max_batch_size": 4}
    assert loop.log[-1].records[0].rule == "emergency"
    assert loop.log[-1].records[0].inputs["step_seconds"] > 2 * loop.log[-1].records[0].inputs["expected_step_seconds"]


def test_one_collapse_is_cut_once_not_at_every_poll():
    loop = steady()
    loop.pod.slowdown, loop.pod.stalled = 5.0, True
    loop.run(10)
    loop.pod.slowdown, loop.pod.stalled = 1.0, False
    loop.run(60)
    assert len([m for m in loop.moves if m.emergency]) == 1


def test_while_a_cut_drains_no_second_one_follows():
    loop = steady()
    loop.pod.slowdown = 5.0
    loop.pod.effective_lag = True
    loop.run(60)
    assert len([m for m in loop.moves if m.emergency]) == 1


def test_polls_from_before_the_cut_was_in_force_do_not_ask_for_another():
    loop = steady()
    loop.pod.slowdown, loop.pod.effective_lag = 5.0, True
    loop.run(20)  # cut, and still draining
    loop.pod.effective_lag = False
    loop.pod.set(loop.moves[-1].knobs)
    loop.poll()  # one slow poll before, one after it came into force
    loop.pod.slowdown = 1.0
    loop.run(20)
    assert len([m for m in loop.moves if m.emergency]) == 1


def test_long_steps_that_the_plant_explains_are_no_collapse():
    """Mistake 1 of the sketch: steps that carry a prefill chunk were blamed on the batch."""
    loop = steady()
    loop.pod.prompt = 4000  # every step now takes 4 times as long, all of it prefill
    loop.run(20)
    assert loop.pod.interval(8) > 1.5 * 0.108 and not any(m.emergency for m in loop.moves)


def test_a_single_slow_poll_is_no_collapse():
    loop = steady()
    loop.pod.slowdown = 5.0
    loop.poll()
    loop.pod.slowdown = 1.0
    loop.run(25)
    assert not any(m.emergency for m in loop.moves)


def test_a_cut_is_measured_against_the_rows_that_run():
    """Mistake 2 of the sketch: a cap of 64 over 5 rows was halved to 32, which changed nothing."""
    pod = FlowPod(boot=with_boot(max_batch_size=64, max_queue_depth=2), offered=0.5)
    loop = started(pod, replace(SPEC, bounds={"max_batch_size": (1, 64), "max_queue_depth": (2, 2)}), seconds=125)
    running = loop.pod.running
    loop.pod.slowdown, loop.pod.offered = 5.0, 0.14
    loop.run(10)
    (cut,) = [m for m in loop.moves if m.emergency]
    assert running < 8 and cut.knobs["max_batch_size"] <= (running + 1) / 2


def test_thrashing_is_an_emergency_and_the_failed_batch_a_ceiling():
    loop = steady()
    loop.pod.tax = 0.3
    loop.run(40)
    assert [m.knobs["max_batch_size"] for m in loop.moves if m.emergency][:1] == [4]
    assert loop.me.ceiling == 8 and loop.me.ceiling_until > loop.now


def test_a_ceiling_keeps_the_batch_below_it_until_it_expires():
    loop = steady()
    loop.pod.tax = 0.3
    loop.run(40)
    loop.pod.tax = 0.0
    loop.run(500)
    assert loop.pod.target.max_batch_size < 8
    loop.run(400)
    assert loop.pod.target.max_batch_size == 8


def test_a_full_queue_is_lowered_beside_a_watermark_that_is_raised():
    loop = Loop(FlowPod(boot=with_boot(max_batch_size=8), offered=3.0))
    loop.pod.tax = 0.05
    loop.run(35)
    (move,), (record,) = loop.moves, loop.records
    assert move.knobs["admission_watermark"] == 0.03 and move.knobs["max_queue_depth"] < 8 and len(move.knobs) == 2
    assert record.rule == "tax" and set(record.changes) == set(move.knobs)
    assert loop.me.pending.predicted_goodput is None, "the chain knows nothing of what a watermark saves"


def test_some_tax_raises_the_watermark_by_two_percent_up_to_ten():
    loop = steady()
    loop.pod.tax = 0.05
    loop.run(900)
    marks = [m.knobs["admission_watermark"] for m in loop.moves if "admission_watermark" in m.knobs]
    assert marks[:2] == [0.03, 0.05] and marks[-1] == 0.10
    spans = [d.records[0].t for d in loop.log if d.moves and "admission_watermark" in d.moves[0].knobs]
    assert all(b - a >= 60 for a, b in pairwise(spans)), "one move per settled window"


@pytest.mark.parametrize(("slope", "cut"), [(0.05, True), (0.0005, False)])
def test_at_the_top_the_batch_is_cut_only_where_the_tax_is_dearer_than_the_slots(slope, cut):
    """Where steps cost by the row a cut loses little; where the intercept dominates it loses the slots' whole share."""
    plant = Plant(0.05, slope, 0.0, 0.0, 64)
    pod = FlowPod(plant, with_boot(max_batch_size=16, max_queue_depth=2, admission_watermark=0.10), offered=20.0)
    spec = replace(SPEC, ttft=99.0, tpot=9.0, bounds={"max_batch_size": (1, 16), "max_queue_depth": (2, 2)})
    loop = started(pod, spec, seconds=60)
    loop.pod.tax = 0.10
    loop.run(60)
    assert any(m.rule == "tax" and m.knobs.get("max_batch_size") == 12 for m in loop.moves) is cut


def test_the_watermark_relaxes_after_ten_quiet_minutes_of_a_full_budget():
    loop = steady()
    loop.pod.set({"admission_watermark": 0.05})
    loop.pod.kv_used = 0.8
    loop.run(400)
    assert loop.pod.target.admission_watermark == 0.05
    loop.run(150)
    assert loop.pod.target.admission_watermark == 0.04
    loop = steady()
    loop.pod.set({"admission_watermark": 0.05})
    loop.run(1200)  # the budget is half empty: that nothing was preempted says nothing
    assert loop.pod.target.admission_watermark == 0.05


# ---------------------------------------------------------------- bounds

def test_bounds_hold_and_an_edit_brings_the_value_back_inside():
    loop = started(spec=replace(SPEC, bounds={"max_batch_size": (None, 5), "max_queue_depth": (3, None)}), seconds=185)
    assert (loop.pod.target.max_batch_size, loop.pod.target.max_queue_depth) == (5, 3)
    loop.spec = replace(loop.spec, bounds={"max_batch_size": (1, 2), "max_queue_depth": (4, 9)})
    loop.run(30)
    assert (loop.pod.target.max_batch_size, loop.pod.target.max_queue_depth) == (2, 4)


def test_advice_is_about_the_load_first_and_about_bounds_where_nothing_else_is_to_be_said():
    bounds = {"max_batch_size": (None, 6), "max_queue_depth": (None, 16)}
    loop = started(spec=replace(SPEC, mode="Advise", bounds=bounds), seconds=95)
    assert {r.rule for r in loop.records} == {"set-point"}
    assert all(r.changes["max_batch_size"] == (4, 6) and r.changes["max_queue_depth"][1] < 16 for r in loop.records)
    idle = started(FlowPod(offered=0.0), replace(SPEC, mode="Advise", bounds=bounds), seconds=95)
    assert {(r.rule, r.changes["max_queue_depth"]) for r in idle.records} == {("bounds", (32, 16))}


def test_bounds_outside_the_envelope_end_at_its_edge():
    loop = started(spec=replace(SPEC, bounds={"max_batch_size": (100, 200)}), seconds=65)
    assert loop.pod.target.max_batch_size == 64


# ---------------------------------------------------------------- verdicts

def moved() -> Loop:
    """Just after a first move of the batch."""
    loop = started()
    assert loop.me.pending is not None
    return loop


def test_a_prediction_that_fails_is_said_with_both_numbers():
    loop = moved()
    promised = loop.me.pending.predicted_interval
    loop.pod.slowdown = 1.4
    loop.run(90)
    missed = next(r for r in loop.records if r.observed)
    assert "off by more than 15 %, once so far" in missed.reason and missed.observed["interval"] > 1.15 * promised
    assert missed.outcome is Outcome.MOVED and missed.changes["max_batch_size"][1] < 8, "what was learned is used at once"


@pytest.mark.parametrize(("promised_rate", "says"), [
    (0.8, "as another load explains"), (1.6, "more than 15 %"), (3.2, "more than 15 %"),
])
def test_a_longer_time_per_token_under_more_load_is_no_miss(promised_rate, says):
    """In a burst rows have more company than a prediction for the mean rate said. Under less load they should have less."""
    loop = moved()
    pending = replace(
        loop.me.pending, offered=promised_rate, predicted_goodput=None, predicted_interval=0.7 * loop.pod.interval(8),
    )
    loop.state = replace(loop.state, pods={"p": replace(loop.me, pending=pending)})
    loop.run(60)
    judged = next(r for r in loop.records if "interval" in r.observed)
    assert says in judged.reason


def test_none_where_three_were_promised_is_no_miss():
    """The count that a prediction stands for scatters too: 0.07 rows/s over 45 s are three rows, or none."""
    loop = moved()
    loop.pod.slo = replace(loop.pod.slo, tpot=0.01)  # nothing is good
    short = replace(loop.me.pending, predicted_goodput=0.07, predicted_interval=None, goodput_before=None)
    loop.state = replace(loop.state, pods={"p": replace(loop.me, pending=short)})
    loop.run(60)
    judged = [r for r in loop.records if "goodput" in r.observed]
    assert judged[0].observed["goodput"] == 0.0 and judged[0].outcome is not Outcome.MISPREDICTED


def test_four_misses_bring_back_the_verified_setting_and_hold_it():
    loop = moved()
    loop.run(60)
    verified = dict(loop.me.verified)
    for _ in range(4):
        pending = replace(loop.me.pending or _pending(loop), predicted_interval=0.001, goodput_before=None)
        loop.state = replace(loop.state, pods={"p": replace(loop.me, pending=pending)})
        loop.run(60)
    assert loop.me.distrust == 2 and loop.pod.target.max_batch_size == verified["max_batch_size"]
    count = len(loop.moves)
    loop.pod.offered = 9.0
    loop.run(300)
    assert len(loop.moves) == count and loop.outcomes()[-1] == "Mispredicted"
    loop.run(600)
    assert loop.me.distrust == 0, "a gate has a deadline"


def _pending(loop: Loop):
    from weir_operator.tuner.types import Pending

    b = loop.pod.target.max_batch_size
    return Pending(loop.now, {"max_batch_size": b}, {"max_batch_size": b}, loop.me.mix.offered)


def test_a_miss_that_asks_for_no_other_setting_is_named():
    """Beside the batch two rows wait 2.2 s for 2: a queue whose rows are always late can be judged like any other."""
    loop = moved()
    batch = loop.pod.target.max_batch_size
    loop.spec = replace(loop.spec, bounds={"max_batch_size": (batch, batch), "max_queue_depth": (2, 2)})
    loop.pod.set({"max_queue_depth": 2})
    loop.pod.slowdown = 1.4
    loop.run(90)
    missed = [r for r in loop.records if r.outcome is Outcome.MISPREDICTED]
    assert missed and missed[0].observed["interval"] > 1.15 * missed[0].predicted["interval"]


def test_the_good_rows_of_a_queue_that_fills_are_no_measure_of_a_later_move():
    """From an empty start the first rows are in time: a cut to what can last is not taken back for falling short of them."""
    assert moved().me.pending.goodput_before is not None
    loop = Loop(FlowPod(offered=0.0))
    loop.run(15)
    loop.pod.offered = 1.6
    loop.run(20)
    assert "max_batch_size" in loop.me.pending.after and loop.me.pending.goodput_before is None


def test_a_move_that_lowered_goodput_is_taken_back_and_not_tried_again_soon():
    loop = moved()
    pending = replace(loop.me.pending, goodput_before=5.0)
    loop.state = replace(loop.state, pods={"p": replace(loop.me, pending=pending)})
    loop.run(60)
    (back,) = [r for r in loop.records if r.outcome is Outcome.REVERTED]
    assert back.changes["max_batch_size"][1] == 4
    assert loop.me.ceiling == back.changes["max_batch_size"][0]


def test_a_revert_is_not_judged_by_what_the_reverted_move_had_promised():
    loop = moved()
    promised = loop.me.pending.predicted_goodput
    pending = replace(loop.me.pending, goodput_before=5.0)
    loop.state = replace(loop.state, pods={"p": replace(loop.me, pending=pending)})
    loop.run(60)
    assert loop.outcomes()[-1] == "Reverted"
    assert promised > 1.0 and loop.me.pending.after["max_batch_size"] == 4
    assert loop.me.pending.predicted_goodput is None and loop.me.pending.predicted_interval is None
    count = len(loop.records)
    loop.run(95)
    assert not any(r.outcome is Outcome.MISPREDICTED for r in loop.records[count:])


def test_the_hold_after_four_misses_holds_through_the_verdict_on_the_way_back():
    """The way back is a move too: while that is judged, and after it came out well, nothing else may move."""
    loop = moved()
    loop.run(60)
    loop.pod.set({"max_batch_size": 6, "max_queue_depth": 4})
    pending = replace(_pending(loop), predicted_interval=0.001)
    loop.state = replace(loop.state, pods={"p": replace(loop.me, pending=pending, misses=1, distrust=1)})
    loop.run(60)
    assert loop.me.distrust == 2
    count, until = len(loop.moves), loop.me.hold_until
    loop.pod.offered = 5.0
    loop.run(until - loop.now - 5)
    assert len(loop.moves) == count and loop.me.distrust == 2 and loop.outcomes()[-1] == "Mispredicted"


def test_a_verified_setting_has_no_kv_budget_that_a_return_could_raise_over_a_cut():
    loop = moved()
    loop.run(60)
    assert set(loop.me.verified) == {"max_batch_size", "max_queue_depth", "admission_watermark"}


def test_an_edit_of_the_objectives_ends_every_comparison_of_goodput_across_it():
    """The server's totals of good rows go on: over the edit they would say that goodput fell or rose."""
    loop = moved()
    loop.run(35)
    loop.spec = replace(loop.spec, tpot=0.05)
    loop.pod.slo = replace(loop.pod.slo, tpot=0.05, generation=1)
    edited = loop.pod.now + 5  # the reading at which the law hears of it
    loop.poll()
    assert loop.me.pending.predicted_goodput is None and loop.me.pending.goodput_before is None
    assert loop.me.pending.predicted_interval is not None
    assert loop.me.objectives_since == edited
    loop.run(120)
    seen = [r for r in loop.records if "goodput" in r.observed]
    assert seen[0].observed["goodput"] == 0.0, "rows that were good under the old objective were counted"
    assert seen[0].outcome not in (Outcome.REVERTED, Outcome.MISPREDICTED)


def test_a_move_right_after_such_an_edit_is_not_compared_with_the_goodput_before_it():
    loop = moved()
    batch = loop.pod.target.max_batch_size
    loop.run(75)
    assert loop.me.verified["max_batch_size"] == batch
    loop.spec = replace(loop.spec, tpot=0.3)
    loop.run(15)
    assert loop.me.pending.after["max_batch_size"] > batch and loop.me.pending.goodput_before is None


def test_slots_that_were_never_used_prove_nothing():
    loop = moved()
    loop.pod.offered = 0.3
    loop.run(180)
    assert "Inconclusive" in loop.outcomes() and not loop.me.verified


def test_a_drain_that_takes_too_long_freezes_the_batch_and_says_so():
    loop = steady()
    loop.pod.effective_lag = True
    loop.pod.slowdown = 5.0
    loop.run(20)
    loop.pod.slowdown = 1.0
    loop.run(700)
    assert loop.outcomes()[-1] == "DrainOverdue"


def test_values_that_somebody_else_set_are_adopted():
    loop = moved()
    asked = loop.pod.target.max_batch_size
    loop.pod.set({"max_batch_size": 3})
    loop.spec = replace(loop.spec, bounds={"max_batch_size": (3, 3)})
    loop.run(30)
    assert loop.me.pending is None and loop.pod.target.max_batch_size == 3
    (said,) = [r for r in loop.records if "adopted" in r.reason]
    assert said.outcome is Outcome.INCONCLUSIVE and f"max_batch_size was set to {asked}" in said.reason


def test_a_move_that_never_arrived_is_said_not_passed_over():
    loop = Loop(FlowPod())
    loop.apply = False
    loop.run(35)
    loop.apply = True
    loop.run(30)
    assert [r.outcome for r in loop.records] == [Outcome.MOVED, Outcome.INCONCLUSIVE]
    loop.run(30)
    assert loop.pod.target.max_batch_size > 4


def test_only_one_of_batch_watermark_and_budget_moves_until_it_is_judged():
    loop = moved()
    loop.pod.tax, loop.pod.kv_rows = 0.05, 3
    waiting = None
    for _ in range(120):
        was = loop.me.pending
        decision = loop.poll()
        for move in decision.moves:
            settled = set(move.knobs) & {"max_batch_size", "admission_watermark", "kv_cache_budget"}
            assert len(settled) <= 1
            if settled and not move.emergency and was is not None:
                waiting = decision.records[0]
                assert waiting.observed or waiting.outcome is Outcome.MISPREDICTED or loop.now - was.at >= 55


# ---------------------------------------------------------------- mistakes of an earlier sketch

def test_the_queue_may_fall_below_any_share_of_the_batch_at_once():
    """Mistakes 3 and 6: a floor of Q as a share of B; waiting for refusals before touching Q."""
    pod = FlowPod(boot=with_boot(max_batch_size=32, max_queue_depth=200), offered=3.4)
    pod.slo = replace(pod.slo, tpot=0.3)
    loop = started(pod, replace(SPEC, tpot=0.3), seconds=35)
    assert loop.moves[0].knobs["max_queue_depth"] < 8


def test_the_smallest_setting_is_no_trap():
    """Mistake 4: a small batch made throughput small, which made the queue tiny, which kept both there."""
    loop = started(FlowPod(boot=with_boot(max_batch_size=1, max_queue_depth=1)), seconds=600)
    best = started(FlowPod(boot=with_boot(max_batch_size=8, max_queue_depth=1)), seconds=600).pod.target.max_batch_size
    assert loop.pod.target.max_batch_size >= 0.8 * best


def test_occupancy_is_a_mean_over_time():
    """Mistake 5: the largest reading of KV use in a window was taken for its use."""
    loop = steady()
    for i in range(60):
        loop.pod.kv_used = 1.0 if i % 6 == 0 else 0.3
        loop.poll()
    assert loop.me.calm_admitted == 0 and not any("kv_cache_budget" in m.knobs for m in loop.moves)


def test_boot_values_are_what_the_kit_says():
    assert (BOOT.max_batch_size, BOOT.max_queue_depth, BOOT.admission_watermark) == (4, 32, 0.01)
