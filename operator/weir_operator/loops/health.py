"""/healthz, /readyz and /metrics of the operator itself, and /explain/NAMESPACE/NAME: why its tuner does what it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


def _answer(wrong: str | None) -> web.Response:
    return web.Response(text=(wrong or "ok") + "\n", status=503 if wrong else 200)


async def serve(
    port: int, healthy: Callable[[], str | None], ready: Callable[[], str | None],
    explained: Callable[[str], dict[str, Any] | None],
) -> web.AppRunner:
    """Listen on every address, of either family. The first two return what is wrong, or None; `explained` gives the
    explanation of namespace/name, None where this replica does not steer it. OSError: port in use."""
    one_at_a_time = asyncio.Semaphore(1)  # an explanation costs milliseconds of this loop's thread a pod

    async def healthz(_: web.Request) -> web.Response:
        return _answer(healthy())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(ready())

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def explain(request: web.Request) -> web.Response:
        key = "{namespace}/{name}".format_map(request.match_info)
        async with one_at_a_time:
            found = await asyncio.to_thread(explained, key)
        if found is None:
            return web.json_response({"error": f"this replica does not steer {key}"}, status=404)
        return web.json_response(found)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    app.router.add_get("/explain/{namespace}/{name}", explain)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner
