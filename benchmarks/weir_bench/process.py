"""Child processes that never outlive us: ended in order on every way out, and by the kernel if we are killed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """An async context manager around one process in a session of its own (a Ctrl-C reaches us alone; we end it).

    Its output goes to `log`; where `log` is None its standard output is for `lines()`. `paths` are prepended to PYTHONPATH.
    `patience`: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self, command: Sequence[str | Path], *, log: Path | None = None, patience: float = 20.0, nice: int = 0,
        paths: Sequence[Path] = (),
    ) -> None:
        self.command, self.log, self.patience, self.nice = [str(c) for c in command], log, patience, nice
        inherited = [p for p in [os.environ.get("PYTHONPATH")] if p]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited])} if paths else None

    async def __aenter__(self) -> Child:
        def prepare() -> None:
            die_with_parent()
            os.nice(self.nice)

        with contextlib.ExitStack() as stack:
            output: Any = subprocess.PIPE if self.log is None else stack.enter_context(self.log.open("wb"))
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=None if self.log is None else subprocess.STDOUT,
                start_new_session=True, preexec_fn=prepare, env=self.env,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        for sign, patience in ((signal.SIGTERM, self.patience), (signal.SIGKILL, 5.0)):
            if self.process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.process.wait()

    async def lines(self) -> AsyncIterator[bytes]:
        """Its standard output, line by line, until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            yield line

    @property
    def ended(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self.process.returncode

    def last_words(self, lines: int = 3) -> str:
        """The end of its log: what to show when it ended against our will."""
        text = self.log.read_text(errors="replace").strip() if self.log and self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) or "it wrote nothing"
