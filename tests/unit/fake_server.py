"""A control port for tests of the operator: real sockets, the server's own knob rules, figures as the test sets them."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from aiohttp import web

from weir_operator.io.scrape import Endpoint, url_for
from weir_server.contract import (
    BOUNDS,
    FINISH_REASONS,
    HISTOGRAMS,
    REFUSALS,
    SETTLED_HISTOGRAMS,
    SLOS,
    STEP_PRODUCTS,
    STEP_SUMS,
    ControlState,
    Envelope,
    Geometry,
    Histogram,
    Knobs,
    KnobsRequest,
    Plant,
    Slo,
    Window,
)
from weir_server.http.knobs import KnobBoard, KnobError

CHUNK = 737_280
BOOT = Knobs(4, 1000 * CHUNK, 0.01, 32)
ENVELOPE = Envelope((1, 64), (100 * CHUNK, 1000 * CHUNK), (1, 1024), (0.0, 0.5))
TOKEN = "secret"


class FakeServer:
    """`counters` are laid over an idle window; `behave` may take over a request by returning a response."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str = TOKEN) -> None:
        self.host, self.port, self.token = host, port, token
        self.counters: dict[str, Any] = {}
        self.behave: Any = None
        self.seen: list[tuple[str, str, Any]] = []
        self.restart()

    def restart(self) -> None:
        """As another process on the same port."""
        self.board = KnobBoard(uuid.uuid4().hex, ENVELOPE, BOOT, Slo(2.0, 0.08), CHUNK)

    async def __aenter__(self) -> FakeServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def endpoint(self, name: str = "chat-0") -> Endpoint:
        return Endpoint(name, url_for(self.host, self.port), self.token)

    @property
    def puts(self) -> list[dict[str, Any]]:
        return [body for method, _, body in self.seen if method == "PUT"]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.seen.append((request.method, request.path, body))
        if self.behave and (answer := await self.behave(request)) is not None:
            return answer
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "token"}, status=401)
        self.board.tick(time.monotonic())
        if request.path == "/control/window":
            return web.json_response(self.window().to_wire())
        if request.method == "PUT":
            try:
                self.board.put(KnobsRequest(**body), time.monotonic())
            except KnobError as e:
                return web.json_response(e.body, status=e.status)
        return web.json_response(self.state().to_wire())

    def state(self) -> ControlState:
        board = self.board
        return ControlState(
            contract={"major": 1, "minor": 0}, model={"family": "llama"}, instance=board.instance, started_at="t",
            envelope=board.envelope, kv=Geometry(CHUNK, 16, {"full_attention": 1}), boot=board.boot, target=board.target,
            effective=board.target, fallback=board.fallback, slo=board.slo, plant=Plant(0.04, 0.003, 1e-6, 0.002, 64),
            fence=board.fence, lease={"expires_in_seconds": board.expires_in(time.monotonic())}, draining=board.draining,
        )

    def window(self) -> Window:
        zero = dict.fromkeys
        values: dict[str, Any] = dict(  # noqa: C408
            instance=self.board.instance, monotonic=time.monotonic(), settled_at=0.0, target=self.board.target,
            effective=self.board.target, envelope=self.board.envelope, draining=False, running=0, prefilling=0, waiting=0,
            oldest_wait=0.0, bound=None, memory_used=2**29, memory_limit=2**31, kv_used_bytes=0, decoding_seconds=0.0,
            running_seconds=0.0, waiting_seconds=0.0, head_wait_seconds=zero(BOUNDS, 0.0), kv_used_byte_seconds=0.0,
            step=zero(STEP_SUMS, 0.0), decode_only=zero(STEP_SUMS, 0.0), products=zero(STEP_PRODUCTS, 0.0),
            recompute_seconds=0.0, queued=0, retried=0, admitted=0,
            refused={reason: zero((*BOUNDS, "none"), 0) for reason in REFUSALS}, finished=zero(FINISH_REASONS, 0), preempted=0,
            recomputed_tokens=0, prompt_tokens=0, cached_tokens=0, generated_tokens=0, slo_good=zero(SLOS, 0), slo_total=0,
            histograms={name: Histogram() for name in HISTOGRAMS}, settled={name: Histogram() for name in SETTLED_HISTOGRAMS},
        )
        return Window(**{**values, **self.counters})


async def until(what: Any, seconds: float = 10.0) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
