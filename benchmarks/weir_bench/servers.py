"""Servers under measurement, as children: ours, and llama-server where a folder with it is given."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
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


@dataclass(slots=True)
class Running:
    """A server that answers: its address, its control port (ours only), its processes."""

    url: str
    control_url: str
    process: psutil.Process
    session: aiohttp.ClientSession

    async def get(self, path: str, control: bool = False) -> Any:
        async with self.session.get(f"{self.control_url if control else self.url}{path}") as answer:
            answer.raise_for_status()
            return await answer.json()

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
    async with _running([*command, f"--control-port={control}", *flags], port, "/ready", control) as running:
        yield running


@asynccontextmanager
async def llama(folder: Path, model: Path, slots: int) -> AsyncIterator[Running]:
    """llama-server on the same machine with as many slots, F32 weights and KV cache, and as many threads as cores."""
    port, threads = free_port(), str(psutil.cpu_count(logical=True))
    command = [
        folder / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", str(port), "-np", str(slots),
        "-c", str(2048 * slots), "-t", threads, "-tb", threads, "-ctk", "f32", "-ctv", "f32", "--cont-batching", "--no-webui",
    ]
    async with _running(command, port, "/health", port, paths=folder) as running:
        yield running


def quantized(folder: Path, source: Path, kind: str, target: Path) -> Path:
    """`source` converted by llama-quantize, e.g. to F32."""
    subprocess.run([folder / "llama-quantize", "--allow-requantize", source, target, kind], check=True, capture_output=True,
                   env={"LD_LIBRARY_PATH": str(folder)}, timeout=300)
    return target


@asynccontextmanager
async def _running(
    command: Sequence[str | Path], port: int, path: str, control: int, paths: Path | None = None,
) -> AsyncIterator[Running]:
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as folder:
        log = Path(folder) / "server.log"
        if paths:
            command = ["env", f"LD_LIBRARY_PATH={paths}", *command]
        async with Child(command, log=log) as child, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            url = f"http://127.0.0.1:{port}"
            await _answering(child, session, url + path)
            yield Running(url, f"http://127.0.0.1:{control}", psutil.Process(child.process.pid), session)


async def _answering(child: Child, session: aiohttp.ClientSession, url: str) -> None:
    deadline = asyncio.get_running_loop().time() + READY_SECONDS
    while asyncio.get_running_loop().time() < deadline and child.ended is None:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the server does not serve: {child.last_words()}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
