"""The law's invariants (O1–O5) on plants, starts and outages that hypothesis makes up. O4 of the set-point: law_plants."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from law_kit import SPEC, FlowPod, Loop, with_boot

from weir_server.contract import KNOBS, Plant, Slo

PLANTS = st.builds(
    Plant, st.floats(0.002, 0.08), st.floats(0.0001, 0.01), st.floats(0.0, 2e-6), st.floats(0.0, 0.003),
    st.sampled_from([64, 512]),
)


@given(plant=PLANTS, boot=st.tuples(st.integers(1, 64), st.integers(1, 64)), load=st.floats(0.2, 3),
       ttft=st.floats(0.5, 6), factor=st.floats(1.1, 3), low=st.integers(1, 8), high=st.integers(8, 80))
@settings(max_examples=15, deadline=None)
def test_knobs_never_leave_the_bounds_and_the_envelope(plant, boot, load, ttft, factor, low, high):
    """O1, over whole runs."""
    pod = FlowPod(plant, with_boot(max_batch_size=boot[0], max_queue_depth=boot[1]))
    pod.offered = load * 4 / (64 * pod.interval(4))
    pod.slo = Slo(ttft, factor * pod.interval(4))
    spec = replace(SPEC, ttft=ttft, tpot=pod.slo.tpot, bounds={"max_batch_size": (low, high), "max_queue_depth": (None, 50)})
    loop = Loop(pod, spec)
    loop.run(300)
    for move in loop.moves:
        for knob, value in move.knobs.items():
            assert knob in KNOBS and pod.envelope.violation(knob, value) is None
        assert low <= move.knobs.get("max_batch_size", low) <= min(high, 64)
        assert move.knobs.get("max_queue_depth", 1) <= 50


@given(gone=st.lists(st.booleans(), min_size=60, max_size=60), offered=st.floats(0.2, 4))
@settings(max_examples=20, deadline=None)
def test_nothing_is_raised_on_news_older_than_three_polls(gone, offered):
    """O2."""
    loop, last = Loop(FlowPod(offered=offered)), -math.inf
    for dropped in gone:
        decision = loop.poll(dropped=dropped)
        last = last if dropped else loop.now
        if loop.now - last > 15.0:
            assert not decision.moves


@given(slow=st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.5, 5.0]), min_size=40, max_size=40),
       tax=st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=20, deadline=None)
def test_an_emergency_never_raises_anything(slow, tax):
    loop = Loop(FlowPod())
    loop.pod.tax = tax
    for factor in slow:
        loop.pod.slowdown, before = factor, loop.pod.target
        for move in loop.poll().moves:
            if move.emergency:
                assert all(value < getattr(before, knob) for knob, value in move.knobs.items())


@given(slow=st.lists(st.sampled_from([1.0, 1.0, 1.4, 5.0]), min_size=30, max_size=30), kv=st.sampled_from([None, 3.0]),
       tax=st.sampled_from([0.0, 0.05]))
@settings(max_examples=12, deadline=None)
def test_a_run_whose_state_goes_through_json_at_every_poll_decides_the_same(slow, kv, tax):
    """O5: resumed and replayed decisions are the same decisions."""
    logs = []
    for through_json in (False, True):
        pod = FlowPod()
        pod.kv_rows, pod.tax = kv, tax
        loop = Loop(pod, through_json=through_json)
        for factor in slow:
            pod.slowdown = factor
            loop.poll()
        logs.append(loop.log)
    assert logs[0] == logs[1]


@given(boot=st.tuples(st.integers(1, 32), st.integers(1, 64)), load=st.floats(0.3, 2.5))
@settings(max_examples=12, deadline=None)
def test_a_steady_pod_without_noise_comes_to_rest(boot, load):
    """O4 through decide() itself: no reversal, and rest after ten minutes but for a last step.

    The spreads still remember rows of earlier settings for a while, and a gain at the edge of the dead-band may pass it late.
    """
    pod = FlowPod(boot=with_boot(max_batch_size=boot[0], max_queue_depth=boot[1]))
    pod.offered = load * 8 / (64 * pod.interval(8))
    loop = Loop(pod)
    loop.run(1200)
    sizes = [boot[0]] + [m.knobs["max_batch_size"] for m in loop.moves if "max_batch_size" in m.knobs]
    steps = [b - a for a, b in pairwise(sizes)]
    assert not any(x * y < 0 for x, y in pairwise(steps)), sizes
    late = [m.knobs for d in loop.log[-120:] for m in d.moves]
    assert len(late) <= 1 and all(abs(k.get("max_batch_size", sizes[-1]) - sizes[-1]) <= 1 for k in late), late
