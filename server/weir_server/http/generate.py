"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import functools

from aiohttp import web

from weir_server.http.ask import CHAT, COMPLETIONS, Asked, Endpoint, accept
from weir_server.http.errors import ApiError, json_response
from weir_server.http.keys import SERVICE
from weir_server.http.sse import stream


async def _answer(endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked = await accept(service, endpoint, functools.partial(read_json_body, request), request.headers)
    service.queue(asked.call)
    try:
        return await _deliver(request, asked)
    finally:
        service.leave(asked.call)


async def chat(request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completions, whole or streamed."""
    return await _answer(CHAT, request)


async def completions(request: web.Request) -> web.StreamResponse:
    """OpenAI's text completions, whole or streamed; `echo` and `logprobs` score a prompt."""
    return await _answer(COMPLETIONS, request)


async def _deliver(request: web.Request, asked: Asked) -> web.StreamResponse:
    call = asked.call
    await call.until_started()
    if not call.started and (failure := call.failure()):
        raise failure
    if asked.stream:
        try:
            return await stream(request, call, asked.shape, asked.include_usage)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client took nothing for too long") from None
    await call.until_done()
    if failure := call.failure():
        raise failure
    answer = json_response(asked.shape.whole(call))
    answer.headers["X-Request-Id"] = call.label or call.name
    return answer


async def read_json_body(request: web.Request) -> bytes:
    """The body, within the limit (the framework raises beyond it), if it says it is JSON or says nothing."""
    if request.content_type not in ("application/json", "application/octet-stream"):
        raise ApiError(415, f"Content-Type is {request.content_type}; it must be application/json.")
    return await request.read()
