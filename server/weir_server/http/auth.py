"""Bearer tokens: API keys on the HTTP port, the operator's token on the control port. Compared as bytes in constant time."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from weir_server.http.errors import ApiError

log = logging.getLogger("weir.http")
OPEN = frozenset({"/health", "/ready", "/metrics"})
"""Probes and scrapes carry no key."""


def require(accepted: Callable[[], Sequence[bytes]], open_paths: frozenset[str] = frozenset()) -> Any:
    """A middleware that lets through what bears one of the `accepted` tokens, and the `open_paths`."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in open_paths and not _bears(request, accepted()):
            log.info("401 for %s %s", request.method, request.path)
            message = "A valid bearer token is needed."
            return ApiError(401, message, kind="authentication_error", code="invalid_api_key").response()
        return await handler(request)

    return check


def _bears(request: web.Request, tokens: Sequence[bytes]) -> bool:
    """Raw bytes against raw bytes, so no header can fail to be compared; all tokens are looked at."""
    raw = next((v for k, v in request.raw_headers if k.lower() == b"authorization"), b"")
    scheme, _, given = raw.partition(b" ")
    matches = [hmac.compare_digest(given.strip(), token) for token in tokens]
    return scheme.lower() == b"bearer" and any(matches)


def token_in(file: str) -> Sequence[bytes]:
    """The control token now; nobody is let in while the file can't be read."""
    try:
        token = Path(file).read_bytes().strip()
    except OSError:
        return ()
    return (token,) if token else ()
