"""The life of `weir-server serve`: bind, load, serve, drain, exit.

Exit statuses: 0 after SIGTERM or SIGINT (a drain, or an end while loading), 143 after a second one (ends at once),
1 when the engine died, 2 for a mistake of the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from weir_server.http.app import client_app, control_app
from weir_server.http.bind import LOOPBACK, bind, url_of
from weir_server.http.engine_client import EngineClient, EngineFailed
from weir_server.http.service import Model, Options, Service
from weir_server.link.messages import Boot, Ready

log = logging.getLogger("weir")
TICK_SECONDS = 0.5
LAST_WRITES_SECONDS = 5.0
BACKLOG = 1024
TERMINATED = 143
T = TypeVar("T")


@dataclass(frozen=True)
class Addresses:
    """`host` None = every address. `control_host` None = as `host`, or loopback where there is no token."""

    host: str | None
    port: int
    control_host: str | None
    control_port: int


class Signals:
    """SIGTERM and SIGINT: the first asks for the end, the second insists."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for s in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(s, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def serve(
    boot: Boot, options: Options, addresses: Addresses, load_model: Callable[[], Model], announce: Callable[[Service], None]
) -> int:
    """Run until told to end; the exit status. Raises UserError (bad port, bad model) and EngineFailed (could not start)."""
    signals = Signals()
    clients = bind(addresses.host, addresses.port)
    control_host = addresses.control_host or addresses.host if options.token_file else LOOPBACK
    controls = bind(control_host, addresses.control_port)
    engine = EngineClient()
    try:
        loaded = await _unless(signals.first, asyncio.ensure_future(_load(engine, boot, load_model)))
        if loaded is None:
            log.info("told to end while loading")
            await engine.stop(patience=0.0)
            return 0
        ready, model = loaded
        service = Service(model, ready, engine, options)
        async with _listening(service, clients, controls):
            announce(service)
            log.info("serving at %s, control at %s", url_of(clients, addresses.host), url_of(controls, control_host))
            return await _run(service, signals)
    finally:
        await engine.stop()
        for sock in (*clients, *controls):
            sock.close()


async def _load(engine: EngineClient, boot: Boot, load_model: Callable[[], Model]) -> tuple[Ready, Model]:
    """Both sides of the model at once: weights in the child, tokenizer here."""
    text = asyncio.get_running_loop().run_in_executor(None, load_model)
    try:
        ready = await engine.start(boot)
    except BaseException:
        text.cancel()
        raise
    return ready, await text


async def _unless(event: asyncio.Event, task: asyncio.Future[T]) -> T | None:
    """The result of `task`, or None if the event came first (then it is cancelled)."""
    stop = asyncio.ensure_future(event.wait())
    either: set[asyncio.Future[Any]] = {task, stop}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, EngineFailed):
        await task
    return None


@contextlib.asynccontextmanager
async def _listening(service: Service, clients: list[socket.socket], controls: list[socket.socket]):
    """Both ports open; at the end no new connection, and open ones closed after their last write."""
    runners = [
        web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WRITES_SECONDS)
        for app in (client_app(service), control_app(service))
    ]
    try:
        for runner, sockets in zip(runners, (clients, controls), strict=True):
            await runner.setup()
            for sock in sockets:
                await web.SockSite(runner, sock, backlog=BACKLOG).start()
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


async def _run(service: Service, signals: Signals) -> int:
    """Serve until the engine dies (1), a drain is through (0) or a second signal comes (143)."""
    watch = asyncio.ensure_future(_reports(service))
    ticks = asyncio.ensure_future(_ticks(service))
    end = asyncio.ensure_future(_drained(service, signals))
    try:
        await asyncio.wait({watch, end}, return_when=asyncio.FIRST_COMPLETED)
        if not watch.done():
            service.marker.remove()
            return end.result()
        log.error("%s", service.failed)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.idle.wait(), LAST_WRITES_SECONDS)
        return 1
    finally:
        for task in (watch, ticks, end):
            task.cancel()
        await asyncio.gather(watch, ticks, end, return_exceptions=True)


async def _reports(service: Service) -> None:
    """Apply the engine's reports until it ends; then every call gets its terminal event."""
    try:
        async for report in service.engine.reports():
            service.apply(report)
    except EngineFailed as e:
        service.fail(str(e))


async def _ticks(service: Service) -> None:
    while True:
        await asyncio.sleep(TICK_SECONDS)
        service.tick()


async def _drained(service: Service, signals: Signals) -> int:
    """After the first signal: until no call is left, or the deadline and what the last writes may take."""
    await signals.first.wait()
    service.begin_drain()
    assert service.drain_deadline is not None
    left = max(0.0, service.drain_deadline - service.now()) + LAST_WRITES_SECONDS
    insist = asyncio.ensure_future(signals.second.wait())
    idle = asyncio.ensure_future(service.idle.wait())
    await asyncio.wait({insist, idle}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    second = insist.done()
    for task in (insist, idle):
        task.cancel()
    if second:
        log.warning("a second signal: ending at once")
        service.fail("The server was told to end at once.")
        return TERMINATED
    log.info("drained")
    return 0
