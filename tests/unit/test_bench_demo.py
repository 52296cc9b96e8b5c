"""The demo's pure parts, its picture, and that its children never outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from weir_bench.arrivals import Mix
from weir_bench.demo import ADVISED, MOVED, moves, with_objectives
from weir_bench.display import View, sparkline, tuner_line
from weir_bench.goodput import Objectives, series
from weir_bench.load import Outcome
from weir_bench.plot import Move, Part, Sample, picture
from weir_bench.process import Child
from weir_bench.sizing import capacity, explain, interval, size
from weir_server.contract import Plant

PLANT = Plant(a=0.042, b=0.0032, c=0.0, p=0.002, prefill_tokens=64)
MIX = Mix(prompt=128, output=64)
KNOBS = {"max_batch_size": 4, "max_queue_depth": 32, "admission_watermark": 0.01, "kv_cache_budget": 1}


def test_objectives_and_load_follow_from_the_plant():
    """Worked by hand: y(4) = 42 + (3.2 + 2 · 2) · 4 = 70.8 ms; a step with 8 rows takes 67.6 ms."""
    sizing = size(PLANT, MIX)
    assert interval(PLANT, MIX, 4) == pytest.approx(0.0708)
    assert capacity(PLANT, MIX, 4) == pytest.approx(4 / (64 * 0.0708))
    assert sizing.objectives == Objectives(ttft=2.2, tpot=0.108)
    assert sizing.rate == pytest.approx(1.5 * 4 / (64 * 0.0708))
    assert all(number in explain(sizing, MIX) for number in ("45 ms", "68 ms", "108 ms", "0.88", "1.32"))


def test_the_derived_manifest_differs_in_objectives_alone(tmp_path):
    manifest = Path(__file__).resolve().parents[2] / "examples" / "smollm2.yaml"
    derived = yaml.safe_load(with_objectives(manifest, Objectives(2.2, 0.108), tmp_path / "m.yaml").read_text())
    original = yaml.safe_load(manifest.read_text())
    assert derived["spec"].pop("slo") == {"ttft": "2200ms", "tpot": "108ms"}
    original["spec"].pop("slo")
    assert derived == original


HISTORY = [
    {"time": "1970-01-01T00:01:40Z", "outcome": "Holding", "rule": "set-point", "reason": "nothing better"},
    {"time": "1970-01-01T00:01:10Z", "outcome": "Moved", "reason": "faster", "changes": {"max_batch_size": [4, 8]}},
    {"time": "1970-01-01T00:00:40Z", "outcome": "Advised", "reason": "shorter", "changes": {"max_queue_depth": [32, 2]}},
]


def test_moves_come_from_the_status_oldest_first_and_advice_is_no_move():
    assert moves(HISTORY, 60.0, MOVED) == [Move(10.0, "max_batch_size", 4, 8, "faster")]
    assert moves(HISTORY, 0.0, ADVISED) == [Move(40.0, "max_queue_depth", 32, 2, "shorter")]
    assert tuner_line({"status": {"tuning": {"history": HISTORY}}}) == "Holding: nothing better"
    assert tuner_line({}) == "no decision yet"


def outcomes():
    good = Outcome(1.0, 8, 4, ended=3.0, status=200, ttft=0.5, tpot=0.05, tokens=4, finish="length")
    return [good, Outcome(2.0, 8, 4, ended=2.0, status=503)]


def test_the_view_says_the_same_on_a_terminal_and_in_a_pipe():
    from rich.console import Console

    part = Part("Auto", 90, None, [], samples=[Sample(0, 3, 4, 0, KNOBS), Sample(1, 5, 4, 1, KNOBS)])
    view = View(part, outcomes(), Objectives(2.0, 0.1), now=4.0, tuner="Moved: faster")
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view.panel())
    for shown in (view.line(), console.export_text()):
        assert "50%" in shown and "0.50" in shown and "100 ms" in shown and "queue 32" in shown and "Moved: faster" in shown
    assert sparkline([0, 1, 2]) == " ▄█" and sparkline([0, 0]) == "▁▁"


def test_a_picture_is_drawn_also_of_a_part_in_which_nothing_was_served(tmp_path):
    pytest.importorskip("matplotlib")
    objectives = Objectives(2.0, 0.1)
    samples, made = [Sample(0, 1, 4, 0, KNOBS)], [Move(5, "max_batch_size", 4, 8, "")]
    parts = [Part("Advise", 20, 0.0, [], samples), Part("Auto", 20, 0.5, series(outcomes(), objectives, 10), samples, made)]
    assert picture(parts, objectives, "t", tmp_path / "p.png").stat().st_size > 10_000


async def test_a_child_is_ended_on_the_way_out_and_killed_if_it_does_not_listen(tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    async with Child([sys.executable, "-c", deaf], patience=0.3) as child:
        assert await anext(child.lines()) == b"up\n"
    assert child.ended == -signal.SIGKILL
    async with Child([sys.executable, "-c", "print('last words')"], log=tmp_path / "log") as child:
        await child.process.wait()
    assert child.last_words() == "last words"


def test_children_die_with_a_killed_parent():
    code = (
        "import asyncio, sys\nfrom weir_bench.process import Child\n"
        "async def main():\n  async with Child(['sleep', '60'], log=None) as c:\n"
        "    print(c.process.pid, flush=True); await asyncio.sleep(60)\nasyncio.run(main())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False
