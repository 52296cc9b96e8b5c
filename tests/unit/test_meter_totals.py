"""The totals of Stats against sums made by hand from what the runner and the clock saw."""

from __future__ import annotations

import pytest
from engine_kit import CHUNK, Kit

from weir_server.contract import BOUNDS, STEP_PRODUCTS, STEP_SUMS
from weir_server.engine.meter import Meter
from weir_server.link.messages import Cancel


def advance(meter: Meter, now: float, **gauges: object) -> None:
    values: dict[str, object] = {
        "running": 0, "prefilling": 0, "decoding": False, "waiting": 0, "oldest_arrival": None, "bound": None,
        "chunks": (0, 0, 9), "resident": 0,
    }
    meter.advance(now, **{**values, **gauges})  # type: ignore[arg-type]


def test_integrals_are_of_the_gauges_that_held_until_now() -> None:
    meter = Meter(10.0, chunk_bytes=100)
    advance(meter, 11.0, running=3, prefilling=1, decoding=True, waiting=2, bound="kv", chunks=(5, 1, 3))
    advance(meter, 13.0, running=1, prefilling=1, waiting=1, bound="slots", chunks=(2, 0, 7))
    advance(meter, 14.0)
    s = meter.stats
    assert (s.decoding_seconds, s.running_seconds, s.waiting_seconds) == (2.0, 6.0, 5.0)
    assert s.head_wait_seconds == {"slots": 1.0, "kv": 2.0, "prefill": 0.0, "drain": 0.0}
    assert s.kv_used_byte_seconds == 2 * 500 + 1 * 200
    assert (s.kv_used_bytes, s.kv_cached_bytes, s.kv_blocks_free) == (0, 0, 9)


def test_step_sums_and_products() -> None:
    meter = Meter(0.0, 100)
    meter.count_step(0.5, rows=3, context=40, prefill=0, recomputed=0)
    meter.count_step(2.0, rows=1, context=10, prefill=7, recomputed=4)
    s = meter.stats
    assert s.step == {"steps": 2, "step_seconds": 2.5, "decode_rows": 4, "context_tokens": 50, "prefill_tokens": 7}
    assert s.decode_only == {"steps": 1, "step_seconds": 0.5, "decode_rows": 3, "context_tokens": 40, "prefill_tokens": 0}
    assert s.products == {
        "nn": 10, "nc": 130, "np": 7, "cc": 1700, "cp": 70, "pp": 49, "ny": 3.5, "cy": 40, "py": 14, "yy": 4.25
    }
    assert s.recompute_seconds == pytest.approx(2.0 * 4 / 8) and s.recomputed_tokens == 4


def test_every_name_of_the_contract_is_there_before_the_first_event() -> None:
    s = Meter(0.0, 100).stats
    assert set(s.step) == set(s.decode_only) == set(STEP_SUMS)
    assert set(s.products) == set(STEP_PRODUCTS) and set(s.head_wait_seconds) == set(BOUNDS)
    assert set(s.invariant_violations) == {f"I{i}" for i in range(1, 10)}


def test_the_engines_totals_are_those_of_what_it_fed() -> None:
    kit = Kit(rows=3, chunk=8)
    start = kit.clock.now
    for _ in range(5):
        kit.submit(10, 12)
    kit.run()
    fed = [row for step in kit.runner.steps for row in step]
    step = kit.stats.step
    assert step["steps"] == len(kit.runner.steps)
    assert step["prefill_tokens"] + step["decode_rows"] == sum(len(row.tokens) for row in fed)
    generated = sum(len(said) for said in kit.said.values())
    assert (step["prefill_tokens"], step["decode_rows"]) == (5 * 10, generated - 5)
    assert step["context_tokens"] == 5 * sum(range(11, 22))
    assert 0 < step["step_seconds"] <= kit.clock.now - start
    assert 0 < kit.stats.decoding_seconds <= kit.clock.now - start
    assert kit.stats.waiting_seconds > 0 and kit.stats.head_wait_seconds["slots"] > 0


def test_preemption_is_counted_with_what_it_cost() -> None:
    kit = Kit(blocks=9, rows=3, prefix_cache=False)
    for _ in range(3):
        kit.submit(6, 14)
    kit.run()
    s = kit.stats
    assert s.preempted == s.soft_resets == s.preemptions_by_cause["kv"] > 0
    total = sum(len(row.tokens) for step in kit.runner.steps for row in step)
    positions = 3 * (6 + 14 - 1)
    assert s.recomputed_tokens == total - positions, "everything fed beyond once is recompute"
    assert s.preempted_tokens == s.recomputed_tokens, "without a cache all that was given up is computed again"


def test_what_the_cache_kept_is_given_up_and_not_computed_again() -> None:
    kit = Kit(blocks=13, rows=3)
    for _ in range(3):
        kit.submit(12, 14)
    kit.run()
    assert kit.stats.preempted_tokens > kit.stats.recomputed_tokens > 0


def test_memory_stays_with_the_pool_until_the_budget_is_lowered() -> None:
    kit = Kit(blocks=40, prefix_cache=False)
    kit.submit(40, 8)
    kit.run()
    s = kit.stats
    assert s.kv_used_bytes == s.kv_cached_bytes == 0 and s.kv_resident_bytes == 12 * CHUNK
    kit.knob(kv_cache_budget=5 * CHUNK)
    assert s.kv_resident_bytes == 5 * CHUNK


def test_gauges_after_everything_is_gone() -> None:
    """vllm-project/vllm#29928: gauges must not keep the last step's values when everybody leaves at once."""
    kit = Kit(rows=4)
    ids = [kit.submit(20, 50) for _ in range(7)]
    kit.step(4)
    assert kit.stats.running == 4 and kit.stats.waiting == 3 and kit.stats.kv_used_bytes >= 4 * 6 * CHUNK
    kit.engine.handle([Cancel(id) for id in ids])
    s = kit.report().stats
    assert (s.running, s.prefilling, s.waiting, s.kv_used_bytes, s.oldest_arrival, s.bound) == (0, 0, 0, 0, None, None)
    assert len(kit.ended) == 7 and len(kit.cached) == 4
