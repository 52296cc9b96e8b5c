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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from aiohttp import web

from weir_server.http.app import client_app, control_app
from weir_server.http.bind import LOOPBACK, bind, listen, url_of
from weir_server.http.engine_client import EngineClient, EngineFailed
from weir_server.http.service import Model, Options, Service
from weir_server.link.messages import Ready

log = logging.getLogger("weir")
TICK_SECONDS = 0.5
LAST_WRITES_SECONDS = 5.0
QUIET_SECONDS = 2.0
"""Without a request, after which nobody is taken to send any more to a server that leaves."""
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
    engine: EngineClient, options: Options, addresses: Addresses, load_model: Callable[[], Model],
    announce: Callable[[Service], None],
) -> int:  # fmt: skip
    """Run until told to end; the exit status. Raises UserError (bad port, bad model) and EngineFailed (could not start)."""
    signals = Signals()
    sockets: list[socket.socket] = []
    try:
        clients = bind(addresses.host, addresses.port)
        sockets += clients
        control_host = addresses.control_host or addresses.host if options.token_file else LOOPBACK
        controls = bind(control_host, addresses.control_port)
        sockets += controls
        loaded = await _unless(signals.first, asyncio.ensure_future(load(engine, load_model)))
        if loaded is None:
            log.info("told to end while loading")
            return 0
        ready, model = loaded
        service = Service(model, ready, engine, options)
        async with _listening(service, clients, controls):
            announce(service)
            log.info("serving at %s, control at %s", url_of(clients, addresses.host), url_of(controls, control_host))
            return await _run(service, signals)
    finally:
        await engine.stop()
        for sock in sockets:
            sock.close()


async def load(engine: EngineClient, load_model: Callable[[], Model]) -> tuple[Ready, Model]:
    """Both sides of the model at once, weights in the child, tokenizer here; whichever fails first says so."""
    ready = asyncio.ensure_future(engine.ready())
    text = asyncio.get_running_loop().run_in_executor(None, load_model)
    try:
        return await asyncio.gather(ready, text)
    finally:
        ready.cancel()
        text.cancel()


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
                listen(sock, BACKLOG)
                await web.SockSite(runner, sock, backlog=BACKLOG).start()
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


async def _run(service: Service, signals: Signals) -> int:
    """Serve until the engine or one of our own tasks fails (1), a drain is through (0) or a second signal comes (143)."""
    end = asyncio.ensure_future(or_fail(service, _drained(service, signals)))
    tasks = [end, *(asyncio.ensure_future(or_fail(service, work(service))) for work in (reports, _ticks))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if done == {end} and (status := end.result()) is not None:
            service.marker.remove()
            return status
        log.error("%s", service.failed)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.idle.wait(), LAST_WRITES_SECONDS)
        return 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def or_fail(service: Service, work: Awaitable[int]) -> int | None:
    """The result of `work`. If it fails so does the service: every call gets its terminal event, and None is returned."""
    try:
        return await work
    except EngineFailed as e:
        service.fail(str(e))
    except Exception:
        log.exception("an error that the server cannot go on from")
        service.fail("Internal error of the server.")
    return None


async def reports(service: Service) -> NoReturn:
    """Apply the engine's reports; at its end EngineFailed is raised."""
    async for report in service.engine.reports():
        service.apply(report)
    raise AssertionError("reports() ends by an exception only")


async def _ticks(service: Service) -> NoReturn:
    while True:
        await asyncio.sleep(TICK_SECONDS)
        service.tick()


async def _leave(service: Service, signals: Signals) -> float:
    """Whoever sends traffic here learns only now that we go: for a while everything is served as ever, and each answer closes
    its connection, so that the next request of that client goes elsewhere. Where requests still come then, somebody has not
    heard (a node's proxy that is behind): it goes on until none has come for QUIET_SECONDS, for at most half of the time to
    drain. Returns how much of that it took."""
    service.leaving = True
    seconds = service.options.leave_seconds
    if not seconds:
        return 0.0
    log.info("leaving: requests are taken for another %.0f s", seconds)
    planned = until = service.now() + seconds
    latest = planned + service.options.drain_timeout() / 2
    while (left := until - service.now()) > 0 and not signals.second.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.second.wait(), left)
        until = min(latest, max(planned, service.asked_at + QUIET_SECONDS))
    return max(0.0, service.now() - planned)


async def _drained(service: Service, signals: Signals) -> int:
    """After the first signal: until no call is left, or the deadline and what the last writes may take."""
    await signals.first.wait()
    service.begin_drain(await _leave(service, signals))
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
