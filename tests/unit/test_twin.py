"""The pod that skips what cannot differ, against the pod whose every step is real: same windows, same rows, same clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir_operator.simulate.load import Arrival, Phase, arrivals
from weir_operator.simulate.pod import Pod
from weir_operator.simulate.port import CHUNK_BYTES, PodSetup
from weir_operator.simulate.run import static
from weir_operator.simulate.twin import Pressed, Twin
from weir_server.contract import Knobs, Plant, Slo

CPU = Plant(0.042, 0.0032, 1e-6, 0.002, 64)


def same(a, b) -> bool:
    """Equal but for the order in which floats were added."""
    if isinstance(a, float) or isinstance(b, float):
        return a == pytest.approx(b, rel=1e-9, abs=1e-9)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def windows(kind, setup: PodSetup, rows: list[Arrival], moves: dict[int, dict[str, float]], polls: int = 24):
    pod, out = kind(setup), []
    pod.inbox.extend(rows)
    for i in range(polls):
        pod.run(i * 5.0)
        out.append(json.loads(json.dumps(pod.window().to_wire())))
        if i in moves:
            pod.set_knobs(moves[i], seq=i + 1)
    return out, sorted(pod.good_arrivals)


SETTINGS = st.builds(lambda b, q: {"max_batch_size": b, "max_queue_depth": q}, st.integers(1, 24), st.integers(1, 24))


@given(
    seed=st.integers(0, 10_000), rate=st.floats(0.05, 6), prompt=st.floats(2, 900), output=st.floats(2, 300),
    cv=st.floats(0, 1.5), batch=st.integers(1, 24), depth=st.integers(1, 24), chunk=st.sampled_from([None, 0, 32, 512]),
    kv=st.sampled_from([160, 4096]), watermark=st.sampled_from([0.0, 0.01, 0.3]),
    moves=st.dictionaries(st.integers(1, 20), SETTINGS, max_size=3),
)
@settings(max_examples=15, deadline=None)
def test_every_window_is_the_same_as_with_real_steps(
    seed, rate, prompt, output, cv, batch, depth, chunk, kv, watermark, moves
):
    setup = PodSetup(
        CPU, Slo(2.0, 0.1), Knobs(batch, None, watermark, depth), kv_blocks=kv, context=2048, chunk=chunk, noise=0.1, seed=seed,
    )
    rows = list(arrivals([Phase(100, rate, prompt, output, cv)], seed, 2048))
    try:
        quick = windows(Twin, setup, rows, moves)
    except Pressed:
        return
    real = windows(Pod, setup, rows, moves)
    assert real[1] == quick[1]
    for a, b in zip(real[0], quick[0], strict=True):
        wrong = {k: (a[k], b[k]) for k in a if not same(a[k], b[k])}
        assert not wrong


def test_some_of_those_runs_are_long_enough_to_mean_something():
    setup = PodSetup(CPU, Slo(2.0, 0.1), Knobs(8, None, 0.01, 4), seed=1)
    rows = list(arrivals([Phase(100, 1.6, 128, 64)], 1, 2048))
    real, quick = windows(Pod, setup, rows, {6: {"max_batch_size": 3}}), windows(Twin, setup, rows, {6: {"max_batch_size": 3}})
    assert real[1] == quick[1] and len(real[1]) > 20
    assert all(same(a, b) for a, b in zip(real[0], quick[0], strict=True))
    last = quick[0][-1]
    assert last["finished"]["length"] > 50 and sum(last["refused"]["queue_full"].values()) > 10 and last["settled_at"] > 30


def test_where_rows_must_give_way_the_run_is_done_with_real_steps():
    """Preemption is not modelled: the result is that of the engine, or there is none."""
    setup = PodSetup(CPU, Slo(9.0, 0.3), Knobs(8, None, 0.0, 16), kv_blocks=40, context=512, seed=1)
    rows = list(arrivals([Phase(100, 2.0, 100, 120, 0.3)], 1, 512))
    twin = Twin(setup)
    twin.inbox.extend(rows)
    with pytest.raises(Pressed):
        twin.run(100.0)
    result = static(setup, rows, 100.0)
    assert result.window.preempted > 0


def test_a_move_of_the_budget_is_beyond_it():
    twin = Twin(PodSetup(CPU, Slo(2.0, 0.1), context=512))
    with pytest.raises(Pressed):
        twin.set_knobs({"kv_cache_budget": 1000 * CHUNK_BYTES}, 1)


def test_without_a_reader_the_same_rows_are_good():
    setup = PodSetup(CPU, Slo(2.0, 0.1), Knobs(8, None, 0.01, 2), seed=3)
    rows = list(arrivals([Phase(200, 1.6, 128, 64)], 3, 2048))
    good = []
    for watched in (True, False):
        twin = Twin(setup, watched)
        twin.inbox.extend(rows)
        twin.run(300.0)
        good.append(twin.good_arrivals)
    assert good[0] == good[1] and len(good[0]) > 100
