"""Everything that goes wrong as one OpenAI-shaped JSON object: one exception, one table of statuses, one renderer."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from weir_server.contract import BUSY_BODY

JSON = "application/json"
BODY_LIMIT = web.AppKey("body_limit", int)


class ApiError(Exception):
    """An answer other than 200. `param` names the parameter; `kind` is OpenAI's error type; `headers` go with it."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
        param: str | None = None, retry_after: int | None = None, reason: str = "invalid",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.reason = reason  # of contract.REFUSALS, for the counters, or one that is not counted

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return web.Response(status=self.status, body=orjson.dumps(self.body), content_type=JSON, headers=headers)


class Busy(ApiError):
    """The queue-full 503, byte for byte as the contract has it."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(503, BUSY_BODY["error"]["message"], kind="overloaded", retry_after=retry_after, reason="queue_full")

    @property
    def body(self) -> dict[str, Any]:
        return BUSY_BODY


def bad(param: str | None, message: str) -> ApiError:
    """A 400 that names the parameter."""
    return ApiError(400, message, param=param)


def overloaded(message: str, retry_after: int, reason: str) -> ApiError:
    """A retryable 503 other than the queue-full one."""
    return ApiError(503, message, kind="overloaded", retry_after=retry_after, reason=reason)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type=JSON)


@web.middleware
async def json_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """No answer of this server is plain text: the framework's own errors and our bugs become JSON too."""
    try:
        return await handler(request)
    except ApiError as e:
        return e.response()
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[BODY_LIMIT]
        return ApiError(413, f"The request body is larger than the limit of {limit} bytes.", code="body_too_large").response()
    except web.HTTPMethodNotAllowed as e:
        allowed = ", ".join(sorted(e.allowed_methods))
        answer = ApiError(405, f"{request.path} takes {allowed}, not {e.method}.").response()
        answer.headers["Allow"] = allowed
        return answer
    except web.HTTPException as e:
        return ApiError(e.status, f"{request.path}: {e.reason}", code="not_found" if e.status == 404 else None).response()
    except ConnectionError:
        raise
    except Exception:
        request.app.logger.exception("error while answering %s", request.path)
        return ApiError(500, "Internal error of the server.", kind="server_error").response()
