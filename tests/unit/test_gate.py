"""The queue-full rule and Retry-After."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weir_server.contract import Plant
from weir_server.http.gate import RETRY_MAX, Load, Pace, allowance, is_full, retry_after, wait_seconds

PLANT = Plant(a=0.04, b=0.003, c=0.0, p=0.002, prefill_tokens=64)


def test_the_rule_for_one_row_is_the_contracts():
    """Refused iff waiting ≥ depth + allowance (a depth is at least 1)."""
    for waiting in range(12):
        for running in range(6):
            for bound in ("slots", "kv"):
                load = Load(waiting, running, bound)
                spare = 0 if bound == "kv" else max(0, 4 - running)
                assert allowance(load, 4) == spare
                assert is_full(load, 1, depth=3, batch=4) == (waiting >= 3 + spare)


def test_a_request_wider_than_the_queue_is_taken_when_nothing_waits():
    assert not is_full(Load(0, 4, None), 8, depth=1, batch=4)
    assert is_full(Load(1, 4, "slots"), 8, depth=4, batch=4)


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 40), st.integers(1, 20))
def test_what_waits_stays_within_depth_and_free_slots(arrivals: int, running: int, depth: int, batch: int):
    waiting = 0
    for _ in range(arrivals):
        if not is_full(Load(waiting, running, "slots"), 1, depth, batch):
            waiting += 1
    assert waiting == min(arrivals, depth + max(0, batch - running))


def test_the_wait_is_the_measured_drain_rate():
    pace = Pace(rows_per_second=2.0, queued_tokens=0, remaining_tokens=0, plant=None)
    assert wait_seconds(Load(10, 4, "slots"), pace) == 5.0
    assert wait_seconds(Load(1, 4, "slots"), Pace(2.0, 4000, 0, PLANT)) == 8.0, "prefill of what waits takes longer"


def test_before_anything_finished_the_plant_says_how_long():
    pace = Pace(rows_per_second=0, queued_tokens=100, remaining_tokens=50, plant=PLANT)
    assert wait_seconds(Load(8, 4, "slots"), pace) == 2 * 50 * (0.04 + 4 * 0.003) + 100 * 0.002
    assert wait_seconds(Load(8, 4, "slots"), Pace(0, 100, 50, None)) is None


@given(st.integers(0, 10**6), st.floats(0, 100), st.floats(0, 0.999))
def test_retry_after_is_whole_bounded_and_scattered(waiting: int, rate: float, dice: float):
    seconds = retry_after(Load(waiting, 4, "slots"), Pace(rate, 0, 100, PLANT), dice)
    assert isinstance(seconds, int) and 1 <= seconds <= RETRY_MAX


def test_jitter_parts_those_that_were_refused_together():
    load, pace = Load(100, 4, "slots"), Pace(1.0, 0, 0, None)
    seconds = [retry_after(load, pace, d / 10) for d in range(10)]
    assert len(set(seconds)) == 10 and min(seconds) >= 80 and max(seconds) <= 120
