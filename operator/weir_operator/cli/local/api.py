"""The part of the Kubernetes API that local mode answers, on a Unix socket, so that one plugin serves both.

Paths, objects and refusals are Kubernetes' own: resources (get, list, merge patch), their pods (list, log, proxy), and the
explanation of a resource where a cluster's operator has it. The socket is its owner's alone: mode 0700 of its folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from weir_operator.api import names
from weir_operator.cli.local.deployment import LocalDeployment, NotHere
from weir_operator.plan.plan import SpecError

RESOURCES = f"/apis/{names.API_VERSION}"
MOST_LOG_LINES = 10_000
PROXY_SECONDS = 30.0


FOLDER_VARIABLE = "WEIR_LOCAL_DIR"


def socket_folder() -> Path:
    """Where the sockets of local deployments are, one for each process: this user's own, unless the variable names another."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"weir-{os.getuid()}"


def make_folder(folder: Path) -> None:
    """Raises OSError where it is somebody else's, or open to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(13, "must be a folder of yours that nobody else may enter", str(folder))


class _Status(Exception):
    """A refusal, as Kubernetes words it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        said = {"status": "Failure", "code": code, "reason": reason, "message": message}
        self.body: dict[str, Any] = {"apiVersion": "v1", "kind": "Status", **said}


class LocalApi:
    """An async context manager: inside, the socket answers. `explained` gives the explanation of namespace/name, or None."""

    def __init__(
        self, deployments: Mapping[str, LocalDeployment], explained: Callable[[str], dict[str, Any] | None],
        changed: Callable[[LocalDeployment], None], folder: Path,
    ) -> None:
        self._deployments, self._explained, self._changed = deployments, explained, changed
        self.path = folder / f"{os.getpid()}.sock"

    async def __aenter__(self) -> LocalApi:
        make_folder(self.path.parent)
        self.path.unlink(missing_ok=True)  # of a process that had our number before us
        app = web.Application()
        one = f"{RESOURCES}/namespaces/{{namespace}}/{names.PLURAL}"
        app.add_routes([
            web.get(f"{RESOURCES}/{names.PLURAL}", self._list), web.get(one, self._list),
            web.get(one + "/{name}", self._get), web.patch(one + "/{name}", self._patch),
            web.get("/api/v1/namespaces/{namespace}/pods", self._pods),
            web.get("/api/v1/namespaces/{namespace}/pods/{pod}/log", self._log),
            web.get("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{path:.*}", self._proxy),
            web.get("/explain/{namespace}/{name}", self._explain),
        ])
        app.middlewares.append(_refusals)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        self.path.unlink(missing_ok=True)

    def _chosen(self, request: web.Request) -> LocalDeployment:
        name = request.match_info["name"]
        found = self._deployments.get(name)
        if found is None:
            raise _Status(404, "NotFound", f'{names.PLURAL}.{names.GROUP} "{name}" not found')
        return found

    async def _list(self, _: web.Request) -> web.Response:
        items = [d.object() for d in self._deployments.values()]
        return web.json_response({"apiVersion": names.API_VERSION, "kind": f"{names.KIND}List", "items": items})

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._chosen(request).object())

    async def _patch(self, request: web.Request) -> web.Response:
        deployment = self._chosen(request)
        try:
            change = await request.json()
            if not isinstance(change, dict):
                raise SpecError("a merge patch is an object")
            deployment.patch(change)
        except (SpecError, NotHere, json.JSONDecodeError) as e:
            raise _Status(422, "Invalid", f'{names.KIND} "{deployment.name}" is invalid: {e}') from None
        self._changed(deployment)
        return web.json_response(deployment.object())

    async def _pods(self, request: web.Request) -> web.Response:
        selector = request.query.get("labelSelector", "")
        wanted = [d for d in self._deployments.values() if not selector or selector == f"{names.OWNER_LABEL}={d.name}"]
        items = [d.pod(s) for d in wanted for s in d.servers]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "items": items})

    def _server(self, request: web.Request) -> Any:
        name = request.match_info["pod"]
        for deployment in self._deployments.values():
            for server in deployment.servers:
                if server.name == name:
                    return server
        raise _Status(404, "NotFound", f'pods "{name}" not found')

    async def _log(self, request: web.Request) -> web.Response:
        server, lines = self._server(request), request.query.get("tailLines", "")
        kept = min(int(lines), MOST_LOG_LINES) if lines.isdigit() else MOST_LOG_LINES
        try:
            text = await asyncio.to_thread(_tail, server.log, kept)
        except OSError as e:
            raise _Status(404, "NotFound", f"no log of {server.name}: {e.strerror}") from None
        return web.Response(text=text)

    async def _proxy(self, request: web.Request) -> web.Response:
        """GET on the server's own port, which is open to this machine's users anyway."""
        server = self._server(request)
        timeout = aiohttp.ClientTimeout(total=PROXY_SECONDS)
        try:
            url = f"{server.url}/{request.match_info['path']}"
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.get(url, allow_redirects=False) as answer,
            ):
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise _Status(503, "ServiceUnavailable", f"{server.name} does not answer: {e or type(e).__name__}") from None

    async def _explain(self, request: web.Request) -> web.Response:
        deployment = self._chosen(request)
        found = await asyncio.to_thread(self._explained, deployment.subject().key)
        if found is None:
            raise _Status(404, "NotFound", f"{deployment.name} was not polled yet")
        return web.json_response(found)


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except _Status as e:
        return web.json_response(e.body, status=e.body["code"])
    except web.HTTPException as e:
        body = _Status(e.status, "NotFound", f"local mode has no {request.method} {request.path}").body
        return web.json_response(body, status=e.status)


def _tail(file: Path, lines: int) -> str:
    with file.open(errors="replace") as f:
        return "".join(deque(f, lines))
