"""The tuner over the server's own engine in virtual time: how near it comes to the best setting that stays."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from weir_operator.simulate import command
from weir_operator.simulate.load import Phase, arrivals
from weir_operator.simulate.pod import Pod
from weir_operator.simulate.port import PodSetup
from weir_operator.simulate.run import Result, grid, static, tuned
from weir_operator.tuner.types import Move, TunerSpec
from weir_server.contract import Knobs, Plant, Slo

CPU = Plant(0.042, 0.0032, 1e-7, 0.002, 64)
SMALL = Plant(0.0171, 0.00329, 1e-6, 0.0011, 64)  # a 135M model on two cores
SEED = 1


def drawn(*phases: Phase, seed: int = SEED):
    return list(arrivals(phases, seed, 8192))


def setup(ttft: float, tpot: float, plant: Plant = CPU, **changes) -> PodSetup:
    return replace(PodSetup(plant, Slo(ttft, tpot), seed=SEED), **changes)


def spec(pod: PodSetup, **changes) -> TunerSpec:
    return replace(TunerSpec(pod.slo.ttft, pod.slo.tpot), **changes)


SCENARIOS = {
    "chat, overloaded from the defaults": (setup(2.0, 0.108), Phase(400, 1.63, 128, 64), (7, 8), (1,)),
    "a cut is right": (setup(2.0, 0.080, boot=Knobs(16, None, 0.01, 32)), Phase(400, 1.30, 128, 64), (5, 6), (1,)),
    "long prompts": (setup(10.0, 0.110), Phase(600, 0.29, 1500, 64), (1, 2), (1,)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_tuned_reaches_nine_tenths_of_the_best_static_setting(name):
    """Rows of the comparison in docs/tuning-law.md; the depths and batches are those around its best."""
    pod, phase, batches, depths = SCENARIOS[name]
    knobs, best = grid(pod, drawn(phase), phase.end, batches, depths)
    run = tuned(pod, drawn(phase), phase.end, spec(pod))
    assert best.goodput > 0.3
    assert run.goodput >= 0.9 * best.goodput, (run.goodput, best.goodput, knobs, run.moves)
    assert run.reversals == 0
    assert static(pod, drawn(phase), phase.end).goodput < 0.5 * best.goodput, "the defaults were no problem to begin with"


def test_with_short_ticks_the_batch_settles_within_four_of_them():
    """The load of the demonstration: 1.5 × capacity at batch 4, objective 1.6 × a step of eight rows."""
    pod = setup(2.0, 1.6 * SMALL.step_seconds(8), SMALL)
    run = tuned(pod, drawn(Phase(120, 2.4, 128, 64, 0.3)), 120, spec(pod, tick_seconds=10.0))
    first = run.moves[0]
    assert first[0] <= 15 and first[1].knobs["max_queue_depth"] < 32
    settled = [r for r in run.records if "interval" in r.observed]
    assert settled and settled[0].t <= first[0] + 40 and first[1].knobs["max_batch_size"] > 4


def test_a_pod_short_of_kv_is_never_given_more_slots():
    """Refusals are plenty and times per token within their objective; slots are not what is missing."""
    pod = setup(2.0, 0.3, kv_blocks=60, context=512, boot=Knobs(8, None, 0.01, 32))
    phase = Phase(300, 2.0, 128, 128, 0.3)
    run = tuned(pod, drawn(phase), phase.end, spec(pod))
    assert all(m.knobs.get("max_batch_size", 0) <= 8 for _, m in run.moves)
    assert run.knobs.max_queue_depth < 8
    assert run.goodput > static(pod, drawn(phase), phase.end).goodput


def test_on_a_machine_busier_than_at_boot_the_first_raise_comes_out_as_predicted():
    """Every step takes 1.4 × what the boot measurement says, with 10 % noise: one look at batch 4 corrects the larger ones."""
    pod = setup(2.0, 1.6 * SMALL.step_seconds(8), SMALL, noise=0.1)
    pod = replace(pod, step_seconds=lambda rows, context, prefill: 1.4 * SMALL.step_seconds(rows, context, prefill))
    run = tuned(pod, drawn(Phase(150, 2.36, 128, 64)), 150, spec(pod))
    at, first = run.moves[0]
    judged = next(r for r in run.records if "interval" in r.observed)
    assert at == 30 and first.knobs["max_batch_size"] > 4 and first.knobs["max_queue_depth"] < 32
    assert judged.t <= at + 120 and judged.outcome == "Holding"
    assert judged.observed["interval"] == pytest.approx(judged.predicted["interval"], rel=0.15)


def test_a_turn_is_where_the_batch_changes_its_direction() -> None:
    steps = ((30.0, 8), (90.0, 9), (120.0, 7), (150.0, 6), (180.0, 7))
    queue = (60.0, Move("pod", {"max_queue_depth": 2}, "set-point", ""))
    moves = (queue, *((at, Move("pod", {"max_batch_size": size}, "set-point", "")) for at, size in steps))
    assert Result(1.0, 4, Knobs(7, None, 0.01, 2), moves).turns == (120.0, 180.0)
    assert Result(1.0, 9, Knobs(7, None, 0.01, 2), moves).turns == (90.0, 120.0, 180.0)


def test_a_quiet_pod_is_left_as_it_is():
    """Quiet: three times the load would be carried too; at 0.4 rows/s it would not, and the queue is readied for it."""
    pod = setup(2.0, 0.108, boot=Knobs(8, None, 0.01, 32))
    run = tuned(pod, drawn(Phase(600, 0.15, 128, 64)), 600, spec(pod))
    assert run.knobs.max_batch_size >= 8 and run.knobs.max_queue_depth >= 4
    assert run.goodput > 0.95


def test_chat_to_documents_and_back_is_followed():
    pod = setup(6.0, 0.115)
    phases = [Phase(400, 1.6, 128, 64), Phase(900, 0.25, 1500, 64), Phase(1300, 1.6, 128, 64)]
    run = tuned(pod, drawn(*phases), 1300, spec(pod))
    sizes = [(t, m.knobs["max_batch_size"]) for t, m in run.moves if "max_batch_size" in m.knobs]
    assert min(b for t, b in sizes if 400 < t <= 900) <= 4 < max(b for t, b in sizes if t <= 400)
    assert run.knobs.max_batch_size > 4


def test_advise_leaves_the_pod_at_its_boot_values():
    pod = setup(2.0, 0.108)
    phase = Phase(180, 1.63, 128, 64)
    run = tuned(pod, drawn(phase), phase.end, spec(pod, mode="Advise"))
    assert not run.moves and run.goodput == static(pod, drawn(phase), phase.end).goodput
    assert {r.outcome for r in run.records} == {"Advised"}


def test_a_run_follows_from_its_seed():
    pod, phase = setup(2.0, 0.108), Phase(120, 1.63, 128, 64)
    assert tuned(pod, drawn(phase, seed=5), 120, spec(pod)) == tuned(pod, drawn(phase, seed=5), 120, spec(pod))
    assert list(arrivals([phase], 5, 999)) != list(arrivals([phase], 6, 999))


def test_the_books_of_a_pod_balance():
    pod = Pod(setup(2.0, 0.108, boot=Knobs(4, None, 0.01, 2)))
    incoming = list(arrivals([Phase(120, 3.0, 128, 64)], SEED, 8192))
    pod.inbox.extend(incoming)
    pod.run(300.0)
    window = pod.window()
    assert pod.idle and sum(window.refused["queue_full"].values()) > 50
    assert window.queued + sum(window.refused["queue_full"].values()) == len(incoming)
    assert window.queued == window.admitted == window.finished["length"] == window.histograms["ttft"].count


def test_arrivals_have_the_rate_and_the_lengths_that_were_asked_for():
    rows = drawn(Phase(5000, 2.0, 128, 64, 0.7), Phase(6000, 0.0, 1, 1))
    assert len(rows) / 5000 == pytest.approx(2.0, rel=0.05)
    assert sum(a.prompt for a in rows) / len(rows) == pytest.approx(128, rel=0.05)
    assert sum(a.output for a in rows) / len(rows) == pytest.approx(64, rel=0.05)
    assert max(a.at for a in rows) < 5000


def cli(*arguments: str):
    app = typer.Typer()
    app.command()(command.simulate)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_one_json_object():
    result = cli("--seconds", "120", "--no-grid", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["default"]["knobs"]["max_batch_size"] == 4
    assert report["moves"] and report["moves"][0]["reason"]


def test_the_command_prints_a_table():
    result = cli("--seconds", "60", "--no-grid")
    assert result.exit_code == 0 and "boot values" in result.output and "tuned" in result.output


@pytest.mark.parametrize(("arguments", "says"), [
    (("--plant", "1,2"), "not four numbers"),
    (("--plant", "1,2,3,x"), "not four numbers"),
    (("--plant", "-1,2,3,4"), "negative"),
    (("--batch", "99"), "envelope"),
    (("--kv-blocks", "3"), "hold no mean row"),
    (("--router", "dice"), "is none of"),
    (("--law", "hope"), "is none of"),
    (("--trace", "/nowhere.csv"), "No such file"),
    (("--plant", "http://127.0.0.1:9"), "cannot be reached"),
    (("--rate", "0"), "no row is offered"),
])
def test_a_wrong_option_is_one_sentence_and_exit_2(arguments, says):
    result = cli(*arguments)
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output
