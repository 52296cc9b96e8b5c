"""/healthz, /readyz and /metrics of the operator itself."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


def _answer(wrong: str | None) -> web.Response:
    return web.Response(text=(wrong or "ok") + "\n", status=503 if wrong else 200)


async def serve(port: int, healthy: Callable[[], str | None], ready: Callable[[], str | None]) -> web.AppRunner:
    """Listen on every address, of either family. The functions return what is wrong, or None. OSError: port in use."""
    async def healthz(_: web.Request) -> web.Response:
        return _answer(healthy())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner
