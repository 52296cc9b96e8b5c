"""Leases, fences, fallback, objectives: one writer's order, time as an argument."""

from __future__ import annotations

from typing import Any

import pytest

from weir_server.contract import Envelope, Knobs, KnobsRequest, Slo
from weir_server.http.knobs import KnobBoard, KnobError, within

BOOT = Knobs(4, 1000, 0.01, 32)
ENVELOPE = Envelope((1, 64), (300, 2000), (1, 1024), (0.0, 0.5))


def board() -> KnobBoard:
    return KnobBoard("me", ENVELOPE, BOOT, Slo(2.0, 0.08), chunk_bytes=100)


def write(seq: int = 1, lease: float = 60.0, **more: Any) -> KnobsRequest:
    return KnobsRequest(**{"instance": "me", "epoch": 1, "seq": seq, "lease_seconds": lease, **more})


def status(b: KnobBoard, request: KnobsRequest, now: float = 0.0) -> int:
    with pytest.raises(KnobError) as e:
        b.put(request, now)
    return e.value.status


def test_a_write_is_in_force_until_its_lease_ends():
    b = board()
    b.put(write(knobs={"max_batch_size": 8}), 100.0)
    assert b.target == BOOT.merged({"max_batch_size": 8}) and b.expires_in(130.0) == 30.0
    assert not b.tick(159.9) and b.target.max_batch_size == 8
    assert b.tick(160.0) and b.target == BOOT and b.expires_in(161.0) is None
    assert b.expirations == 1 and not b.tick(1e9)


def test_the_same_write_renews_and_another_under_the_same_seq_is_refused():
    b = board()
    b.put(write(knobs={"max_batch_size": 8}), 0.0)
    b.put(write(knobs={"max_batch_size": 8}), 50.0)
    assert b.expires_in(50.0) == 60.0
    assert status(b, write(knobs={"max_batch_size": 9})) == 409
    assert b.target.max_batch_size == 8


@pytest.mark.parametrize("stale", [{"seq": 4}, {"epoch": 0, "seq": 99}, {"instance": "another"}])
def test_whoever_is_older_or_means_another_process_is_refused(stale: dict[str, Any]):
    b = board()
    b.put(write(seq=5, knobs={"max_batch_size": 8}), 0.0)
    assert status(b, write(**{"seq": 6, "knobs": {"max_batch_size": 2}, **stale})) == 409
    assert b.target.max_batch_size == 8
    with pytest.raises(KnobError):
        b.drain(**{"instance": "me", "epoch": 1, "seq": 6, **stale})
    assert not b.draining


def test_a_newer_epoch_may_begin_again():
    b = board()
    b.put(write(seq=500), 0.0)
    b.put(write(seq=1, epoch=2, knobs={"max_queue_depth": 3}), 0.0)
    assert b.target.max_queue_depth == 3


def test_outside_the_envelope_changes_nothing_at_all():
    b = board()
    with pytest.raises(KnobError) as e:
        b.put(write(knobs={"max_queue_depth": 7, "max_batch_size": 65}, slo={"ttft": 1.0, "tpot": 1.0}), 0.0)
    assert e.value.status == 422 and e.value.body["bound"] == 64
    assert (b.target, b.slo.generation, b.fence.seq, b.expires_in(0)) == (BOOT, 0, 0, None)
    assert status(b, write(fallback={"kv_cache_budget": 299})) == 422


@pytest.mark.parametrize("knobs", [{"speed": 1}, {"max_batch_size": 2.0}, {"max_batch_size": "2"}, {"max_queue_depth": True},
                                   {"admission_watermark": float("nan")}, {"max_batch_size": None}])  # fmt: skip
def test_malformed_knobs_are_a_400(knobs: dict[str, Any]):
    assert status(board(), write(knobs=knobs)) == 400


def test_the_budget_is_whole_chunks():
    b = board()
    b.put(write(knobs={"kv_cache_budget": 1299}), 0.0)
    assert b.target.kv_cache_budget == 1200


def test_a_budget_is_raised_only_into_memory_that_is_there():
    b = board()
    with pytest.raises(KnobError) as e:
        b.put(write(knobs={"kv_cache_budget": 1700, "max_batch_size": 8}), 0.0, budget_room=1650)
    assert e.value.status == 422 and e.value.body["bound"] == 1600 and b.target == BOOT and b.fence.seq == 0
    b.put(write(knobs={"kv_cache_budget": 1600}), 0.0, budget_room=1650)
    b.put(write(seq=2, knobs={"kv_cache_budget": 1600}), 0.0, budget_room=0)
    b.put(write(seq=3, knobs={"kv_cache_budget": 1000}), 0.0, budget_room=0)
    b.put(write(seq=4, knobs={"kv_cache_budget": 2000}), 0.0, budget_room=None)
    assert b.target.kv_cache_budget == 2000


def test_a_lease_given_back_puts_the_pushed_fallback_in_force():
    b = board()
    b.put(write(seq=1, knobs={"max_batch_size": 8}), 0.0)
    b.put(write(seq=2, lease=0, knobs={"max_batch_size": 9}, fallback={"max_batch_size": 6}), 1.0)
    assert b.target == BOOT.merged({"max_batch_size": 6}) and b.expires_in(1.0) is None


def test_objectives_outlive_the_lease_and_change_their_generation_only_when_they_change():
    b = board()
    b.put(write(slo={"ttft": 1.0, "tpot": 0.05}), 0.0)
    b.put(write(seq=2, slo={"ttft": 1.0, "tpot": 0.05}), 1.0)
    assert b.tick(100.0) and b.slo == Slo(1.0, 0.05, generation=1)
    for wrong in ({"ttft": 0.0}, {"ttft": float("inf")}, {"itl": 1.0}, {"tpot": True}):
        assert status(b, write(seq=3, slo=wrong)) == 400


def test_a_draining_server_takes_no_knobs():
    b = board()
    b.drain("me", 1, 1)
    assert status(b, write(seq=2, knobs={"max_batch_size": 8})) == 503


def test_without_a_budget_knob_only_none_may_be_said_of_it():
    b = KnobBoard("me", Envelope((1, 64), None, (1, 9), (0.0, 0.5)), Knobs(4, None, 0.0, 9), Slo(1, 1), 100)
    b.put(write(knobs={"kv_cache_budget": None, "max_batch_size": 5}), 0.0)
    assert b.target == Knobs(5, None, 0.0, 9)
    assert status(b, write(seq=2, knobs={"kv_cache_budget": 500})) == 422


def test_declared_start_values_move_to_the_nearest_bound():
    assert within(ENVELOPE, {"max_batch_size": 900, "kv_cache_budget": 50, "max_queue_depth": 7}, 100) == {
        "max_batch_size": 64, "kv_cache_budget": 300, "max_queue_depth": 7,
    }  # fmt: skip


def test_no_way_back_to_the_fallback_raises_the_budget_above_what_memory_has():
    """A lease that expires, one that is given back, and start values: all are cut to the room, and whole once there is room."""
    b = board()
    b.put(write(knobs={"kv_cache_budget": 500}, fallback={"kv_cache_budget": 1800, "max_queue_depth": 7}), 0.0)
    assert b.tick(60.0, budget_room=950) and (b.target.kv_cache_budget, b.target.max_queue_depth) == (900, 7)
    assert not b.tick(61.0, budget_room=1750), "no steps on the way"
    assert b.tick(62.0, budget_room=1800) and b.target == b.fallback and not b.tick(63.0, budget_room=0)
    b.put(write(seq=2, knobs={"kv_cache_budget": 400}), 70.0)
    b.put(write(seq=3, lease=0), 71.0, budget_room=650)
    assert b.target.kv_cache_budget == 600 and b.expirations == 1
    started = KnobBoard("me", ENVELOPE, BOOT, Slo(1, 1), 100, engine=BOOT.merged({"kv_cache_budget": 700}), budget_room=850)
    assert started.target == BOOT.merged({"kv_cache_budget": 800}) and started.boot == started.fallback == BOOT
    assert started.tick(1.0, budget_room=None) and started.target == BOOT


def test_a_fallback_lower_than_what_is_in_force_needs_no_room():
    b = board()
    b.put(write(fallback={"kv_cache_budget": 400}), 0.0)
    assert b.tick(60.0, budget_room=0) and b.target.kv_cache_budget == 400
