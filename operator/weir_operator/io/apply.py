"""The only writer to the Kubernetes API.

Children go by server-side apply under one field manager. What is there is applied by force and fenced by the resourceVersion
that was observed: an operator that was paused and wakes up writes nothing over what changed meanwhile. What is believed absent
is applied without force: where somebody made it a moment ago, his fields are a conflict and stay. The pods' token Secret alone
is forced unfenced, since it is never read; its name carries the owner's uid, so it is nobody else's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from weir_operator.api import names
from weir_operator.io.kube import APPLY, MERGE, ApiError, path

KEY_SECRET = "weir-operator-key"


class NotLeader(Exception):
    """This process may not write now."""


class KeyUnusable(Exception):
    """The Secret of the operator's key holds none."""


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Requests(Protocol):
    """The part of a connection that writing needs: `Kube`'s, or one that answers as it does."""

    async def request(
        self, method: str, target: str, *, query: Mapping[str, str] | None = None, body: Any = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]: ...

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None: ...


class Writer:
    """Every write goes through here, and must be done within the seconds that `left` gives."""

    def __init__(self, kube: Requests, left: Callable[[], float] = lambda: math.inf) -> None:
        self._kube, self._left = kube, left

    def may_write(self) -> bool:
        return self._left() > 0

    async def _write(self, method: str, target: str, body: Any, content_type: str = "application/json", **query: str) -> Any:
        """Raises NotLeader, ApiError, Unreachable."""
        if not self.may_write():
            raise NotLeader("the Lease is not held")
        try:
            async with asyncio.timeout(None if math.isinf(left := self._left()) else left):
                return await self._kube.request(method, target, query=query, body=body, content_type=content_type)
        except TimeoutError:
            raise NotLeader("the Lease ran out before the API server answered") from None

    async def apply(self, manifest: Mapping[str, Any], observed: Mapping[str, Any] | None) -> dict[str, Any]:
        """Create or change a child so that it says what `manifest` says. ApiError 409: it changed since `observed`, or somebody
        else's has its name."""
        meta = dict(manifest["metadata"])
        force = str(observed is not None or manifest["kind"] == "Secret").lower()
        if observed is not None:
            meta["resourceVersion"] = observed["metadata"]["resourceVersion"]
        target = path(manifest["kind"], meta["namespace"], meta["name"])
        body = {**manifest, "metadata": meta}
        return dict(await self._write("PATCH", target, body, APPLY, fieldManager=names.FIELD_MANAGER, force=force))

    async def hand_over(self, deployment: Mapping[str, Any]) -> dict[str, Any]:
        """Have the present number of pods kept by a manager of its own, so that it stays when ours lets go of it: a field that
        nobody applies any more would fall back to 1."""
        meta = deployment["metadata"]
        body = {
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {k: meta[k] for k in ("name", "namespace", "resourceVersion")},
            "spec": {"replicas": deployment["spec"]["replicas"]},
        }
        target = path("Deployment", meta["namespace"], meta["name"])
        return dict(await self._write("PATCH", target, body, APPLY, fieldManager=names.HANDOFF_MANAGER, force="true"))

    async def annotate(self, kind: str, observed: Mapping[str, Any], notes: Mapping[str, str | None]) -> None:
        """Set annotations of an object that is not ours to apply; None takes one away. Fenced by its uid alone, since its
        status changes often; one that is gone needs none. Raises ApiError."""
        meta = observed["metadata"]
        body = {"metadata": {"uid": meta["uid"], "annotations": dict(notes)}}
        target = path(kind, meta["namespace"], meta["name"])
        try:
            await self._write("PATCH", target, body, MERGE, fieldManager=names.FIELD_MANAGER)
        except ApiError as e:
            if e.status not in (404, 409):
                raise

    async def delete(self, kind: str, observed: Mapping[str, Any]) -> None:
        """Delete a child that is no longer wanted, if it still is what was observed. Raises ApiError."""
        meta = observed["metadata"]
        conditions = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions, "propagationPolicy": "Background"}
        try:
            await self._write("DELETE", path(kind, meta["namespace"], meta["name"]), body)
        except ApiError as e:
            if e.status != 404:
                raise

    async def patch_status(self, raw: Mapping[str, Any], status: Mapping[str, Any]) -> dict[str, Any]:
        """Replace what changed of a resource's status, fenced by its resourceVersion. Raises ApiError."""
        meta, before = raw["metadata"], raw.get("status") or {}
        changed = {k: v for k, v in status.items() if before.get(k) != v}
        changed = {k: _merge_patch(before.get(k), v) for k, v in changed.items()}
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": changed}
        target = path(names.KIND, meta["namespace"], meta["name"], "status")
        return dict(await self._write("PATCH", target, body, MERGE, fieldManager=names.FIELD_MANAGER))

    async def patch_spec(
        self, namespace: str, name: str, spec: Mapping[str, Any], manager: str,
        annotations: Mapping[str, str | None] | None = None,
    ) -> dict[str, Any]:
        """What the plugin does in its user's name: a merge patch of the spec, and of annotations with it."""
        body = {"spec": spec, **({"metadata": {"annotations": annotations}} if annotations else {})}
        return dict(await self._write("PATCH", path(names.KIND, namespace, name), body, MERGE, fieldManager=manager))

    async def replace_spec(self, raw: Mapping[str, Any], spec: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Likewise: another spec in place of the one that was read, fenced by its resourceVersion. Raises ApiError."""
        meta = raw["metadata"]
        target = path(names.KIND, meta["namespace"], meta["name"])
        return dict(await self._write("PUT", target, {**raw, "spec": spec}, fieldManager=manager))

    async def event(self, raw: Mapping[str, Any], reason: str, message: str, warning: bool = False, times: int = 1) -> None:
        """One Event object for each resource and reason: a repeat raises its count by `times`. Raises what a write raises."""
        meta, now = raw["metadata"], utc_now()
        digest = hashlib.sha256(f"{meta['uid']}|{reason}".encode()).hexdigest()[:16]
        target = path("Event", meta["namespace"])
        name = f"{meta['name']}.{digest}"
        body = {
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": names.API_VERSION, "kind": names.KIND, "name": meta["name"], "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "reason": reason, "message": message[:1024], "type": "Warning" if warning else "Normal", "count": times,
            "firstTimestamp": now, "lastTimestamp": now, "source": {"component": names.FIELD_MANAGER},
        }
        try:
            await self._write("POST", target, body)
        except ApiError as e:
            if e.reason != "AlreadyExists":
                raise
            known = await self._kube.get("Event", meta["namespace"], name)
            again = {"count": (known or {}).get("count", 0) + times, "lastTimestamp": now, "message": message[:1024]}
            await self._write("PATCH", path("Event", meta["namespace"], name), again, MERGE)

    async def control_key(self, namespace: str) -> bytes:
        """The key that pods' tokens are made from: a Secret of the operator's own namespace, made here if absent and never
        changed here; so several operators may share it. Raises KeyUnusable."""
        found = await self._kube.get("Secret", namespace, KEY_SECRET)
        if found is None:
            body = {
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
                "metadata": {"name": KEY_SECRET, "namespace": namespace}, "stringData": {"key": secrets.token_hex(32)},
            }
            try:
                found = await self._write("POST", path("Secret", namespace), body)
            except ApiError as e:
                if e.reason != "AlreadyExists":  # the other replica was first
                    raise
                found = await self._kube.get("Secret", namespace, KEY_SECRET)
        if found is None:
            raise ApiError(404, "NotFound", f"Secret {namespace}/{KEY_SECRET} vanished while it was made")
        key = base64.b64decode((found.get("data") or {}).get("key") or "")
        if not key:
            raise KeyUnusable(f"Secret {namespace}/{KEY_SECRET} has no data.key: put one there, or delete it to get another")
        return key

    async def create_lease(self, namespace: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        body = {"metadata": {"name": name, "namespace": namespace}, "spec": spec}
        return await self._kube.request("POST", path("Lease", namespace), body=body)

    async def update_lease(self, lease: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
        """Fenced by the resourceVersion that was read. Raises ApiError 409 if somebody else was first."""
        meta = lease["metadata"]
        return await self._kube.request(
            "PUT", path("Lease", meta["namespace"], meta["name"]), body={**lease, "spec": spec},
        )


def _merge_patch(before: Any, after: Any) -> Any:
    """The merge patch that turns `before` into `after`: keys that are gone become null; lists are replaced."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        changed = {k: _merge_patch(before.get(k), v) for k, v in after.items() if before.get(k) != v}
        return {**changed, **{k: None for k in before if k not in after}}
    return after
