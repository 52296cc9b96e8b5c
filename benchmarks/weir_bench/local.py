"""`weir-operator local` as a child: its status file is how we know it, its server's control port how we watch it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from weir_bench.plot import Sample
from weir_bench.process import Child
from weir_server.contract import Plant, Window

READY_SECONDS = 180.0


class NotServing(Exception):
    """The operator or its server ended, or was not ready in time; the text says what it said last."""


class Local:
    """An operator with one server on this machine. An async context manager; inside, the server answers.

    Raises NotServing on entry.
    """

    def __init__(self, manifest: Path, mode: str, folder: Path, name: str, *, tick: float) -> None:
        self.status_file, self.log = folder / f"{name}.status.json", folder / f"{name}.log"
        decisions = folder / f"{name}.decisions.jsonl"
        for stale in (self.status_file, decisions):
            stale.unlink(missing_ok=True)
        self.child = Child([
            sys.executable, "-m", "weir_operator", "local", manifest, f"--mode={mode}", "--port=0",
            f"--status-file={self.status_file}", f"--decision-log={decisions}", f"--tick-seconds={tick:g}",
        ], log=self.log)

    async def __aenter__(self) -> Local:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        await self.child.__aenter__()
        try:
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.child.__aexit__()
        await self.session.close()

    async def _ready(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                while self.child.ended is None:
                    if any(p["ready"] for p in self.status().get("processes", [])):
                        return
                    await asyncio.sleep(0.2)
        raise NotServing(f"no server became ready; {self.log} ends with:\n{self.child.last_words()}")

    def status(self) -> dict[str, Any]:
        """The status file, or nothing while there is none."""
        try:
            return json.loads(self.status_file.read_text())
        except FileNotFoundError:
            return {}

    @property
    def server(self) -> dict[str, Any]:
        return self.status()["processes"][0]

    async def control(self, path: str) -> dict[str, Any]:
        """GET from the control port. Raises aiohttp.ClientError or TimeoutError."""
        server = self.server
        headers = {"Authorization": f"Bearer {server['token']}"}
        async with self.session.get(f"{server['controlUrl']}/control/{path}", headers=headers) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def plant(self) -> Plant:
        """What the server measured of itself at boot. Raises NotServing where it could not."""
        if (plant := (await self.control("state"))["plant"]) is None:
            raise NotServing("the server did not measure its step time at boot")
        return Plant(**plant)

    async def watch(self, began: float, tell: Callable[[Sample], Awaitable[None]], every: float = 1.0) -> None:
        """A sample each `every` seconds until cancelled, without the readings that fail. `began`: the loop's time at the start.

        Raises NotServing when the operator ends.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self.child.ended is not None:
                raise NotServing(f"the operator ended; {self.log} ends with:\n{self.child.last_words()}")
            with suppress(TimeoutError, aiohttp.ClientError):
                window = Window.from_wire(await self.control("window"))
                refused = sum(window.refused.get("queue_full", {}).values())
                at = loop.time() - began
                await tell(Sample(at, window.waiting, window.running, refused, asdict(window.effective)))
            await asyncio.sleep(every)
