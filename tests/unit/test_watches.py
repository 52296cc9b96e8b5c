"""kopf's place in our process: whatever becomes of it, its watches begin again and a stop is a stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import kopf
import pytest
from kubernetes.aio.client import Configuration

from weir_operator.handlers import watches
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.resync import Resync
from weir_operator.loops.store import Store

Part = Callable[[], Awaitable[None]]


async def deaf() -> None:
    """A part of kopf that swallows every cancellation."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def hard_of_hearing() -> None:
    """One that swallows the first, as kopf's streams do once in a while."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)
    await asyncio.sleep(3600)


async def ends_at_once() -> None:
    raise kopf.PermanentError("a definition is gone")


@pytest.fixture
def made_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has kopf consist of other parts, and ends come soon. kopf's own way to end them stays."""
    monkeypatch.setattr(watches, "END_SECONDS", 0.1)
    monkeypatch.setattr(watches, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(watches, "AGAIN_SECONDS", 0.01)

    def set_parts(*parts: Part) -> None:
        async def spawn(**_: Any) -> list[asyncio.Task[None]]:
            made = [asyncio.ensure_future(part()) for part in parts]
            await asyncio.sleep(0)  # as kopf's own does: they have begun
            return made

        monkeypatch.setattr(kopf, "spawn_tasks", spawn)

    return set_parts


def watched(times: int, connection: Configuration = Configuration()) -> None:  # noqa: B008
    """Watch until they have been begun so often, then stop; the stop ends it."""

    async def served() -> bool:
        nonlocal times
        times -= 1
        if times <= 0:
            enough.set()
        return True

    async def watching() -> None:
        nonlocal enough
        enough, stop, queue = asyncio.Event(), asyncio.Event(), WorkQueue(lambda _key: asyncio.sleep(0, 0.0))
        resync = Resync(cast(Any, None), queue, ["ns"])
        task = asyncio.create_task(watches.watch(connection, served, Store(), queue, resync, stop))
        await asyncio.wait_for(enough.wait(), 20)
        stop.set()
        await asyncio.wait_for(task, 20)

    enough = asyncio.Event()
    asyncio.run(watching())


@pytest.mark.parametrize("part", [deaf, hard_of_hearing, ends_at_once])
def test_a_stop_ends_the_watches_whatever_kopf_does(made_of: Callable[..., None], part: Part) -> None:
    made_of(part)
    watched(1)


@pytest.mark.parametrize(("part", "said"), [(deaf, "are left behind"), (hard_of_hearing, "did not end by itself")])
def test_watches_begin_again_where_one_part_ends_and_another_does_not(
    made_of: Callable[..., None], caplog: pytest.LogCaptureFixture, part: Part, said: str,
) -> None:
    """kopf itself waits for the other one without an end."""
    made_of(ends_at_once, part)
    watched(3)
    assert caplog.text.count(said) >= 2


def test_what_ended_the_watches_is_said(made_of: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    made_of(ends_at_once)
    watched(2)
    assert "PermanentError: a definition is gone" in caplog.text


def test_credentials_that_are_refused_end_the_watches_which_begin_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    """kopf asks for others at once, and would go on so without a pause."""
    monkeypatch.setattr(watches, "AGAIN_SECONDS", 0.01)

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = Configuration(host=f"http://127.0.0.1:{server.server_port}")
        connection.api_key["BearerToken"] = "old"
        watched(2, connection)
        server.shutdown()
    assert "Ran out of valid credentials" in caplog.text


@pytest.mark.parametrize("hearing", [deaf, hard_of_hearing])
def test_nothing_of_what_was_left_is_kept(made_of: Callable[..., None], hearing: Part) -> None:
    """Threads, loops, connections: as many after ten ends as after one. What swallows one cancellation is ended by the next,
    and closes its connection itself; what swallows all is let go of, with all that it holds."""

    async def stream(port: int) -> AsyncIterator[bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                yield await reader.read(1)
        finally:
            writer.close()

    async def part() -> None:
        """Its stream is a task of its own, as those of kopf are, and goes on when it ends."""
        connected = asyncio.Event()

        async def consume() -> None:
            async for _ in stream(port):
                connected.set()
                await hearing()

        streaming.append(asyncio.create_task(consume()))
        await connected.wait()
        streaming.clear()
        raise kopf.PermanentError("a definition is gone")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        open_.add(writer)
        nobody.clear()
        writer.write(b".")
        await reader.read()
        open_.discard(writer)
        writer.close()
        if not open_:
            nobody.set()

    async def main() -> list[tuple[int, int]]:
        nonlocal port
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port, found = server.sockets[0].getsockname()[1], []
        for rounds in (1, 10):
            await asyncio.to_thread(watched, rounds)
            gc.collect()
            async with asyncio.timeout(10):
                await nobody.wait()
            found.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        server.close()
        return found

    made_of(part)
    port, connections, nobody = 0, 0, asyncio.Event()
    open_, streaming = set[asyncio.StreamWriter](), list[asyncio.Task[None]]()
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc: open files cannot be counted")
    first, last = asyncio.run(main())
    assert connections >= 11
    assert last == first


def test_kopf_does_not_end_our_process() -> None:
    """Where its own watches end, it would kill the process that it runs in after a while."""
    assert watches._settings().process.ultimate_exiting_timeout is None
