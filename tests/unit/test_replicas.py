"""How many pods: the pure decision, and what it is worth against an autoscaler on queue depth."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from law_kit import SPEC, FlowPod
from test_canary import Pods

from weir_operator.simulate.fleet import fleet
from weir_operator.simulate.load import Phase, arrivals
from weir_operator.simulate.port import PodSetup
from weir_operator.simulate.rivals import CapacityScaler, QueueDepthScaler
from weir_operator.tuner.replicas import OBVIOUS, SPARE, ReplicaSpec, ReplicaState, Scaling, decide_replicas
from weir_operator.tuner.types import PodView, Poll
from weir_server.contract import Knobs, Plant, Slo

RANGE = ReplicaSpec(1, 8)


class Scaled(Pods):
    """Pods that a load is spread over evenly, and as many of them as are wanted, at once."""

    def __init__(self, n: int, load: float, replicas: ReplicaSpec = RANGE, follow: bool = True):
        super().__init__(*(FlowPod() for _ in range(n)))
        self.load, self.replicas, self.follow = load, replicas, follow
        self.scaling, self.desired, self.decisions = ReplicaState(), n, []

    def step(self):
        for pod in self.pods.values():
            pod.offered = self.load / len(self.pods)
        self.poll()
        views = {n: PodView(n, "x", p.control(), tuple(self.polls[n])) for n, p in self.pods.items()}
        found = decide_replicas(self.scaling, views, self.state, self.spec, self.replicas, self.desired, self.now)
        self.scaling, self.desired = found.state, found.desired
        if found.outcome:
            self.decisions.append((self.now, found))
        while self.follow and len(self.pods) < self.desired:
            name = f"p{len(self.pods)}"
            self.pods[name], self.classes[name] = FlowPod(), "x"
        while self.follow and len(self.pods) > self.desired:
            del self.pods[f"p{len(self.pods) - 1}"]
        return found

    def go(self, seconds: float):
        for _ in range(round(seconds / 5)):
            self.step()
        return [str(d.outcome) for _, d in self.decisions]


def test_what_is_offered_over_what_a_pod_can_do_decides():
    pods = Scaled(1, 3.0)
    pods.go(500)
    last = pods.decisions[-1][1]
    assert last.outcome is Scaling.ENOUGH and last.desired == len(pods.pods)
    assert last.offered == pytest.approx(3.0, rel=0.05)
    assert SPARE * last.capacity * (last.desired - 1) < last.offered <= SPARE * last.capacity * last.desired


def test_an_obvious_deficit_does_not_wait_for_a_second_tick():
    pods = Scaled(1, 6.0)
    pods.go(240)
    first = next(d for _, d in pods.decisions if d.outcome is Scaling.OUT)
    assert first.offered > OBVIOUS * first.capacity and pods.decisions[0][0] - 1000 <= 130


def test_knobs_come_first_and_a_small_deficit_needs_two_ticks():
    pods = Scaled(2, 2.2)
    said = pods.go(500)
    assert "Confirming" in said and said.index("Confirming") < said.index("ScaledOut")


def test_nothing_more_is_asked_for_while_pods_do_not_answer_but_not_for_ever():
    pods = Scaled(2, 4.5, follow=False)
    pods.desired = 3
    said = pods.go(500)
    assert "Pending" in said and "ScaledOut" not in said
    assert "ScaledOut" in pods.go(700), "a gate has a deadline"


def test_in_only_after_the_whole_stabilisation_and_only_to_what_carries_it():
    pods = Scaled(6, 5.0)
    pods.go(600)
    high = pods.desired
    pods.load = 0.7
    began = pods.now
    pods.go(900)
    at = next(t for t, d in pods.decisions if t > began and d.outcome is Scaling.IN)
    assert at - began >= 300 and pods.desired == 1 < high
    assert any(d.outcome is Scaling.STABILISING for t, d in pods.decisions if t > began)


def test_a_load_at_the_edge_does_not_flip_between_two_counts():
    """kubernetes/website#54304: one threshold for both directions goes to and fro."""
    pods = Scaled(1, 1.15)
    pods.go(600)
    counts = []
    for i in range(8):
        pods.load = 0.97 if i % 2 else 1.05
        pods.go(150)
        counts.append(pods.desired)
    assert sum(a != b for a, b in pairwise(counts)) <= 1, counts


def test_silent_pods_are_no_reason_for_anything():
    pods = Scaled(4, 4.0)
    pods.go(300)
    views = {n: PodView(n, "x", p.control(), (Poll(pods.now, None),)) for n, p in pods.pods.items()}
    state = replace(pods.scaling, next_tick=pods.now)
    found = decide_replicas(state, views, pods.state, SPEC, RANGE, 4, pods.now + 1)
    assert found.outcome is Scaling.UNKNOWN and found.desired == 4


@given(desired=st.integers(0, 99), least=st.integers(1, 5), width=st.integers(0, 5), load=st.floats(0, 50))
@settings(max_examples=5, deadline=None)
def test_never_outside_the_range(desired, least, width, load):
    pods = Scaled(2, load, ReplicaSpec(least, least + width), follow=False)
    pods.desired = desired
    for _ in range(50):
        assert least <= pods.step().desired <= least + width


def test_its_state_survives_json():
    pods = Scaled(1, 3.0)
    pods.go(400)
    assert ReplicaState.from_json(json.loads(json.dumps(pods.scaling.to_json()))) == pods.scaling


@pytest.mark.slow
def test_knobs_and_replicas_serve_a_good_row_for_less_than_an_autoscaler_on_queue_depth():
    """Pods take 60 s to start; the load triples and falls again."""
    plant, slo = Plant(0.042, 0.0032, 1e-7, 0.002, 64), Slo(2.0, 0.108)
    setup = PodSetup(plant, slo, Knobs(4, None, 0.01, 32), seed=1, starts_after=60.0)
    first = replace(setup, starts_after=0.0)
    rows = list(arrivals([Phase(300, 1.0, 128, 64), Phase(800, 3.0, 128, 64), Phase(1200, 1.0, 128, 64)], 1, 8192))
    ours = fleet([first, setup], rows, 1200.0, spec=SPEC, scaler=lambda: CapacityScaler(SPEC, ReplicaSpec(1, 8)))
    theirs = fleet([first, setup], rows, 1200.0, scaler=lambda: QueueDepthScaler(1, 8))
    assert max(n for _, n in ours.replicas) > 2 and ours.goodput > 0.7
    assert ours.replica_seconds_per_good <= 0.7 * theirs.replica_seconds_per_good
