"""What the law is measured against: hindsight over a draw, over all draws of a workload, over each part of one that shifts."""

from __future__ import annotations

from typing import Any

import pytest

from weir_bench.eval_oracles import best_single, following, for_all_seeds, oracle_table


def line(goodput: float, bins: tuple[int, ...] = (), shifts: tuple[float, ...] = ()) -> dict[str, Any]:
    return {"goodput": goodput, "bins": list(bins), "shifts": list(shifts), "end": 30.0 * len(bins)}


def test_an_oracle_that_follows_takes_the_best_setting_of_each_part_without_the_warm_up():
    """Ten bins, two of them warm-up, a shift after the fifth: 9 + 9 + 9, then 8 × 5, against 3 × 2 + 8 × 5."""
    runs = {
        "static 8 1": line(0.3, (9,) * 5 + (1,) * 5, (150.0,)),
        "static 2 1": line(0.5, (2,) * 5 + (8,) * 5, (150.0,)),
        "law": line(0.6, (9,) * 5 + (7,) * 5, (150.0,)),
    }
    steady = {"static 8 1": line(0.5, (1,) * 10), "law": line(0.5, (1,) * 10)}
    found = following({"a": runs, "b": steady}, "law", 30.0, 0.2)
    assert found == {"cells": 1, "of_best_static": pytest.approx(67 / 46, abs=1e-4), "most": pytest.approx(67 / 46, abs=1e-4),
                     "law": pytest.approx(62 / 46, abs=1e-4)}
    assert following({"b": steady}, "law", 30.0, 0.2) is None


def test_one_setting_for_all_seeds_is_without_the_luck_of_a_draw():
    """Each draw favours another setting by luck; over both, 4 2 is best and the law as good."""
    first = {"static 4 2": line(0.80), "static 5 1": line(0.84), "static 7 1": line(0.9), "law": line(0.82)}
    second = {"static 4 2": line(0.80), "static 5 1": line(0.70), "static 3 1": line(0.82), "law": line(0.78)}
    alone = {"static 1 1": line(1.0), "law": line(0.1)}
    cells = {"chat|cpu|roomy|1|0": first, "chat|cpu|roomy|1|1": second, "code|cpu|roomy|1|0": alone}
    found = for_all_seeds(cells, ["law", "other"])
    assert found is not None and found["groups"] == 1
    assert found["of_each_seeds_own_best"] == pytest.approx(0.80 / 0.86, abs=1e-4)
    assert found["laws"] == {"law": {"of_best": 1.0, "worst": 1.0}}
    assert for_all_seeds({"chat|cpu|roomy|1|0": first}, ["law"]) is None


def test_the_table_says_of_each_oracle_what_it_reaches_itself():
    cells = {
        f"chat|cpu|roomy|1|{seed}": {"static 4 2": line(0.8, (1,) * 10, (150.0,)), "set-point": line(0.76, (1,) * 10, (150.0,))}
        for seed in range(2)
    }
    document = {
        "laws": {"set-point": {"of_best": [0.95, 0.0]}}, "best_single_static": best_single(cells),
        "following": following(cells, "set-point", 30.0, 0.2), "for_all_seeds": for_all_seeds(cells, ["set-point"]),
    }
    text = oracle_table(document)
    assert "| one that stays for all seeds of a workload | 100.0% | 95.0% | worst 95%, 1 workloads |" in text
    assert "| one that stays for all of cpu | 100.0% | – | static 4 2 |" in text
    assert "| where it shifts, the best of each part | 100.0% | 100.0% |" in text
