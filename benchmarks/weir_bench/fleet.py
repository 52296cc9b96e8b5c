"""Control ports of pods that only pretend to run: one process answers at every address that kwok gives out.

    PYTHONPATH=benchmarks:tests/unit python -m weir_bench.fleet

Each address has knobs of its own under the server's own rules, and an idle server's window; it lets in who comes first. Its
caller sees to it that all of CIDR is local (`scale`).
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from fake_server import FakeServer

from weir_server.contract import CONTROL_PORT

CIDR = "10.89.0.0/16"


class Fleet:
    """FakeServers by address, made when first asked."""

    def __init__(self) -> None:
        self._servers: dict[str, FakeServer] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        host = request.transport.get_extra_info("sockname")[0]
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        server = self._servers.get(host)
        if server is None or server.token != bearer:  # another pod has this address now
            server = self._servers[host] = FakeServer(host, CONTROL_PORT, bearer)
        answer = await server.answer(request)
        server.seen.clear()
        return answer


async def main() -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", Fleet().handle)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=300)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", CONTROL_PORT, backlog=1024).start()
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
