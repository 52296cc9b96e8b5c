"""Servers as processes on this machine: start, watch, restart with back-off, end without leaving one behind.

Each server is a session of its own, so that a Ctrl-C meant for the operator does not reach it, and it gets SIGTERM from the
kernel if the operator dies by any death. Ended servers are restarted after 1, 2, 4 … 30 s. Status 2 (what it was given is
wrong) is final for a server that never served: the user waits at the terminal. One that did is restarted like any other, for
what it was given may come back, and other deployments go on beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

FIRST_DELAY, LONGEST_DELAY, STEADY_SECONDS = 1.0, 30.0, 60.0
KILL_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def free_port(host: str) -> int:
    """A port that nobody listens on now. OSError: no such address here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def port_taken(host: str, port: int) -> bool:
    """Whether somebody listens there. OSError: no such address here, or no right to that port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            return True
    return False


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class WrongInput(Exception):
    """The server ended with status 2 before it ever served, or a download failed; the text is its own sentence."""


def run_to_end(args: Sequence[str]) -> None:
    """Run `weir-server` with `args`; what it prints is shown as it comes. Raises WrongInput with its last words if it fails."""
    command = [sys.executable, "-m", "weir_server", *args]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
        preexec_fn=_die_with_parent,
    )
    if done.returncode:
        said = done.stderr.strip() or f"weir-server {args[0]} ended with status {done.returncode}"
        raise WrongInput(said.splitlines()[-1])


@dataclass(frozen=True, slots=True)
class Exit:
    """How a server ended. `status`: negative for a signal, as in `subprocess`."""

    status: int
    words: str
    delay: float  # seconds until it is started again


@dataclass(slots=True)
class ServerProcess:
    """One server: `url` for clients, `control_url` for the operator. `log` holds its output."""

    name: str
    args: Sequence[str]
    url: str
    control_url: str
    log: Path
    ready: bool = False
    restarts: int = 0
    exit: Exit | None = None  # the last one, until it serves again
    _served: bool = False
    _process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self, changed: Callable[[], None], grace: float) -> None:
        """Keep it running until cancelled, then end it: SIGTERM, after `grace` seconds once more, then SIGKILL.

        `changed` is called whenever `ready` flips or the process ends. Raises WrongInput.
        """
        delay = FIRST_DELAY
        try:
            while True:
                began = time.monotonic()
                with self.log.open("ab") as output:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "weir_server", *self.args, stdin=asyncio.subprocess.DEVNULL, stdout=output,
                        stderr=output, start_new_session=True, preexec_fn=_die_with_parent,
                    )
                status = await self._watch(changed)
                if status == 2 and not self._served:
                    raise WrongInput(self.last_words())
                if time.monotonic() - began > STEADY_SECONDS:
                    delay = FIRST_DELAY
                self.restarts += 1
                words = self.last_words() if status >= 0 else f"ended by {signal.Signals(-status).name}"
                self.exit = Exit(status, words, delay)
                changed()
                await asyncio.sleep(delay)
                delay = min(LONGEST_DELAY, 2 * delay)
        finally:
            await self._end(grace)

    async def _watch(self, changed: Callable[[], None]) -> int:
        """Keep `ready` true to life until the process ends; its status."""
        assert self._process is not None
        exited = asyncio.create_task(self._process.wait())
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
                while not exited.done():
                    self._set_ready(await _answers(session, f"{self.url}/ready"), changed)
                    await asyncio.wait([exited], timeout=1.0 if self.ready else 0.1)
            return exited.result()
        finally:
            exited.cancel()
            self._set_ready(False, changed)

    def _set_ready(self, ready: bool, changed: Callable[[], None]) -> None:
        self._served |= ready
        if ready != self.ready:
            self.ready, self.exit = ready, None if ready else self.exit
            changed()

    async def _end(self, grace: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        for sign, patience in ((signal.SIGTERM, grace), (signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            try:
                async with asyncio.timeout(patience):
                    await process.wait()
                return
            except TimeoutError:
                continue

    def last_words(self) -> str:
        """The last line that the server wrote."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].strip() if lines else "the server ended without a word"


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as answer:
            return answer.status == 200
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False
