"""What `weir-operator local` shows: quantiles between two readings, one line for a tick, a screen of 80 columns."""

from __future__ import annotations

import pytest
from fake_server import FakeServer
from rich.console import Console

from weir_operator.cli.display import line, quantile, reading, screen
from weir_operator.tuner.types import Outcome, PodView, Poll, Record, TunerSpec
from weir_server.contract import Histogram, Window

SPEC = TunerSpec(ttft=2.0, tpot=0.08)
RECORD = Record(0.0, "chat-0", "set-point", Outcome.MOVED, "more rows fit " * 20)


def window(**counters: object) -> Window:
    server = FakeServer()
    server.counters = {"instance": "one", **counters}
    return server.window()


def histogram(*values: float) -> Histogram:
    found = Histogram()
    for value in values:
        found.observe(value)
    return found


def test_quantiles_are_of_what_came_between_two_readings() -> None:
    before = histogram(*[9.0] * 1000)
    after = histogram(*[9.0] * 1000, *[0.1] * 94, *[1.0] * 6)
    assert quantile(before, after, 0.5) == pytest.approx(0.1, rel=0.05)
    assert quantile(before, after, 0.95) == pytest.approx(1.0, rel=0.05)
    assert quantile(after, after, 0.5) is None


def test_a_reading_spans_the_tick_and_one_process() -> None:
    polls = [Poll(10.0 * i, window(refused={"queue_full": {"slots": 5 * i}}, waiting=i)) for i in range(10)]
    seen = reading(PodView("chat-0", "c", None, tuple(polls)), 30.0)
    assert seen is not None
    assert (seen.refused, seen.waiting) == (15, 9)
    restarted = Poll(100.0, window(instance="two"))
    again = reading(PodView("chat-0", "c", None, (*polls, restarted)), 30.0)
    assert again is not None
    assert again.refused == 0
    assert reading(PodView("chat-0", "c", None, (Poll(0.0, None),)), 30.0) is None


def test_a_tick_is_one_line() -> None:
    seen = reading(PodView("chat-0", "c", None, (Poll(0.0, window()),)), 30.0)
    text = line("chat-0", seen, SPEC, RECORD)
    assert "\n" not in text
    assert "batch 4 · queue 32" in text
    assert "Moved: more rows fit" in text
    assert "does not answer" in line("chat-0", None, SPEC, None)


def test_the_screen_fits_80_columns_with_and_without_answers() -> None:
    seen = reading(PodView("chat-0", "c", None, (Poll(0.0, window()),)), 30.0)
    entry = {"time": "2026-01-01T10:20:30Z", "pod": "chat-0", "outcome": "Moved", "reason": "r" * 200, "changes": {"k": [1, 2]}}
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen("chat", {"chat-0": (seen, RECORD), "chat-1": (None, None)}, SPEC, [entry] * 9))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "TTFT ≤ 2.00 s" in text
    assert "chat-1 does not answer" in text
    assert text.count("10:20:30") == 5
