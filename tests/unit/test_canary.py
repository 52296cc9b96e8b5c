"""Several pods of one class: canaries, what they owe each other, and what outlives them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from law_kit import CPU, HISTORY_SECONDS, SPEC, FlowPod, started

from weir_operator.tuner import memory
from weir_operator.tuner.law import decide
from weir_operator.tuner.memory import MOST, distance, largest, nearest, remember
from weir_operator.tuner.types import Learned, Mix, PodView, Poll, TunerSpec, TunerState
from weir_operator.tuner.verdict import wilson


class Pods:
    """A few FlowPods of one class under one decide()."""

    def __init__(self, *pods: FlowPod, spec: TunerSpec = SPEC, classes: str | None = None):
        self.pods = {f"p{i}": pod for i, pod in enumerate(pods)}
        self.classes = dict(zip(self.pods, classes or "x" * len(pods), strict=True))
        self.polls = {name: [] for name in self.pods}
        self.state, self.spec, self.now, self.log = TunerState(), spec, 1000.0, []

    def poll(self, through_json: bool = False):
        self.now += self.spec.poll_seconds
        views = {}
        for name, pod in self.pods.items():
            pod.advance(self.spec.poll_seconds)
            polls = self.polls.setdefault(name, [])
            polls.append(Poll(self.now, pod.window()))
            self.polls[name] = [p for p in polls if p.at >= self.now - HISTORY_SECONDS]
            views[name] = PodView(name, self.classes.get(name, "x"), pod.control(), tuple(self.polls[name]))
        if through_json:
            self.state = TunerState.from_json(json.loads(json.dumps(self.state.to_json())))
        decision = decide(self.state, views, self.spec, self.now)
        self.state = decision.state
        self.log.append(decision)
        for move in decision.moves:
            self.pods[move.pod].set(move.knobs)
        return decision

    def run(self, seconds: float, **kind):
        return [self.poll(**kind) for _ in range(round(seconds / self.spec.poll_seconds))]

    def raises(self) -> list[tuple[str, int]]:
        return [(m.pod, m.knobs["max_batch_size"]) for d in self.log for m in d.moves if "max_batch_size" in m.knobs]

    def last(self, name: str):
        return next(r for d in reversed(self.log) for r in d.records if r.pod == name)

    def batches(self) -> list[int]:
        return [pod.target.max_batch_size for pod in self.pods.values()]


def fleet(n: int = 3, **kind) -> Pods:
    return Pods(*(FlowPod(offered=1.6) for _ in range(n)), **kind)


@cache
def best() -> int:
    """Where a pod of this kit comes to rest."""
    pods = fleet(1)
    pods.run(400)
    return pods.batches()[0]


def test_one_pod_tries_a_larger_batch_and_the_others_wait_with_their_queues_free():
    pods = fleet()
    pods.run(35)
    raised = pods.raises()
    assert len(raised) == 1 and raised[0][1] > 4
    held = [name for name in pods.pods if name != raised[0][0]]
    assert {str(pods.last(n).outcome) for n in held} <= {"Waiting", "Moved"}
    assert all(pods.pods[n].target.max_batch_size == 4 and pods.pods[n].target.max_queue_depth < 32 for n in held)
    assert list(pods.state.canaries) == ["x"]
    pods.run(30)
    assert any(str(r.outcome) == "Waiting" and "first" in r.reason for d in pods.log for r in d.records)


def test_when_it_came_out_as_predicted_the_others_follow_a_few_at_a_time():
    pods = fleet(5)
    pods.run(400)
    assert pods.batches() == [best()] * 5 and not pods.state.canaries
    first = pods.raises()[0][0]
    followed: dict[str, int] = {}
    for i, d in enumerate(pods.log):
        for m in d.moves:
            if "max_batch_size" in m.knobs and m.pod != first:
                followed.setdefault(m.pod, i)
    ticks = list(followed.values())
    assert len(ticks) == 4 and max(ticks.count(t) for t in ticks) == 2, "a quarter of five, rounded up"
    assert pods.state.learned[0].largest == best()


def test_up_to_what_was_verified_no_canary_is_needed():
    pods = fleet(2)
    pods.run(400)
    pods.pods["p1"].set({"max_batch_size": 4})  # somebody set it back
    pods.run(150)
    assert pods.batches() == [best()] * 2
    assert not any(d.state.canaries for d in pods.log[-30:])


def test_a_canary_that_made_things_worse_is_a_ceiling_for_all():
    pods = fleet()
    pods.run(35)
    name, batch = pods.raises()[0]
    pods.pods[name].slo = replace(pods.pods[name].slo, tpot=0.01)  # on this pod every row misses now
    state = pods.state.pods[name]
    told = replace(state, pending=replace(state.pending, goodput_before=1.0))
    pods.state = replace(pods.state, pods={**pods.state.pods, name: told})
    before = len(pods.raises())
    pods.run(90)
    assert any(str(r.outcome) == "Reverted" for d in pods.log for r in d.records)
    assert pods.pods[name].target.max_batch_size < batch
    assert {pods.state.pods[n].ceiling for n in pods.pods if n != name} == {batch}
    assert all(b < batch for _, b in pods.raises()[before:])


@pytest.mark.parametrize("end", ["gone", "restarted", "bounds", "forgotten"])
def test_no_canary_is_left_behind(end):
    """A rollout takes its pod, its process starts anew, the user edits the bounds, a new leader knows nothing of it."""
    pods = fleet()
    pods.run(35)
    name = pods.raises()[0][0]
    if end == "gone":
        del pods.pods[name]
    elif end == "restarted":
        pods.pods[name].restart("again")
    elif end == "bounds":
        pods.spec = replace(pods.spec, bounds={"max_batch_size": (1, 5)})
    else:
        pods.state = TunerState()
    pods.run(30)
    assert all(c.pod != name or c.instance != "one" or c.batch <= 5 for c in pods.state.canaries.values())
    pods.run(400)
    assert not pods.state.canaries and set(pods.batches()) == {5 if end == "bounds" else best()}


def test_a_pause_in_the_middle_moves_nothing_and_the_canary_is_judged_after_it():
    pods = fleet()
    pods.run(35)
    pods.spec = replace(pods.spec, paused=True)
    count = len(pods.raises())
    pods.run(600)
    assert len(pods.raises()) == count
    pods.spec = replace(pods.spec, paused=False)
    pods.run(400)
    assert pods.batches() == [best()] * 3


def test_another_leader_resumes_from_what_was_saved_and_decides_the_same():
    """O5 for several pods: the state through JSON at every poll."""
    logs = []
    for through_json in (False, True):
        pods = fleet()
        pods.run(200, through_json=through_json)
        logs.append(pods.log)
    assert logs[0] == logs[1] and any(d.moves for d in logs[0])


def test_raises_wait_while_a_pod_has_just_started():
    pods = fleet(2)
    pods.run(400)
    pods.pods["p0"].offered = pods.pods["p1"].offered = 1.6
    pods.spec = replace(pods.spec, tpot=0.16)  # room for more
    pods.pods["p2"] = FlowPod(offered=1.6)
    pods.pods["p2"].now = 0.0
    pods.classes["p2"] = "x"
    before = len(pods.raises())
    pods.run(40)
    moved = {name for name, _ in pods.raises()[before:]}
    assert not moved & {"p0", "p1"}
    pods.run(300)
    assert {name for name, _ in pods.raises()[before:]} >= {"p0"}, "but not for ever"


def test_pods_of_other_classes_do_not_wait_for_each_other():
    pods = fleet(2, classes="xy")
    pods.run(35)
    assert {name for name, _ in pods.raises()} == {"p0", "p1"}


def test_a_slow_pod_gets_its_own_batch():
    slow = FlowPod(plant=replace(CPU, a=2 * CPU.a, b=2 * CPU.b, p=2 * CPU.p), offered=1.6)
    pods = Pods(FlowPod(offered=1.6), slow, spec=replace(SPEC, tpot=0.15))
    for pod in pods.pods.values():
        pod.slo = replace(pod.slo, tpot=0.15)
    pods.run(600)
    fast, slow_batch = pods.batches()
    assert slow_batch < fast


def test_one_replica_needs_no_canary():
    loop = started()
    assert "max_batch_size" in loop.moves[0].knobs and not loop.state.canaries


# ---------------------------------------------------------------- what outlives a pod

def test_a_pod_that_starts_is_given_what_its_class_does_best():
    pods = fleet(1)
    pods.run(400)
    pods.pods["p1"] = FlowPod(offered=1.6)
    pods.run(35)
    learned = [m for d in pods.log for m in d.moves if m.rule == "learned"]
    assert [m.pod for m in learned] == ["p1"] and pods.batches() == [best()] * 2


def test_a_value_that_somebody_has_set_is_not_taken_for_a_start():
    pods = fleet(1)
    pods.run(400)
    pods.pods["p1"] = FlowPod(offered=1.6)
    pods.pods["p1"].set({"max_batch_size": 6})
    pods.run(35)
    assert not any(m.rule == "learned" for d in pods.log for m in d.moves)


def test_a_workload_that_comes_back_is_met_with_what_did_best_under_it():
    pod = FlowPod(offered=1.6)
    pods = Pods(pod, spec=replace(SPEC, ttft=8.0))
    pod.slo = replace(pod.slo, ttft=8.0)
    pods.run(400)
    chat = pods.batches()[0]
    pod.prompt, pod.offered = 1500, 0.3
    pods.run(600)
    assert pods.batches()[0] < chat and len(pods.state.learned) == 2
    pod.prompt, pod.offered = 128, 1.6
    pods.run(100)
    assert pods.batches()[0] == chat, "three ticks after it came back"
    assert any(m.rule == "learned" for d in pods.log[-20:] for m in d.moves)


def test_what_did_best_under_another_rate_is_left_where_it_is_predicted_to_do_worse():
    """A fingerprint has no rate: the batch that a crowd needs is not what three rows a minute do best with."""
    loop = started(seconds=400)
    best_now, crowd = loop.pod.target.max_batch_size, replace(loop.state.learned[0], batch=40, depth=40)
    loop.state = replace(loop.state, learned=(crowd,), pods={"p": replace(loop.me, recall=True, pending=None)})
    loop.run(35)
    assert loop.pod.target.max_batch_size == best_now and not any(m.rule == "learned" for m in loop.moves)
    loop.state = replace(
        loop.state, learned=(replace(crowd, batch=best_now, depth=2),), pods={"p": replace(loop.me, recall=True, pending=None)}
    )
    loop.pod.set({"max_batch_size": 2})
    loop.run(35)
    assert loop.moves[-1].rule == "learned" and loop.pod.target.max_batch_size == best_now


def test_a_batch_that_is_kept_for_want_of_evidence_is_not_learned(monkeypatch):
    loop = started()
    loop.run(60)
    loop.state = replace(loop.state, learned=())
    loop.pod.set({"max_batch_size": 5})
    monkeypatch.setattr("weir_operator.tuner.law.certain", lambda *a, **k: False)
    loop.run(150)
    assert "within the error of its prediction" in loop.records[-1].reason and loop.state.learned == ()


def entry(output=64.0, prefill=2.0, context=160.0, batch=8, at=0.0, kind="x", most=0) -> Learned:
    return Learned(kind, output, prefill, context, batch, 1, 0.01, most, 1.0, CPU, at)


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 100), st.floats(0, 1e5), st.integers(1, 99)), max_size=40))
def test_what_is_remembered_is_bounded_and_one_for_each_workload(entries):
    learned = ()
    for i, (output, prefill, context, batch) in enumerate(entries):
        learned = remember(learned, entry(output, prefill, context, batch, at=float(i)))
    assert len(learned) <= MOST
    assert [e.verified_at for e in learned] == sorted((e.verified_at for e in learned), reverse=True)
    saved = TunerState(learned=learned)
    assert TunerState.from_json(json.loads(json.dumps(saved.to_json()))) == saved


def test_the_largest_verified_batch_of_a_workload_stays_known_and_old_entries_go():
    learned = remember((), entry(most=12, at=0.0))
    learned = remember(learned, entry(batch=6, most=6, at=10.0))
    mix = Mix(1.0, (1.0,), 64.0, 2.0, 160.0)
    assert len(learned) == 1 and learned[0].batch == 6 and largest(learned, "x", mix) == 12
    assert largest(learned, "y", mix) == 0 and largest(learned, "x", replace(mix, prefill=9.0)) == 0
    later = remember(learned, entry(output=640.0, at=10.0 + memory.EXPIRES))
    assert len(later) == 1


def test_the_nearest_workload_is_the_one_most_alike():
    learned = (entry(), entry(output=16.0, prefill=90.0))
    found, far = nearest(learned, "x", Mix(1.0, (1.0,), 60.0, 2.2, 150.0))
    assert found is learned[0] and far < memory.SAME
    assert nearest(learned, "y", None) is None
    assert distance(learned[0], learned[0]) == 0.0


# ---------------------------------------------------------------- attainment

@given(st.integers(0, 300), st.integers(0, 300))
def test_wilsons_interval_holds_the_share_and_narrows_with_evidence(good, bad):
    low, high = wilson(good, good + bad)
    assert 0.0 <= low <= high <= 1.0
    if good + bad:
        share = good / (good + bad)
        assert low <= share + 1e-12 and high >= share - 1e-12
        narrower = wilson(10 * good, 10 * (good + bad))
        assert narrower[1] - narrower[0] < high - low
    else:
        assert (low, high) == (0.0, 1.0)


def test_wilsons_interval_is_the_published_one():
    """81 of 263: 0.2553 … 0.3662 (Newcombe 1998, method 3)."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_a_verdict_says_the_attainment_with_its_bounds():
    loop = started(seconds=185)
    judged = [r for r in loop.records if "attainment" in r.observed]
    assert judged
    assert judged[0].observed["attainment_low"] <= judged[0].observed["attainment"] <= judged[0].observed["attainment_high"]


