"""Accounting of benchmarks: what counts as good, and arrivals that are the same for the same seed."""

import json

import pytest

from weir_bench import results
from weir_bench.arrivals import Arrival, Mix, schedule, to_json
from weir_bench.goodput import Objectives, is_good, quantile, series, share
from weir_bench.live import by_mode, in_last
from weir_bench.load import Outcome

OBJECTIVES = Objectives(ttft=2.0, tpot=0.1)


def served(offered=0.0, **changes):
    values = {"prompt": 8, "output": 4, "status": 200, "ttft": 1.0, "tpot": 0.05, "tokens": 4, "finish": "length"}
    return Outcome(offered, **{**values, **changes})


@pytest.mark.parametrize(("changes", "good"), [
    ({}, True),
    ({"ttft": 2.0, "tpot": 0.1}, True),
    ({"ttft": 2.01}, False),
    ({"tpot": 0.101}, False),
    ({"output": 1, "tokens": 1, "tpot": None}, True),
    ({"tokens": 3}, False),  # cut short
    ({"error": "stream broke"}, False),
    ({"status": 503, "ttft": None, "tpot": None, "tokens": 0}, False),
    ({"status": 0, "ttft": None, "tpot": None, "tokens": 0, "error": "no answer"}, False),
])
def test_a_request_is_good_only_if_whole_and_within_both_objectives(changes, good):
    assert is_good(served(**changes), OBJECTIVES) is good


def test_share_is_of_what_was_offered_and_nothing_offered_is_not_zero():
    outcomes = [served(0), served(1, ttft=9), served(2, status=503), served(11)]
    assert share(outcomes, OBJECTIVES) == 0.5
    assert share(outcomes, OBJECTIVES, since=10) == 1.0
    assert share(outcomes, OBJECTIVES, since=20) is None


def test_series_has_an_interval_for_every_stretch_also_for_empty_ones():
    outcomes = [served(1), served(25, status=503, ttft=None, tpot=None), served(26, error="broke")]
    intervals = series(outcomes, OBJECTIVES, 10)
    counts = [(i.at, i.offered, i.good, i.refused, i.broken) for i in intervals]
    assert counts == [(0, 1, 1, 0, 0), (10, 0, 0, 0, 0), (20, 2, 0, 1, 1)]
    assert [i.goodput for i in intervals] == [1.0, None, 0.0]
    assert intervals[1].ttft_p50 is None


def test_quantile_is_a_value_that_occurred():
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(list(range(1, 101)), 0.95) == 95
    assert quantile([7], 0.99) == 7
    assert quantile([], 0.5) is None


def test_schedules_repeat_by_seed_and_extend():
    mix = Mix(prompt=100, output=50, cv=0.5)
    long, short = schedule(5, 600, mix, seed=3), schedule(5, 60, mix, seed=3)
    assert long[: len(short)] == short and long != schedule(5, 600, mix, seed=4)
    assert len(long) == pytest.approx(3000, rel=0.1)
    assert sum(a.prompt for a in long) / len(long) == pytest.approx(100, rel=0.1)
    assert sum(a.output for a in long) / len(long) == pytest.approx(50, rel=0.1)
    assert {a.prompt for a in schedule(5, 60, Mix(prompt=9, cv=0), 1)} == {9}
    assert json.loads(json.dumps(to_json(short)))[0]["at"] == short[0].at


def test_results_say_what_they_ran_on(tmp_path):
    document = json.loads(results.write("trial", {"figures": {"x": 1}}, tmp_path).read_text())
    assert document["figures"] == {"x": 1} and document["date"] and document["machine"]["cores"] >= 1
    assert set(document["machine"]["versions"]) == set(results.PACKAGES)


def test_settings_that_stay_are_tried_under_the_arrivals_of_the_last_turn() -> None:
    rows = [Arrival(float(at), 1, at) for at in range(0, 1200, 50)]
    found = in_last(rows, by_mode(20), 90.0)
    assert [(row.at, row.output) for row in found] == [(0.0, 900), (50.0, 950)]
