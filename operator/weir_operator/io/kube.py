"""The connection to the API server: plain requests on fixed paths, with the credentials that kubernetes.aio finds.

Fixed paths rather than discovery: the kinds are known, a read-only root has no place for the client's discovery cache, and a
CRD that arrives late is simply a path that starts to answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies_environment

import aiohttp
import orjson
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from weir_operator.api import names
from weir_operator.io.metrics import API_CALLS, verb

REQUEST_SECONDS = 30.0
TRIES, FIRST_DELAY, LONGEST_DELAY = 4, 0.5, 10.0
"""Of a request that the API server put off: 429 for any (it did nothing), 5xx for reads. Others are the caller's to repeat."""
PAGE = 250
"""Objects of a list that come at once."""
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON, METADATA = "application/json", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_PATHS = {
    "Deployment": ("apis/apps/v1", "deployments"),
    "ReplicaSet": ("apis/apps/v1", "replicasets"),
    "Service": ("api/v1", "services"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Secret": ("api/v1", "secrets"),
    "Pod": ("api/v1", "pods"),
    "Event": ("api/v1", "events"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "HorizontalPodAutoscaler": ("apis/autoscaling/v2", "horizontalpodautoscalers"),
    **{kind: (f"apis/{version}", plural) for kind, (version, plural) in names.OPTIONAL_KINDS.items()},
    names.KIND: (f"apis/{names.API_VERSION}", names.PLURAL),
}


def path(kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    """The path of an object, or of a list where `name` is None (across namespaces where `namespace` is None)."""
    root, plural = _PATHS[kind]
    parts = [root, *(["namespaces", namespace] if namespace else []), plural, *([name] if name else [])]
    return "/" + "/".join(quote(part, safe="/") for part in (*parts, *([subresource] if subresource else [])))


def resource_of(kind: str) -> tuple[str, str, str]:
    """Group, version and plural of a kind."""
    root, plural = _PATHS[kind]
    *group, version = root.split("/")[1:]
    return "".join(group), version, plural


class ApiError(Exception):
    """A refusal by the API server: its status, its reason word and its own sentence."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message

    @classmethod
    def of(cls, status: int, text: str) -> ApiError:
        """The refusal that an answer means: a Status of Kubernetes, another JSON with an `error`, or plain words."""
        try:
            said = orjson.loads(text)
        except ValueError:
            said = {}
        said = said if isinstance(said, dict) else {}
        words = said.get("message") or said.get("error") or text.strip()[:300] or f"it answers {status}"
        return cls(status, said.get("reason", ""), words)

    @property
    def passing(self) -> bool:
        """Whether the same request may well be accepted later. A typed object that cannot be read is a 500, and never is."""
        if self.status == 500 and ("failed to convert" in self.message or "failed to create typed" in self.message):
            return False
        return self.status in (409, 429) or self.status >= 500


class Unreachable(Exception):
    """The API server gave no answer."""


def proxy_for(url: str, env: Mapping[str, str] | None = None) -> str | None:
    """The proxy that the environment names for `url`, with NO_PROXY as Go reads it: suffixes, addresses and networks."""
    proxies = dict(env) if env is not None else getproxies_environment()
    host = urlsplit(url).hostname or ""
    for entry in (part.strip() for part in proxies.get("no", "").split(",")):
        if entry == "*" or host == entry or (entry and host.endswith("." + entry.lstrip("."))):
            return None
        try:
            if entry and ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return None
        except ValueError:
            continue
    return proxies.get(urlsplit(url).scheme)


async def configuration(context: str | None = None) -> Configuration:
    """In-cluster credentials, else the kubeconfig's. Raises Unreachable with one sentence if there are neither."""
    found = Configuration()
    try:
        if context is None:
            try:
                config.load_incluster_config(client_configuration=found)
            except config.ConfigException:
                await config.load_kube_config(client_configuration=found)
        else:
            await config.load_kube_config(client_configuration=found, context=context)
    except (config.ConfigException, OSError, TypeError, ValueError) as e:
        raise Unreachable(f"no cluster: neither a pod's service account nor a usable kubeconfig ({e})") from None
    found.proxy = found.proxy or proxy_for(found.host)
    found.client_session_kwargs = {"trust_env": False}  # aiohttp would misread NO_PROXY's networks
    return found


class ByPath:
    """Objects by Kubernetes' paths, over whatever `request` asks."""

    async def request(
        self, method: str, target: str, *, query: Mapping[str, str] | None = None, body: Any = None,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        """The answer's JSON. Raises ApiError for a refusal, Unreachable where no answer came within REQUEST_SECONDS."""
        raise NotImplementedError

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        """The object, or None if there is none."""
        try:
            return await self.request("GET", path(kind, namespace, name))
        except ApiError as e:
            if e.status == 404:
                return None
            raise

    async def list(
        self, kind: str, namespace: str | None = None, selector: str | None = None, keep: Callable[[Any], Any] = dict,
    ) -> list[Any]:
        """The objects, with the kind and version that the API server leaves out of a list's members. They come in pages, and
        each is kept as `keep` makes it: of what it leaves out, no more than a page is ever held."""
        which = {"labelSelector": selector} if selector else {}
        query, found = {**which, "limit": str(PAGE)}, list[Any]()
        while True:
            try:
                answer = await self.request("GET", path(kind, namespace), query=query)
            except ApiError as e:
                if e.status != 410 or "continue" not in query:
                    raise
                query, found = which, []  # too old to go on: all at once
                continue
            found += [keep({"apiVersion": answer["apiVersion"], "kind": kind, **item}) for item in answer.get("items", ())]
            if not (token := (answer.get("metadata") or {}).get("continue")):
                return found
            query = {**query, "continue": token}


class Kube(ByPath):
    """One pooled connection. Use as an async context manager."""

    def __init__(self, settings: Configuration) -> None:
        self._client = ApiClient(settings)

    @classmethod
    async def connect(cls, context: str | None = None) -> Kube:
        return cls(await configuration(context))

    async def __aenter__(self) -> Kube:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def request(
        self, method: str, target: str, *, query: Mapping[str, str] | None = None, body: Any = None, content_type: str = JSON,
        accept: str = JSON,
    ) -> dict[str, Any]:
        for attempt in range(TRIES):
            status, wait, text = await self._once(method, target, query, body, content_type, accept)
            put_off = status == 429 or (method == "GET" and status >= 500)
            if not put_off or attempt == TRIES - 1:
                break
            await asyncio.sleep(min(LONGEST_DELAY, max(wait, FIRST_DELAY * 2**attempt)) * random.uniform(1.0, 1.5))
        if status < 300:
            return dict(orjson.loads(text)) if text else {}
        raise ApiError.of(status, text.decode(errors="replace"))

    async def names(self, kind: str, namespace: str, selector: str, most: int) -> frozenset[str] | None:
        """The names alone of the objects that `selector` chooses, or None where there are more than `most`."""
        query = {"labelSelector": selector, "limit": str(most)}
        answer = await self.request("GET", path(kind, namespace), query=query, accept=METADATA)
        more = answer["metadata"].get("continue")
        return None if more else frozenset(item["metadata"]["name"] for item in answer.get("items") or ())

    async def _once(
        self, method: str, target: str, query: Mapping[str, str] | None, body: Any, content_type: str, accept: str,
    ) -> tuple[int, float, bytes]:
        """Status, seconds of Retry-After, body."""
        headers = {"Accept": accept, "Content-Type": content_type}
        called = verb(method, target, content_type)
        try:
            prepared = await self._client.param_serialize(
                method, target, query_params=list((query or {}).items()), header_params=headers, body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(*prepared, _request_timeout=REQUEST_SECONDS)
            text = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            API_CALLS.labels(called, "none").inc()
            raise Unreachable(f"the API server does not answer: {e or type(e).__name__}") from None
        API_CALLS.labels(called, str(answer.status)).inc()
        after = answer.headers.get("Retry-After", "")
        return answer.status, float(after) if after.isdigit() else 0.0, text

    async def has(self, kind: str) -> bool:
        """Whether the API server serves a kind now."""
        root, plural = _PATHS[kind]
        try:
            found = await self.request("GET", f"/{root}")
        except ApiError as e:
            if e.status == 404:
                return False
            raise
        return any(resource.get("name") == plural for resource in found.get("resources", ()))
