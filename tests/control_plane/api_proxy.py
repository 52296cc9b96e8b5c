"""A proxy between an operator and the API server that understands requests, so that it can be unkind to some of them only."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import aiohttp
import yaml
from aiohttp import web
from control_plane_kit import Cluster

WRITING = ("POST", "PUT", "PATCH", "DELETE")


class ApiProxy:
    """Plain HTTP in front of the cluster's API server, in a thread of its own.

    `cut_after`: seconds after which a watch is cut, in the midst of it. `away`: no request is answered, as if nobody listened.
    `watches_end`: the status that watches are answered with instead. `watches_expire`: they are answered with one event, an
    error that says 410. `watches_tear`: they end in the middle of the next line. `at_write`: called for each write but the
    Lease's, with its number from 1, "before" it is passed on and "after" it was answered, and its path: what it does, it does
    at just that moment. `seen` counts what came: lists, watches, cuts, writes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.cut_after: float | None = None
        self.away = False
        self.watches_end: int | None = None
        self.watches_expire = self.watches_tear = False
        self.at_write: Callable[[int, str, str], None] = lambda _number, _moment, _path: None
        self.seen: Counter[str] = Counter()
        self._open: set[asyncio.Transport] = set()
        self._hushed = 0  # watches up to this number
        self._ready = threading.Event()

    def __enter__(self) -> ApiProxy:
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def kubeconfig(self, name: str) -> Path:
        """The admin's, by way of this proxy."""
        file = self._cluster.folder / f"{name}.kubeconfig"
        found = yaml.safe_load(self._cluster.kubeconfig.read_text())
        found["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self.port}"}
        file.write_text(yaml.safe_dump(found))
        return file

    def cut(self) -> None:
        """Break every connection that is busy now: those of the watches."""
        self._loop.call_soon_threadsafe(lambda: [transport.abort() for transport in self._open])

    def hush(self) -> None:
        """Have the watches that are open stay open and tell nothing more."""
        self._hushed = self.seen["watches"]

    def go_away(self) -> None:
        """Cut them, and answer none that comes."""
        self.away = True
        self.cut()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = int(runner.addresses[0][1])
        connector, timeout = aiohttp.TCPConnector(ssl=False, limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            return _abort(request)
        watch = request.query.get("watch") in ("true", "1")
        assert request.transport is not None
        self._open.add(transport := request.transport)
        try:
            if watch:
                self.seen["watches"] += 1
                if self.watches_end:
                    return web.json_response({"kind": "Status", "code": self.watches_end}, status=self.watches_end)
                if self.watches_expire:
                    return web.json_response({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}})
                async with asyncio.timeout(self.cut_after):
                    return await self._pass_on(request, watch=self.seen["watches"])
            return await self._counted(request)
        except TimeoutError:
            self.seen["cuts"] += 1
            return _abort(request)
        except (aiohttp.ClientError, OSError):
            return _abort(request)
        finally:
            self._open.discard(transport)

    async def _counted(self, request: web.Request) -> web.StreamResponse:
        if request.method not in WRITING or "/leases" in request.path:
            self.seen["lists"] += "labelSelector" in request.query or request.path.endswith("inferencedeployments")
            return await self._pass_on(request)
        self.seen["writes"] += 1
        number = self.seen["writes"]
        await request.read()
        self.at_write(number, "before", request.path)
        if self.away:
            return _abort(request)
        return await self._pass_on(request, lambda: self.at_write(number, "after", request.path))

    async def _pass_on(
        self, request: web.Request, answered: Callable[[], None] = lambda: None, watch: int | None = None,
    ) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length", "transfer-encoding")}
        target = self._cluster.url + request.raw_path
        body, unasked = await request.read() or None, {"Content-Type", "Accept-Encoding"}
        async with self._session.request(
            request.method, target, headers=headers, data=body, skip_auto_headers=unasked,
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("content-length", "transfer-encoding")}
            out = web.StreamResponse(status=answer.status, headers=kept)
            answered()
            if self.away:
                return _abort(request)
            await out.prepare(request)
            async for chunk in answer.content.iter_any():
                if watch is not None and watch <= self._hushed:
                    await asyncio.Event().wait()  # until whoever watches gives up
                if watch is not None and self.watches_tear:
                    await out.write(chunk[: len(chunk) // 2])
                    break
                await out.write(chunk)
            await out.write_eof()
            return out


def _abort(request: web.Request) -> web.Response:
    """No answer: the connection breaks."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)
