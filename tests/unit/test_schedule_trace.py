"""What the scheduler saw and chose can be read, saved, and decided again by the same function."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from engine_kit import Kit
from typer.testing import CliRunner

from weir_server.cli.replay import command
from weir_server.engine.core import TRACED
from weir_server.link.messages import Trace
from weir_server.policy.trace import agrees, from_wire


def traced(kit: Kit) -> list[dict]:
    kit.engine.handle([Trace()])
    trace = kit.engine.report().trace
    assert trace is not None
    return json.loads(json.dumps(trace))


def test_every_decision_under_pressure_is_decided_the_same_again() -> None:
    kit = Kit(blocks=14, rows=4, watermark=0.1)
    for _ in range(6):
        kit.submit(13, max_tokens=12)
    kit.run()
    assert kit.stats.preempted > 0, "no pressure, no proof"
    steps = traced(kit)
    assert 0 < len(steps) <= TRACED
    assert any(s["plan"]["preempt"] for s in steps) and any(s["plan"]["bound"] for s in steps)
    assert any(s["state"]["waiting"] for s in steps)
    assert all(agrees(from_wire(s)) for s in steps)


def test_a_changed_choice_is_seen() -> None:
    kit = Kit()
    kit.submit(13)
    kit.run()
    step = from_wire(traced(kit)[0])
    assert not agrees(step._replace(plan=replace(step.plan, bound="kv")))


def test_only_who_asks_is_told_and_the_memory_is_bounded() -> None:
    kit = Kit()
    kit.submit(4, max_tokens=TRACED + 20)
    kit.run()
    assert kit.engine.report().trace is None
    assert len(traced(kit)) == TRACED
    assert kit.engine.report().trace is None


def test_the_command_says_whether_a_file_is_decided_the_same(tmp_path: Path) -> None:
    import typer

    kit = Kit()
    kit.submit(13)
    kit.run()
    app = typer.Typer()
    app.command()(command)
    file = tmp_path / "steps.json"
    steps = traced(kit)
    file.write_text(json.dumps({"steps": steps}))
    done = CliRunner().invoke(app, [str(file)])
    assert done.exit_code == 0 and f"{len(steps)} steps" in done.output
    steps[-1]["plan"]["take"] = [0]
    file.write_text(json.dumps({"steps": steps}))
    assert "decided differently" in str(CliRunner().invoke(app, [str(file)]).exception)
    file.write_text("[]")
    assert "is not what /debug/schedule answers" in str(CliRunner().invoke(app, [str(file)]).exception)
