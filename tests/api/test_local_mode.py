"""`weir-operator local`: a manifest becomes a server on this machine that answers, is steered, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from fetch_kit import serving
from serving import MODEL, kill

from weir_server.model.files import resolve

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parents[2]


def wait(what: Callable[[], Any], seconds: float, why: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {why}")


class Local:
    def __init__(self, folder: Path, manifest: Path, *args: str) -> None:
        self.status_file, self.log, self.decisions = folder / "status.json", folder / "out.txt", folder / "decisions.jsonl"
        command = [
            sys.executable, "-m", "weir_operator", "local", str(manifest), "--port=0", f"--status-file={self.status_file}",
            f"--decision-log={self.decisions}", "--tick-seconds=2", "--poll-seconds=0.5", "--lease-seconds=20", *args,
        ]
        self.process = subprocess.Popen(command, stdout=self.log.open("wb"), stderr=subprocess.STDOUT, cwd=ROOT)
        self.family: list[psutil.Process] = []

    @property
    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.status_file.read_text()))
        except OSError:
            return {}

    def ready(self) -> dict[str, Any]:
        def server() -> Any:
            assert self.process.poll() is None, self.log.read_text()
            found = self.status.get("processes") or [{}]
            return found[0] if found[0].get("ready") else None

        found = dict(wait(server, 90, "the server is ready"))
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        assert len(self.family) >= 2  # parent and engine child
        return found

    def none_left(self) -> bool:
        return not [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., Local]]:
    made: list[Local] = []

    def start(*args: str, **spec: Any) -> Local:
        manifest = yaml.safe_load((ROOT / "examples/smollm2.yaml").read_text())
        manifest["spec"].update(spec)
        file = tmp_path / "manifest.yaml"
        file.write_text(yaml.safe_dump(manifest))
        made.append(Local(tmp_path, file, *args))
        return made[-1]

    yield start
    for one in made:
        kill(one.process)


def control(server: dict[str, Any], what: str) -> dict[str, Any]:
    url, headers = f"{server['controlUrl']}/control/{what}", {"Authorization": f"Bearer {server['token']}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return dict(json.load(answer))


def test_a_manifest_serves_is_steered_and_ends_cleanly(local: Any) -> None:
    run = local(tuning={"mode": "Auto", "knobs": {"maxBatchSize": {"initial": 3}, "maxQueueDepth": {"initial": 9}}})
    server = run.ready()
    body = json.dumps({"model": "SmolLM2-135M-Instruct.Q4_1", "prompt": "A weir is", "max_tokens": 4, "temperature": 0})
    request = urllib.request.Request(f"{server['url']}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4

    state = wait(lambda: (s := control(server, "state"))["lease"]["expires_in_seconds"] and s, 30, "a lease is held")
    assert (state["boot"]["max_batch_size"], state["boot"]["max_queue_depth"]) == (3, 9)
    assert state["slo"]["ttft"] == 2.0
    wait(lambda: run.status["status"].get("tuning", {}).get("knobs", {}).get("maxBatchSize") == 3, 30, "knobs in the status")

    def true(kind: str) -> bool:
        return any(c["type"] == kind and c["status"] == "True" for c in run.status["status"]["conditions"])

    wait(lambda: true("Ready") and true("MetricsAvailable"), 30, "it is ready, and its metrics are read")
    wait(lambda: "running 0 waiting 0" in run.log.read_text(), 20, "a line for a tick")

    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(40) == 0
    assert run.none_left()
    assert not Path(server["log"]).parent.exists()
    command = [sys.executable, "-m", "weir_operator", "replay", str(run.decisions)]
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_killed_server_is_started_again_and_a_killed_operator_leaves_none(local: Any) -> None:
    run = local("--mode=Advise")
    server = run.ready()
    os.kill(server["pid"], signal.SIGKILL)
    wait(lambda: run.status["processes"][0]["restarts"] == 1 and run.status["processes"][0]["ready"], 90, "it is back")
    assert run.ready()["pid"] != server["pid"]
    assert control(run.ready(), "state")["lease"]["expires_in_seconds"] is None  # Advise holds none
    run.process.kill()
    run.process.wait(10)
    wait(run.none_left, 60, "no process is left")


MISTAKES = [
    ({"model": {"source": "file:///nowhere/m.gguf"}}, ("--tick-seconds=60",), "/nowhere/m.gguf"),
    ({"model": {"source": "pvc://claim/m.gguf"}}, (), "smollm2: spec.model.source: a pvc:// source needs a cluster"),
    ({"model": {"source": "oci://registry/model:1"}}, (), "smollm2: spec.model.source: a oci:// source needs a cluster"),
    ({"modell": 1}, (), "spec.modell: unknown field"),
    ({}, ("--mode=Off",), "spec.tuning.mode"),
    ({}, ("--poll-seconds=9",), "--poll-seconds 9 must not exceed"),
]


@pytest.mark.parametrize(("spec", "args", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_status_2(local: Any, spec: Any, args: tuple[str, ...], words: str) -> None:
    run = local(*args, **spec)
    assert run.process.wait(60) == 2
    said = run.log.read_text().strip()
    assert words in said
    assert len(said.splitlines()) == 1, said


def test_a_port_in_use_is_one_line(local: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = local(f"--port={taken.getsockname()[1]}")
        assert run.process.wait(60) == 2
    assert "is in use" in run.log.read_text()


HUB_MODEL = {"source": "hf://acme/tiny@v1/m.gguf", "secretRef": {"name": "hub"}}


def test_a_model_of_a_hub_is_downloaded_once_and_served_under_the_same_name(
    local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manifest that a cluster would get, its Secret aside: the token comes from the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving({"m.gguf": resolve(MODEL).read_bytes()}) as hub:
        hub.token = "hf_secret"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        run = local(model=HUB_MODEL, replicas=2)
        server = run.ready()
        with urllib.request.urlopen(f"{server['url']}/v1/models", timeout=10) as answer:
            assert json.load(answer)["data"][0]["id"] == "m"
        said, sent = run.log.read_text(), hub.sent
        assert "Secret hub is not here" in said and "1 file, " in said
        assert run.status["spec"]["model"]["source"] == HUB_MODEL["source"]
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(40) == 0
    run = local(model=HUB_MODEL)  # the Hub is gone
    run.ready()
    assert hub.sent == sent


@pytest.mark.parametrize(("source", "words"), [
    ("hf://acme/none/m.gguf", "has no repository acme/none"), ("hf://acme/tiny/x.gguf", "has no file 'x.gguf'"),
])
def test_a_download_that_cannot_be_is_one_line(
    local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving({"m.gguf": b"x"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        run = local(model={"source": source})
        assert run.process.wait(60) == 2
    said = run.log.read_text().strip()
    assert words in said and said.startswith("weir-operator: ") and len(said.splitlines()) == 1, said
