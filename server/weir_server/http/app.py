"""The two aiohttp applications: one for clients, one for the operator."""

from __future__ import annotations

import functools
from typing import Any

from aiohttp import web

from weir_server.http.auth import OPEN, require, token_in
from weir_server.http.control import CONTROL
from weir_server.http.errors import BODY_LIMIT, json_errors
from weir_server.http.generate import chat, completions
from weir_server.http.keys import SERVICE
from weir_server.http.metrics import registry_of
from weir_server.http.ops import LOOKING, METRICS, REGISTRY
from weir_server.http.service import Service

CONTROL_BODY = 64 * 1024


def client_app(service: Service) -> web.Application:
    options = service.options
    guard = [require(options.api_keys, OPEN)] if options.api_keys else []
    app = _app(guard, options.body_limit)
    app.add_routes([web.post("/v1/chat/completions", chat), web.post("/v1/completions", completions), *LOOKING])
    return _with(app, service)


def control_app(service: Service) -> web.Application:
    file = service.options.token_file
    guard = [require(functools.partial(token_in, file))] if file else []
    app = _app(guard, CONTROL_BODY)
    app.add_routes(CONTROL)
    return _with(app, service)


def _app(guard: list[Any], body_limit: int) -> web.Application:
    app = web.Application(middlewares=[json_errors, *guard], client_max_size=body_limit)
    app[BODY_LIMIT] = body_limit
    return app


async def _closing(request: web.Request, response: web.StreamResponse) -> None:
    """Of a server that leaves, every answer is its connection's last."""
    if request.app[SERVICE].leaving:
        response.force_close()
        response.headers["Connection"] = "close"


def _with(app: web.Application, service: Service) -> web.Application:
    app[SERVICE] = service
    app.on_response_prepare.append(_closing)
    app[REGISTRY] = registry_of(service)
    if service.options.metrics:
        app.add_routes(METRICS)
    return app
