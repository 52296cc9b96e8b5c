"""What kubectl itself does best, done by kubectl: port-forward, logs, a pod that runs once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

from weir_operator.cli.plugin.api import Where
from weir_operator.io.kube import Unreachable

FORWARD_SECONDS, END_SECONDS = 15.0, 5.0
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ->")


def command(where: Where, *words: str) -> list[str]:
    """kubectl with the same place. Raises Unreachable where there is none."""
    found = shutil.which("kubectl")
    if found is None:
        raise Unreachable("kubectl is not on the PATH")
    context = [f"--context={where.context}"] if where.context else []
    return [found, *context, f"--namespace={where.in_namespace}", *words]


def become(words: Sequence[str]) -> NoReturn:
    """End as that program: its output, its exit status and its Ctrl-C are the user's."""
    sys.stdout.flush()
    os.execv(words[0], list(words))


async def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, output and errors of a program."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        await _end(process)
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


@contextlib.asynccontextmanager
async def forwarded(where: Where, pod: str, port: int) -> AsyncIterator[str]:
    """The URL on this machine behind which a pod's port is. Raises Unreachable."""
    process = await asyncio.create_subprocess_exec(
        *command(where, "port-forward", "--address=127.0.0.1", f"pod/{pod}", f":{port}"),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield f"http://127.0.0.1:{await _port(process, pod)}"
    finally:
        await _end(process)


async def _port(process: asyncio.subprocess.Process, pod: str) -> int:
    assert process.stdout is not None and process.stderr is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FORWARD_SECONDS):
            while text := await process.stdout.readline():
                if match := _FORWARDING.search(text.decode(errors="replace")):
                    return int(match[1])
            words = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise Unreachable(f"kubectl port-forward to {pod}: {words[-1] if words else 'it ended'}")
    raise Unreachable(f"kubectl port-forward to {pod} was not ready in {FORWARD_SECONDS:.0f} s")


async def _end(process: asyncio.subprocess.Process) -> None:
    for stop in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
