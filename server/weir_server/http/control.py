"""The control port: state, knobs, window, capacity, drain, scheduling decisions. For the operator only."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from aiohttp import web

from weir_server.contract import FULL, KnobsRequest
from weir_server.http.errors import ApiError, bad, json_response
from weir_server.http.keys import SERVICE
from weir_server.http.knobs import KnobError
from weir_server.http.schema import convert


class _Fenced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    instance: str
    epoch: int
    seq: int


class _Put(_Fenced, frozen=True, forbid_unknown_fields=True):
    lease_seconds: float
    knobs: dict[str, Any] = {}
    fallback: dict[str, Any] | None = None
    slo: dict[str, float] | None = None


async def state(request: web.Request) -> web.Response:
    """Envelope, knobs, objectives, plant, fence and lease."""
    return json_response(request.app[SERVICE].state().to_wire())


async def put_knobs(request: web.Request) -> web.Response:
    """New targets, fallback and objectives, fenced and leased."""
    service, body = request.app[SERVICE], await _object(request)
    put = convert(body, _Put)
    if not 0 <= put.lease_seconds < 1e9:
        raise bad("lease_seconds", "lease_seconds must be 0 or more.")
    ask = KnobsRequest(put.instance, put.epoch, put.seq, put.lease_seconds, put.knobs, put.fallback, put.slo)
    try:
        service.board.put(ask, service.now(), service.budget_room())
    except KnobError as e:
        return json_response(e.body, e.status)
    service.push_knobs()
    return json_response(service.state().to_wire())


async def window(request: web.Request) -> web.Response:
    """Totals since start: what the tuner reads."""
    return json_response(request.app[SERVICE].window().to_wire())


async def capacity(request: web.Request) -> web.Response:
    """What there is room for now, and how long the queue takes."""
    service = request.app[SERVICE]
    now, free, g = service.now(), service.free_chunks, service.ready.geometry
    pace = service.book.pace(now)
    load = service.book.load
    plant = service.ready.plant
    return json_response({
        "free_blocks": free, "free_tokens": free * g.block_tokens * g.blocks_per_chunk.get(FULL, 1),
        "backlog_seconds": load.waiting / pace.rows_per_second if pace.rows_per_second else None,
        "longest_servable": service.ready.max_servable, "rows_per_second": pace.rows_per_second or None,
        "decode_tokens_per_second": load.running / plant.step_seconds(load.running) if plant and load.running else None,
    })  # fmt: skip


async def drain(request: web.Request) -> web.Response:
    """As SIGTERM, without the exit."""
    service, ask = request.app[SERVICE], convert(await _object(request), _Fenced)
    try:
        service.board.drain(ask.instance, ask.epoch, ask.seq)
    except KnobError as e:
        return json_response(e.body, e.status)
    service.begin_drain()
    return json_response(service.state().to_wire())


async def schedule(request: web.Request) -> web.Response:
    """The last scheduling decisions, oldest first; `weir-server replay` runs them through the same policy."""
    try:
        return json_response({"steps": await request.app[SERVICE].trace()})
    except TimeoutError:
        raise ApiError(504, "The engine has not ended a step in time.", kind="server_error") from None


async def _object(request: web.Request) -> dict[str, Any]:
    """Unlike elsewhere null stays: a kv_cache_budget of null has a meaning."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as e:
        raise bad(None, f"The body is not valid JSON: {e}.") from None
    if not isinstance(body, dict):
        raise bad(None, "The body must be a JSON object.")
    return body


CONTROL = [
    web.get("/control/state", state), web.put("/control/knobs", put_knobs), web.get("/control/window", window),
    web.get("/control/capacity", capacity), web.post("/control/drain", drain), web.get("/debug/schedule", schedule),
]  # fmt: skip
