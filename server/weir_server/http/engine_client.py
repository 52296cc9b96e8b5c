"""The engine child as the parent sees it: start, messages, and its end however that comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

from weir_server.link.channel import AsyncChannel, ChannelClosed, frame
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot, Fatal, Quit, Ready, Report, ToChild

log = logging.getLogger("weir.engine")
QUIT_SECONDS = 2.0


class EngineFailed(Exception):
    """The engine could not start, or ended on its own; one sentence."""


class EngineClient:
    """One engine process, spawned at once. Use: `await ready()`, then iterate `reports()` until it ends, then `await stop()`.

    It needs no event loop to be spawned, so that the child can load while the parent still imports.
    """

    def __init__(self, boot: Boot) -> None:
        self._socket, theirs = socket.socketpair()
        self._channel: AsyncChannel | None = None
        self._messages: AsyncIterator[Ready | Fatal | Report] | None = None
        self.alive = False
        self._start(boot, theirs)
        self._socket.sendall(frame(boot))

    def _start(self, boot: Boot, theirs: socket.socket) -> None:
        """Begin an engine that speaks over `theirs` and closes it at its end."""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weir_server.cli.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=child_environment(boot.threads), start_new_session=True,
            )  # fmt: skip

    async def ready(self) -> Ready:
        """Wait until the child serves. Raises UserError or EngineFailed."""
        self._channel = await AsyncChannel.open(self._socket)
        self._messages = aiter(self._channel)
        try:
            first = await anext(self._messages, None)
        except ChannelClosed as e:
            raise EngineFailed(f"The engine process sent nonsense: {e}.") from None
        if isinstance(first, Ready):
            self.alive = True
            return first
        if isinstance(first, Fatal):
            raise UserError(first.message) if first.user_error else EngineFailed(first.message)
        raise EngineFailed(f"The engine process ended while loading ({await self._how_it_ended()}).")

    def send(self, message: ToChild) -> None:
        """Never waits. Without a living child it does nothing: the end is reported by `reports`."""
        if self._channel is not None and self.alive:
            self._channel.send(message)

    async def reports(self) -> AsyncIterator[Report]:
        """The engine's reports. Raises EngineFailed at its end: an engine that was asked to quit is not iterated any more."""
        assert self._messages is not None
        try:
            async for message in self._messages:
                if isinstance(message, Report):
                    yield message
                elif isinstance(message, Fatal):
                    raise EngineFailed(message.message)
        except ChannelClosed as e:
            raise EngineFailed(f"The engine process sent nonsense: {e}.") from None
        finally:
            self.alive = False
        raise EngineFailed(f"The engine process ended unexpectedly ({await self._how_it_ended()}).")

    async def _how_it_ended(self) -> str:
        try:
            code = await asyncio.to_thread(self._process.wait, QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "its channel is closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    async def stop(self) -> None:
        """Ask the engine to quit and wait a moment, or end it at once where it doesn't listen. Safe in every state."""
        if self.alive:
            self.send(Quit())
            self.alive = False
            await self._ended(QUIT_SECONDS)
        await self._end()
        (self._channel or self._socket).close()

    async def _ended(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, seconds)

    async def _end(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)


def child_environment(threads: int) -> dict[str, str]:
    """OpenMP waits passively: with a busy neighbour its spinning barriers cost 10 × more (cpu research §4)."""
    count = str(threads)
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
