"""Latencies and books from an event stream of our own, with times that one can add up by hand; and the whole window."""

from __future__ import annotations

import pytest

from weir_server.contract import Envelope, Histogram, Knobs, Slo, Window
from weir_server.http.gate import Load
from weir_server.http.knobs import KnobBoard
from weir_server.http.observe import Observations, Row, token_buckets
from weir_server.http.window import build_window
from weir_server.link.messages import Stats

SLO = Slo(ttft=1.0, tpot=0.1)


def observations() -> Observations:
    return Observations(SLO, longest_row=8192, now=0.0)


def play(seen: Observations, arrived: float, admitted: float, tokens: list[float], reason: str = "length") -> Row:
    row = Row(arrived, prompt_tokens=10)
    seen.queue([row])
    seen.admit(row, admitted, cached=4)
    for t in tokens:
        seen.tokens(row, t, 1)
    seen.finish(row, tokens[-1] if tokens else admitted, reason)
    return row


def mean(h: Histogram) -> float:
    return h.sum / h.count


def test_latencies_of_one_row():
    seen = observations()
    play(seen, arrived=10.0, admitted=10.5, tokens=[11.0, 11.25, 11.5])
    h = seen.histograms
    assert (mean(h["queue_time"]), mean(h["ttft"]), mean(h["prefill_seconds"]), mean(h["tpot"])) == (0.5, 1.0, 0.5, 0.25)
    assert (seen.queued, seen.admitted, seen.finished["length"]) == (1, 1, 1)
    assert (seen.prompt_tokens, seen.cached_tokens, seen.generated_tokens) == (10, 4, 3)


def test_objectives_count_what_ended_by_itself_or_by_an_error():
    seen = observations()
    play(seen, 0.0, 0.0, [1.0, 1.09])
    play(seen, 0.0, 0.0, [1.01, 1.05])
    play(seen, 0.0, 0.0, [0.5, 0.61])
    play(seen, 0.0, 0.0, [0.5])
    play(seen, 0.0, 0.0, [0.5, 0.55], "error")
    play(seen, 0.0, 0.0, [5.0, 9.0], "cancelled")
    assert seen.slo_total == 5
    assert seen.slo_good == {"ttft": 3, "tpot": 3, "both": 2}


def test_the_last_two_generations_of_objectives_are_kept():
    seen = observations()
    play(seen, 0.0, 0.0, [0.5])
    for generation in (1, 2):
        seen.set_slo(Slo(9.0, 9.0, generation))
        play(seen, 0.0, 0.0, [2.0])
    assert {g: total[0] for g, (_, total) in seen.by_generation.items()} == {1: 1, 2: 1}
    assert seen.slo_total == 3, "the window's totals only grow"


def test_a_running_row_gives_a_decode_interval_each_16_tokens_over_its_last_64():
    seen = observations()
    row = Row(0.0, 10)
    seen.admit(row, 0.0, 0)
    for i in range(129):
        seen.tokens(row, i * 0.5 if i <= 64 else 32 + (i - 64) * 0.25, 1)
    h = seen.histograms["decode_interval"]
    assert h.count == 8
    assert mean(h) == pytest.approx(sum([0.5] * 4 + expected_tail()) / 8)


def expected_tail() -> list[float]:
    """Intervals taken at tokens 80, 96, 112 and 128: the last 64 spacings, of 0.5 s up to the 65th token and 0.25 s after."""
    spacings = [0.5] * 64 + [0.25] * 64
    return [sum(spacings[n - 1 - 64 : n - 1]) / 64 for n in (80, 96, 112, 128)]


def test_a_silent_row_is_noticed_after_5_seconds():
    seen = observations()
    row = Row(0.0, 10)
    seen.admit(row, 0.0, 0)
    seen.tokens(row, 1.0, 1)
    seen.overdue([row], 5.9)
    assert seen.histograms["decode_interval"].count == 0
    seen.overdue([row], 6.0)
    seen.overdue([row], 6.5)
    assert (seen.histograms["decode_interval"].count, seen.histograms["decode_interval"].sum) == (1, 5.0)


def test_settled_histograms_count_only_what_began_after():
    seen = observations()
    early = Row(0.0, 10)
    seen.admit(early, 1.0, 0)
    seen.tokens(early, 2.0, 1)
    seen.settle(3.0)
    late = Row(3.5, 10)
    seen.admit(late, 3.6, 0)
    for t in (4.0, 4.5):
        seen.tokens(early, t, 1)
        seen.tokens(late, t, 1)
    seen.finish(early, 4.5, "stop")
    seen.finish(late, 4.5, "stop")
    assert {name: h.count for name, h in seen.settled.items()} == {"ttft": 1, "tpot": 1, "decode_interval": 0}
    assert seen.histograms["tpot"].count == 2


def test_the_drain_rate_is_of_the_last_half_minute():
    seen = observations()
    for t in (0.0, 70.0, 72.0, 74.0, 76.0):
        play(seen, t, t, [t + 1])
    assert seen.rows_per_second(77.0) == pytest.approx(4 / 6)
    assert seen.rows_per_second(200.0) == 0.0


def test_every_bucket_table_holds_the_boot_objectives():
    seen = Observations(Slo(ttft=1.234, tpot=0.0567), 8192, 0.0)
    assert 1.234 in seen.buckets["ttft"].edges and 1.234 not in seen.plain["ttft"].edges
    assert all(0.0567 in seen.buckets[k].edges for k in ("tpot", "itl", "decode_interval"))
    assert token_buckets(120) == [1, 2, 5, 10, 20, 50, 100]


def test_the_window_is_whole_and_survives_the_wire():
    seen = observations()
    play(seen, 1.0, 1.5, [2.0, 2.5])
    seen.refuse("queue_full", "kv")
    board = KnobBoard("me", Envelope((1, 64), (300, 2000), (1, 9), (0.0, 0.5)), Knobs(4, 1000, 0.01, 9), Slo(2, 1), 100)
    window = build_window(20.0, board, board.target, Load(2, 1, "kv"), Stats(prefilling=3), seen, 15.0, 7, None)
    assert (window.oldest_wait, window.prefilling, window.memory_limit) == (5.0, 1, None)
    assert window.refused["queue_full"]["kv"] == 1
    again = Window.from_wire(window.to_wire())
    assert again == window
