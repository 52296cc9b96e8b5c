"""Servers under measurement, as children on loopback ports of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from weir_bench.process import Child
from weir_bench.results import MODEL
from weir_server.contract import KnobsRequest

READY_SECONDS = 180.0


class ServerError(RuntimeError):
    """A server that does not come up, or ended: one sentence with its last words."""


@dataclass(slots=True)
class Running:
    """A server that answers: its address, its control port (ours only), its processes."""

    url: str
    control_url: str
    child: Child
    process: psutil.Process
    session: aiohttp.ClientSession

    async def get(self, path: str, control: bool = False) -> Any:
        async with self.session.get(f"{self.control_url if control else self.url}{path}") as answer:
            answer.raise_for_status()
            return await answer.json()

    async def text(self, path: str) -> str:
        async with self.session.get(self.url + path) as answer:
            answer.raise_for_status()
            return await answer.text()

    def log(self) -> str:
        """What it wrote so far."""
        return self.child.log.read_text(errors="replace") if self.child.log else ""

    def cpu_seconds(self) -> float:
        """Of it and its children so far."""
        times = [p.cpu_times() for p in (self.process, *self.process.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    async def until(self, told: Callable[[dict[str, Any]], bool], seconds: float = 120.0) -> None:
        """Waits until the control window says what is asked for. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not told(await self.get("/control/window", control=True)):  # noqa: ASYNC110  (another process tells)
                await asyncio.sleep(0.05)

    async def put_knobs(self, **knobs: float) -> None:
        """Targets for these knobs, on a lease of ten minutes. Raises aiohttp.ClientResponseError where they are refused."""
        state = await self.get("/control/state", control=True)
        ask = KnobsRequest(state["instance"], state["fence"]["epoch"], state["fence"]["seq"] + 1, 600.0, knobs)
        async with self.session.put(f"{self.control_url}/control/knobs", json=ask.to_wire()) as answer:
            answer.raise_for_status()

    def engine(self) -> psutil.Process:
        """The engine process: the largest child."""
        return max(self.process.children(recursive=True), key=lambda p: p.memory_info().rss)


@asynccontextmanager
async def weir(*flags: str, model: str = MODEL) -> AsyncIterator[Running]:
    """`weir-server serve` with `flags`, its control port on loopback without a token."""
    port, control = free_port(), free_port()
    command = [sys.executable, "-m", "weir_server", "serve", model, "--host=127.0.0.1", f"--port={port}"]
    async with started([*command, f"--control-port={control}", *flags], port, "/ready", control) as running:
        yield running


@asynccontextmanager
async def started(
    command: Sequence[str | Path], port: int, path: str, control: int | None = None, every: float = 0.2,
) -> AsyncIterator[Running]:
    """The server that `command` starts, once `path` on its `port` answers 200; asked `every` so many seconds.

    Raises ServerError where it ends first or does not answer within READY_SECONDS."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        async with (
            Child(command, log=Path(folder) / "server.log") as child,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        ):
            url = f"http://127.0.0.1:{port}"
            await _answering(child, session, url + path, every)
            yield Running(url, f"http://127.0.0.1:{control or port}", child, psutil.Process(child.process.pid), session)


async def _answering(child: Child, session: aiohttp.ClientSession, url: str, every: float) -> None:
    deadline = asyncio.get_running_loop().time() + READY_SECONDS
    while asyncio.get_running_loop().time() < deadline and child.ended is None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(every)
    raise ServerError(f"{Path(child.command[0]).name} does not serve: {child.last_words()}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
