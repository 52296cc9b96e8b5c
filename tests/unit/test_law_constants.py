"""Deadlines and shares of the law, each at its edge: what no run of a few minutes would notice if it were doubled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from law_kit import SPEC, FlowPod, Loop, started, with_boot
from test_replicas import Scaled

from weir_operator.tuner import canary, memory, pressure, recall, verdict
from weir_operator.tuner.case import open_case
from weir_operator.tuner.replicas import Scaling
from weir_operator.tuner.types import Canary, Learned, Pending, PodState, PodView, Poll
from weir_operator.tuner.window import gather
from weir_server.contract import Plant


def test_a_small_deficit_is_confirmed_once_and_then_acted_on():
    pods = Scaled(2, 2.2)
    said = pods.go(700)
    at = said.index("ScaledOut")
    assert said[at - 1] == "Confirming" and said[:at].count("Confirming") == 1, said


def test_pods_that_never_answer_hold_a_scale_out_back_for_ten_minutes():
    pods = Scaled(2, 4.5, follow=False)
    pods.desired = 3
    pods.go(1500)
    short = next(t for t, d in pods.decisions if d.outcome is Scaling.PENDING)
    out = next(t for t, d in pods.decisions if d.outcome is Scaling.OUT)
    assert 480 <= out - short <= 840, (short, out)


def test_a_canary_has_fifteen_minutes():
    pending = Pending(0.0, {"max_batch_size": 4.0}, {"max_batch_size": 8.0}, 1.0)
    pods = {"p": PodState("one", 0.0, pending=pending)}
    begun = {"x": Canary("p", "one", 8, 100.0)}
    assert canary.still_running(begun, pods, 999.0) == begun and not canary.still_running(begun, pods, 1000.0)


def test_a_ceiling_lasts_ten_minutes_then_twice_as_long_each_time_up_to_two_hours():
    loop = started()
    seen = []
    for times in range(6):
        case = open_case(replace(loop.me, ceiling_times=times), view(loop), SPEC, loop.now)
        seen.append(pressure.with_ceiling(case, 9).ceiling_until - loop.now)
    assert seen == [600, 1200, 2400, 4800, 7200, 7200]


def view(loop: Loop) -> PodView:
    return PodView("p", "x", loop.pod.control(), tuple(loop.polls))


@pytest.mark.parametrize(("age", "row_seconds", "finding"), [
    (599, 1.0, verdict.Finding.WAIT), (601, 1.0, verdict.Finding.OVERDUE), (601, 400.0, verdict.Finding.WAIT),
    (801, 400.0, verdict.Finding.OVERDUE),
])
def test_a_move_that_is_not_in_force_is_overdue_after_ten_minutes_or_two_row_times(age, row_seconds, finding):
    pod = FlowPod(boot=with_boot(max_batch_size=16))
    pod.effective_lag = True
    pod.set({"max_batch_size": 8})
    pod.advance(5)
    pending = Pending(0.0, {"max_batch_size": 16.0}, {"max_batch_size": 8.0}, 1.6)
    assert verdict.judge(pending, [pod.window()], row_seconds, None, SPEC, float(age)).finding is finding


def test_a_pod_without_traffic_trusts_what_its_peers_did_in_the_last_ten_minutes_and_is_careful_later():
    """0.8 × its batch, and no shallower queue."""
    entry = Learned("x", 64.0, 2.0, 160.0, 20, 2, 0.01, 20, 1.0, Plant(0.042, 0.0032, 0.0, 0.002, 64), 0.0)
    for now, batch, depth in ((599.0, 20, 2), (601.0, 16, None)):
        pod = FlowPod(offered=0.0)
        polls = []
        for i in range(8):
            pod.advance(5)
            polls.append(Poll(now - 35 + 5 * i, pod.window()))
        case = open_case(None, PodView("p", "x", pod.control(), tuple(polls)), SPEC, now, (entry,))
        _, change = recall.recalled(case, gather(case.windows, 30.0))
        assert change.knobs["max_batch_size"] == batch and change.knobs.get("max_queue_depth") == depth
    assert memory.CAUTION * 20 == 16
