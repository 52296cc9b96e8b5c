"""What the plugin asks: an API server by the kubeconfig, or the sockets of local mode, which answer the same paths."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
import yaml

from weir_operator.api import names
from weir_operator.cli.local.api import socket_folder
from weir_operator.io.kube import REQUEST_SECONDS, ApiError, ByPath, Kube, Unreachable, configuration, path
from weir_operator.plan.pods import containers_of

OPERATOR_SELECTOR = "app.kubernetes.io/component=operator,app.kubernetes.io/part-of=weir"
"""Labels that hold whatever a release is called."""
READ_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Where:
    """What the command line says of the place. `namespace` None: the context's."""

    namespace: str | None = None
    context: str | None = None
    local: bool = False

    @property
    def in_namespace(self) -> str:
        return self.namespace or ("default" if self.local else context_namespace(self.context))


class Api(Protocol):
    """Requests by Kubernetes' paths. All raise ApiError for a refusal and Unreachable for no answer."""

    async def request(
        self, method: str, target: str, *, query: Mapping[str, str] | None = None, body: Any = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]: ...

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None: ...

    async def list(self, kind: str, namespace: str | None = None, selector: str | None = None) -> list[dict[str, Any]]: ...

    async def text(self, target: str) -> str:
        """The body of a GET that is no JSON: a log, metrics."""

    async def explained(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What the tuner itself says of a resource. Its ApiError says why nobody can be asked."""

    async def close(self) -> None: ...


class Cluster(Kube):
    """The API server."""

    async def text(self, target: str) -> str:
        prepared = await self._client.param_serialize(
            "GET", target, header_params={"Accept": "*/*"}, auth_settings=["BearerToken"],
        )
        try:
            answer = await self._client.call_api(*prepared, _request_timeout=READ_SECONDS)
            text = (await answer.read()).decode(errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise Unreachable(f"the API server does not answer: {e or type(e).__name__}") from None
        if answer.status >= 300:
            raise ApiError.of(answer.status, text)
        return text

    async def explained(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """From the operator's leader, through the API server's proxy to its pods: those where the status says that it is, so
        that nobody needs rights elsewhere; without any there, those of every namespace."""
        said, meta = "no pod of the operator was found", raw["metadata"]
        named = str((raw.get("status") or {}).get("operator", "")).split("/")[0]
        found = await self.list("Pod", named, OPERATOR_SELECTOR) if named else []
        for pod in found or await self.list("Pod", None, OPERATOR_SELECTOR):
            where = proxied(pod, "health", f"explain/{meta['namespace']}/{meta['name']}")
            try:
                return dict(json.loads(await self.text(where)))
            except ApiError as e:
                said = e.message
            except ValueError:
                said = f"{pod['metadata']['name']} answers no JSON"
        raise ApiError(404, "NotFound", said)

    async def close(self) -> None:
        await self._client.close()


class LocalSocket(ByPath):
    """One process of local mode."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket)))

    async def _send(self, method: str, target: str, body: Any = None) -> str:
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        try:
            async with self._session.request(method, f"http://local{target}", json=body, timeout=timeout) as answer:
                text = await answer.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise Unreachable(f"{self.socket} does not answer: {e or type(e).__name__}") from None
        if answer.status >= 300:
            raise ApiError.of(answer.status, text)
        return text

    async def request(
        self, method: str, target: str, *, query: Mapping[str, str] | None = None, body: Any = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        return dict(json.loads(await self._send(method, f"{target}?{urlencode(query)}" if query else target, body)))

    async def text(self, target: str) -> str:
        return await self._send("GET", target)

    async def explained(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return await self.request("GET", f"/explain/{raw['metadata']['namespace']}/{raw['metadata']['name']}")

    async def close(self) -> None:
        await self._session.close()


def port_of(pod: Mapping[str, Any], name: str) -> int:
    """The number of a pod's named port. Raises ApiError where the pod names no such port."""
    for container in containers_of(pod["spec"]):
        for entry in container.get("ports") or ():
            if entry.get("name") == name:
                return int(entry["containerPort"])
    raise ApiError(404, "NotFound", f"pod {pod['metadata']['name']} has no port called {name}")


def proxied(pod: Mapping[str, Any], port: str, target: str) -> str:
    """The path of a pod's named port through the API server's proxy. Raises ApiError where the pod names no such port."""
    meta = pod["metadata"]
    return f"{path('Pod', meta['namespace'], meta['name'])}:{port_of(pod, port)}/proxy/{target}"


def context_namespace(context: str | None) -> str:
    """The namespace of the kubeconfig's context, as kubectl takes it."""
    from kubernetes.aio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

    for part in str(KUBE_CONFIG_DEFAULT_LOCATION).split(os.pathsep):
        file = Path(part).expanduser()
        try:
            content = yaml.safe_load(file.read_text()) or {}
            wanted = context or content.get("current-context")
            for entry in content.get("contexts") or ():
                if entry["name"] == wanted:
                    return str(entry["context"].get("namespace") or "default")
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError):
            continue  # what is wrong with it, connecting says
    return "default"


async def sockets() -> list[LocalSocket]:
    """Every process of local mode that answers. Sockets that nobody listens on were left by killed ones, and go."""
    found = []
    for file in sorted(socket_folder().glob("*.sock")):
        try:
            _, writer = await asyncio.wait_for(asyncio.open_unix_connection(str(file)), 2.0)
            writer.close()
            found.append(LocalSocket(file))
        except ConnectionRefusedError:
            file.unlink(missing_ok=True)
        except (TimeoutError, OSError):
            continue
    return found


async def reach(where: Where) -> Sequence[Api]:
    """The places to ask: one API server, or all processes of local mode. Raises Unreachable."""
    if not where.local:
        return [Cluster(await configuration(where.context))]
    found = await sockets()
    if not found:
        raise Unreachable(f"no local deployment runs: no socket in {socket_folder()} answers; weir-operator local starts one")
    return found


async def find(apis: Sequence[Api], where: Where, name: str) -> tuple[Api, dict[str, Any]]:
    """The resource and who has it. Raises ApiError."""
    raws = [await api.get(names.KIND, where.in_namespace, name) for api in apis]
    found = [(api, raw) for api, raw in zip(apis, raws, strict=True) if raw is not None]
    if not found:
        place = "runs on this machine" if where.local else f"in namespace {where.in_namespace!r}"
        raise ApiError(404, "NotFound", f"no InferenceDeployment {name!r} {place}")
    if len(found) > 1:
        raise ApiError(409, "Conflict", f"{len(found)} local processes run a {name!r}: give one a WEIR_LOCAL_DIR of its own")
    return found[0]
