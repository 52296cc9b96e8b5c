"""Several pods in virtual time: routers, clients that come back, pods that start slowly, scaling by others' rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weir_operator.simulate.fleet import ROUTERS, Fleet, LeastLoaded, PrefixAware, Retries, RoundRobin, fleet
from weir_operator.simulate.load import PART_TOKENS, Arrival, Phase, arrivals
from weir_operator.simulate.pod import Pod
from weir_operator.simulate.port import PodSetup
from weir_operator.simulate.rivals import RIVALS, QueueDepthScaler, rival
from weir_operator.simulate.run import static, tuned
from weir_operator.simulate.twin import Twin
from weir_operator.tuner.types import TunerSpec
from weir_server.contract import Knobs, Plant, Slo

CPU = Plant(0.042, 0.0032, 1e-7, 0.002, 64)
SETUP = PodSetup(CPU, Slo(2.0, 0.108), Knobs(8, None, 0.01, 2), seed=1)
SPEC = TunerSpec(2.0, 0.108)


def drawn(rate: float, end: float = 200.0, seed: int = 1) -> list[Arrival]:
    return list(arrivals([Phase(end, rate, 128, 64)], seed, 8192))


def run(kind, setups, rows, router="least-loaded", retries=None, end=200.0) -> Fleet:
    pods = Fleet(kind, setups, ROUTERS[router](), retries, 0)
    pods.run(rows, end, None, None, None)
    return pods


@pytest.mark.parametrize("router", ROUTERS)
def test_every_row_is_served_or_refused_by_exactly_one_pod(router):
    rows = drawn(4.0)
    pods = run(Twin, [SETUP] * 3, rows, router)
    pods.result(rows, 200.0, 0.2)
    windows = [m.pod.window() for m in pods.members]
    refused = sum(sum(w.refused["queue_full"].values()) for w in windows)
    assert sum(w.queued for w in windows) + refused == len(rows) and refused > 20
    assert all(w.finished["length"] == w.queued > len(rows) / 5 for w in windows)


def test_a_fleet_of_one_serves_about_as_a_pod_alone():
    rows = drawn(1.5)
    one = fleet([SETUP], rows, 200.0)
    assert one.goodput == pytest.approx(static(SETUP, rows, 200.0).goodput, abs=0.04)


def test_with_real_steps_a_fleet_comes_to_the_same():
    rows = drawn(3.0, 60.0)
    good = [run(kind, [SETUP] * 2, rows, end=60.0).result(rows, 60.0, 0.0).good for kind in (Twin, Pod)]
    assert good[0] == good[1] and len(good[0]) > 80


def test_least_loaded_beats_taking_turns_where_one_pod_is_slow():
    slow = replace(SETUP, step_seconds=lambda n, c, p: 2 * CPU.step_seconds(n, c, p))
    setup, rows = replace(SETUP, boot=Knobs(8, None, 0.01, 32), slo=Slo(4.0, 0.3)), drawn(1.5)
    slow = replace(slow, boot=setup.boot, slo=setup.slo)
    least, turns = (fleet([setup, slow], rows, 200.0, router=r).goodput for r in ("least-loaded", "round-robin"))
    assert least > turns + 0.02


def test_a_prefix_is_sent_where_it_is_known_unless_that_pod_is_crowded():
    pods = [Twin(SETUP), Twin(SETUP)]
    router = PrefixAware(slack=2)
    first = router.choose(pods, Arrival(0, 600, 4, (1, 2)))
    assert all(router.choose(pods, Arrival(0, 600, 4, (1, 3))) is first for _ in range(5))
    first.inbox.extend([Arrival(0, 1, 1)] * 3)
    assert router.choose(pods, Arrival(0, 600, 4, (1, 2))) is not first
    assert LeastLoaded().choose(pods, Arrival(0, 1, 1)) is not first
    turns = RoundRobin()
    assert len({id(turns.choose(pods, Arrival(0, 1, 1))) for _ in range(2)}) == 2


def test_prompts_that_share_content_meet_the_real_prefix_cache():
    shared = [Arrival(2.0 * i, PART_TOKENS + 60, 16, (1, 100 + i)) for i in range(30)]
    pods = run(Pod, [SETUP], shared, end=90.0)
    window = pods.members[0].pod.window()
    assert window.cached_tokens > 25 * (PART_TOKENS - 32)


def test_refused_clients_come_back_and_are_counted_once():
    rows = drawn(3.0)
    plain, again = (fleet([SETUP], rows, 200.0, retries=r) for r in (None, Retries(1.0, 3)))
    assert plain.attempts == len(rows) < again.attempts
    assert again.goodput <= 1.0 and len(again.good) == len(set(again.good)) <= len(rows)
    pods = run(Twin, [SETUP], rows, retries=Retries(1.0, 3))
    window = pods.members[0].pod.window()
    offered = window.queued + sum(window.refused["queue_full"].values())
    assert window.retried > 100 and offered - window.retried == pytest.approx(len(rows), abs=3), "retries are discounted"


def test_a_pod_that_starts_slowly_takes_nothing_before_it_is_ready():
    late = replace(SETUP, starts_after=100.0)
    pods = run(Twin, [SETUP, late], drawn(3.0))
    first, second = (m.pod for m in pods.members)
    assert min(t for t in second.good_arrivals) >= 100.0 and len(second.good_arrivals) > 40
    assert min(t for t in first.good_arrivals) < 5.0


def test_an_autoscaler_on_queue_depth_adds_pods_and_pays_for_them():
    setup = replace(SETUP, boot=Knobs(8, None, 0.01, 32), starts_after=0.0)
    rows = drawn(3.0, 400.0)
    alone = fleet([setup], rows, 400.0)
    scaled = fleet([setup], rows, 400.0, scaler=lambda: QueueDepthScaler(1, 4))
    assert max(n for _, n in scaled.replicas) >= 2 and scaled.goodput > alone.goodput + 0.3
    assert alone.replica_seconds == 400.0 < scaled.replica_seconds <= 4 * 400.0


def test_a_pod_that_leaves_finishes_what_it_has():
    rows = drawn(3.0)
    result = fleet([SETUP] * 3, rows, 200.0, scaler=lambda: lambda now, views, started, tuner: 3 if now < 100 else 1)
    assert result.replicas[-1][1] == 1
    assert 400 < result.replica_seconds < 430, "three for a hundred seconds, then one, and the drains"


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_move_knobs_and_beat_the_defaults(name):
    setup = replace(SETUP, boot=Knobs(4, None, 0.01, 32))
    rows = drawn(1.6, 600.0)
    run_ = tuned(setup, rows, 600.0, SPEC, rival(name))
    assert run_.moves and run_.goodput > static(setup, rows, 600.0).goodput + 0.05
    for _, move in run_.moves:
        assert all(setup.envelope.violation(k, v) is None for k, v in move.knobs.items())
