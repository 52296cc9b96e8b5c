"""One call as server-sent events: one write for each turn in which something came, comments while nothing does.

The response begins when the call's first row is in the batch, so that queued work can still get a status of its own; what
goes wrong later is an `error` event. A client that takes nothing for `STALL_SECONDS` is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
from aiohttp import web

from weir_server.http.live import Call
from weir_server.http.shapes import Shape

KEEP_ALIVE_SECONDS = 15.0
STALL_SECONDS = 60.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def stream(request: web.Request, call: Call, shape: Shape, include_usage: bool) -> web.StreamResponse:
    """Send a started call to its end. Raises ConnectionError or TimeoutError when the client is gone or stuck."""
    response = web.StreamResponse(headers={**HEADERS, "X-Request-Id": call.label or call.name})
    await response.prepare(request)
    async for objects in turns(call, shape, include_usage):
        await _write(response, b"".join(map(event, objects)) or KEEP_ALIVE)
    await _write(response, DONE)
    await response.write_eof()
    return response


async def turns(call: Call, shape: Shape, include_usage: bool = False) -> AsyncIterator[list[dict[str, Any]]]:
    """The objects of a stream, all that came in one turn together; an empty turn where nothing came for KEEP_ALIVE_SECONDS."""
    open_rows = list(call.rows)
    out = [shape.chunk([c]) for row in call.rows if (c := shape.opening(row)) is not None]
    while True:
        for row in open_rows:
            text, entries = row.take()
            if text or entries:
                out.append(shape.chunk([shape.delta(row, text, entries)]))
        if failure := call.failure():
            yield [*out, failure.body]
            return
        for row in [r for r in open_rows if r.reason is not None]:
            open_rows.remove(row)
            out.append(shape.chunk([shape.last(row)]))
        if not open_rows:
            break
        if out:
            yield out
        out = []
        if not await _changed(call):
            yield []
    yield [*out, shape.chunk([], usage=call.usage())] if include_usage else out


async def _changed(call: Call) -> bool:
    """Wait until there is something new; False where it took too long."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_SECONDS):
            await call.changed()
    except TimeoutError:
        return False
    return True


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(STALL_SECONDS):
        await response.write(data)
