"""The tuner's evaluation: what its cells are, and that fleets are counted as they say."""

from __future__ import annotations

import json

import pytest

from weir_bench import eval_tuner
from weir_bench.eval_cases import DAY, DEFAULTS, FIRST_DAY, KINDS, SHIFTING, Cell, build, cells, day
from weir_bench.eval_fleet import BOTH, HPA, OURS, FleetCell, fleet_cells, fleet_report, fleet_table, run_fleet_cell
from weir_operator.tuner.chain import Model


def test_any_part_of_the_cells_is_a_sample_of_all():
    found = cells(short=False)
    assert len({cell.key for cell in found}) == len(found)
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)
    assert {cell.workload for cell in found[:40]} >= {*KINDS, SHIFTING, DAY}
    assert {cell.load for cell in found[:40]} == {0.3, 0.7, 1.0, 1.5} and len({cell.machine for cell in found[:40]}) == 4


def test_a_cell_is_no_longer_than_its_trace(tmp_path):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:00:{i:02}.000,900,100" for i in range(60))]
    (tmp_path / "azure_2023_conv.csv").write_text("\n".join(lines))
    case = build(Cell("chat", "llama3-8b a100x2", "roomy", 1.5, 0), tmp_path, 1200.0)
    assert case.recorded and len(case.rows) == 60 and case.rows[-1].at <= case.end < case.rows[-1].at + 1 < 100


def test_a_day_is_that_of_the_pool_with_mean_one_and_each_seed_has_another(tmp_path):
    (tmp_path / "servegen").mkdir()
    for client in (1, 2):
        rates = [0.0] * (144 * FIRST_DAY) + [1.0 * client] * 72 + [3.0] * 72 + [2.0] * 144
        text = "".join(f"{600 * i},{rate},1,Gamma,1,1\n" for i, rate in enumerate(rates))
        (tmp_path / "servegen" / f"language_m-small_chunk-{client}-trace.csv").write_text(text)
    curve, recorded = day(tmp_path, 0)
    assert recorded and sum(curve) == pytest.approx(144)
    assert (curve[0], curve[-1]) == pytest.approx((3 / 4.5, 6 / 4.5)), "both clients together: three rows/s, then six"
    assert set(day(tmp_path, 1)[0]) == {1.0}
    assert not day(None, 0)[1]


def test_fleets_are_paired_and_cost_is_over_all_cells_together():
    cell = FleetCell("step", "cpu", True, 0)
    assert cell in fleet_cells(short=True)
    lines = run_fleet_cell((cell, None, 240.0, frozenset()))
    assert {line["run"] for line in lines} == {OURS, HPA, BOTH} and len({line["offered"] for line in lines}) == 1
    assert all(line["attempts"] > line["offered"] > 100 for line in lines), "refused clients come back"
    assert run_fleet_cell((cell, None, 240.0, frozenset(f"{cell.key}|{n}" for n in (OURS, HPA, BOTH)))) == []
    other = [{**line, "cell": "fleet other", "replica_seconds": 3 * line["replica_seconds"]} for line in lines]
    found = fleet_report([*lines, *other, {"cell": "half", "run": OURS, "replica_seconds": 1, "good": 1, "offered": 1}])
    mine = next(line for line in lines if line["run"] == OURS)
    assert found["cells"] == 2
    cost = 2 * mine["replica_seconds"] / mine["good"]
    assert found["runs"][OURS]["replica_seconds_per_good"] == pytest.approx(cost, rel=0.01)
    assert found["runs"][HPA]["of_queue_depth"] == 1.0 and f"| {OURS} |" in fleet_table(found)
    assert json.loads(json.dumps(found)) == found


def test_a_default_that_beats_every_setting_of_the_search_is_the_best_static_setting():
    """Else a law that throws away a good start would be compared with less than what it had."""
    def line(run: str, goodput: float) -> eval_tuner.Line:
        return {
            "cell": "chat|cpu|roomy|0.5|0", "run": run, "goodput": goodput, "end": 60.0, "shifts": (), "recorded": True,
            "bins": [1, 1], "offered": [2, 2], "turns": [5, 20, 50], "moves": 3, "knobs": [4, 32], "cpu": 0.1,
        }
    names = [f"default {name}" for name in DEFAULTS]
    lines = [line(names[0], 0.97), line(names[1], 0.5), line("static 6 4", 0.96), line("set-point", 0.95)]
    row = eval_tuner.report(lines)["rows"][0]
    law = row["laws"]["set-point"]
    assert law["reversals_per_hour"] == pytest.approx(180) and law["reversals_per_hour_warm"] == pytest.approx(150)  # 2 in 48 s
    assert row["best"]["setting"] == names[0] and row["laws"]["set-point"]["of_best"] == pytest.approx(0.95 / 0.97, abs=1e-4)


def test_what_the_law_believes_of_a_pod_does_not_move_the_load_that_it_is_tried_under(monkeypatch):
    cell = Cell("chat", "cpu", "roomy", 0.5, 0)
    before = build(cell, None, 60.0).rows
    monkeypatch.setattr(Model, "in_time", lambda self, slots, tpot: 0.5)
    assert build(cell, None, 60.0).rows == before


def test_a_report_of_fleets_alone_is_no_crash():
    document = eval_tuner.report(run_fleet_cell((FleetCell("day", "cpu", False, 0), None, 120.0, frozenset())))
    assert document["cells"] == 0 and document["fleets"]["cells"] == 1
    assert eval_tuner.table(document).count("| set-point |") == 1
