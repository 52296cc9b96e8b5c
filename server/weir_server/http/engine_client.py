"""The engine child as the parent sees it: start, messages, and its end however that comes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator

from weir_server.link.channel import AsyncChannel, ChannelClosed
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot, Fatal, Quit, Ready, Report, ToChild

log = logging.getLogger("weir.engine")
QUIT_SECONDS = 2.0


class EngineFailed(Exception):
    """The engine could not start, or ended on its own; one sentence."""


class EngineClient:
    """One child process. Use: `await start(boot)`, then iterate `reports()` until the engine ends, then `await stop()`."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._channel: AsyncChannel | None = None
        self._messages: AsyncIterator[Ready | Fatal | Report] | None = None
        self.alive = False

    async def start(self, boot: Boot) -> Ready:
        """Spawn the child and wait until it serves. Raises UserError or EngineFailed."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "weir_server.cli.child", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], env=child_environment(boot.threads), start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
        self._channel = await AsyncChannel.open(ours)
        self._messages = aiter(self._channel)
        self._channel.send(boot)
        first = await anext(self._messages, None)
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
        assert self._process is not None
        try:
            code = await asyncio.wait_for(self._process.wait(), QUIT_SECONDS)
        except TimeoutError:
            return "its channel is closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    async def stop(self, patience: float = QUIT_SECONDS) -> None:
        """Ask the child to quit, wait `patience` seconds, then kill it. Safe in every state."""
        if self._process is None:
            return
        self.send(Quit())
        self.alive = False
        try:
            await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._channel is not None:
            self._channel.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid


def child_environment(threads: int) -> dict[str, str]:
    """OpenMP waits passively: with a busy neighbour its spinning barriers cost 10 × more (cpu research §4)."""
    count = str(threads)
    return {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
