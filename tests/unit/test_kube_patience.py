"""An API server that asks for patience gets it: 429 for any request, 5xx for reads, with growing delays and jitter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from weir_operator.io import kube as module
from weir_operator.io.kube import ApiError, Kube


class Server:
    """`answers`: (status, headers) for the next requests; then 200."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.seen: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append(request.method)
        status, headers = self.answers.pop(0) if self.answers else (200, {})
        return web.json_response({"kind": "Status", "message": "x", "reason": "Y"}, status=status, headers=headers)


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, Kube, list[float]]]:
    server, slept = Server(), list[float]()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    async with Kube(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")) as kube:
        yield server, kube, slept
    await runner.cleanup()


@pytest.mark.parametrize(("method", "status", "repeated"), [
    ("GET", 429, True), ("PATCH", 429, True), ("GET", 500, True), ("GET", 503, True), ("PATCH", 500, False),
    ("POST", 503, False), ("GET", 404, False), ("PATCH", 409, False),
])
async def test_what_is_repeated(api: Any, method: str, status: int, repeated: bool) -> None:
    server, kube, slept = api
    server.answers = [(status, {})] * 2
    if repeated:
        assert (await kube.request(method, "/x", body={}))["message"] == "x"
        assert len(server.seen) == 3
        assert module.FIRST_DELAY <= slept[0] <= 1.5 * module.FIRST_DELAY and slept[1] >= 2 * module.FIRST_DELAY
    else:
        with pytest.raises(ApiError) as e:
            await kube.request(method, "/x", body={})
        assert (e.value.status, len(server.seen), slept) == (status, 1, [])


async def test_retry_after_is_kept_and_patience_ends(api: Any) -> None:
    server, kube, slept = api
    server.answers = [(429, {"Retry-After": "7"})] * 9
    with pytest.raises(ApiError) as e:
        await kube.request("PATCH", "/x", body={})
    assert e.value.passing and len(server.seen) == module.TRIES
    assert all(7 <= s <= 1.5 * module.LONGEST_DELAY for s in slept) and len(set(slept)) > 1, "jitter"
