"""The engine in a thread of this process, for a command that is its own only client: the same loop, the same frames."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from weir_server.cli.boot import load_text
from weir_server.cli.child import run_over
from weir_server.contract import Slo
from weir_server.http.engine_client import EngineClient, child_environment
from weir_server.http.lifecycle import load, or_fail, reports
from weir_server.http.service import Options, Service
from weir_server.link.channel import Channel
from weir_server.link.messages import Boot


class ThreadEngine(EngineClient):
    """A thread can't be killed: one that does not listen is left behind, a daemon that ends with the process."""

    def _start(self, boot: Boot, theirs: socket.socket) -> None:
        def run() -> None:
            with theirs:
                run_over(Channel(theirs))

        os.environ.update(child_environment(boot.threads))  # before torch is loaded
        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    async def _how_it_ended(self) -> str:
        return "its thread ended"

    async def _ended(self, seconds: float) -> None:
        await asyncio.to_thread(self._thread.join, seconds)

    async def _end(self) -> None:
        pass


@contextlib.asynccontextmanager
async def own_service(boot: Boot, path: Path, name: str) -> AsyncIterator[Service]:
    """A service without ports. Raises UserError and EngineFailed."""
    engine = ThreadEngine(boot)
    try:
        ready, model = await load(engine, lambda: load_text(path, name))
        service = Service(model, ready, engine, Options(slo=Slo(2.0, 0.08)))
        pump = asyncio.ensure_future(or_fail(service, reports(service)))
        try:
            yield service
        finally:
            pump.cancel()
    finally:
        await engine.stop()
