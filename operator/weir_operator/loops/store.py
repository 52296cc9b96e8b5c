"""What the watches have seen: a cache of the resources and of their children, fed by events and refreshed by lists.

A missing child is looked for by name before it is believed missing, and a periodic list drops what no watch reported as
deleted; so a gap in a watch delays a repair and never causes a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weir_operator.api import names

Object = Mapping[str, Any]
CHILD_KINDS = ("Deployment", "Service", "ServiceAccount", "ConfigMap")


def key_of(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def owner_key(obj: Object) -> str | None:
    """The resource that an object belongs to, by its label."""
    meta = obj["metadata"]
    owner = (meta.get("labels") or {}).get(names.OWNER_LABEL)
    return key_of(meta["namespace"], owner) if owner else None


def owned_by(obj: Object, uid: str) -> bool:
    return any(ref.get("uid") == uid for ref in obj["metadata"].get("ownerReferences") or ())


class Store:
    """Objects by kind and namespace/name; pods also by owner."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Object]] = {}
        self._pods: dict[str, set[str]] = {}

    def put(self, kind: str, obj: Object) -> None:
        """Keep an object, unless a newer version of it is known."""
        meta = obj["metadata"]
        known = self._objects.setdefault(kind, {})
        key = key_of(meta["namespace"], meta["name"])
        old = known.get(key)
        if old and old["metadata"]["uid"] == meta["uid"] and _older(meta, old["metadata"]):
            return
        known[key] = obj
        if kind == "Pod" and (owner := owner_key(obj)):
            self._pods.setdefault(owner, set()).add(key)

    def drop(self, kind: str, obj: Object) -> None:
        key = key_of(obj["metadata"]["namespace"], obj["metadata"]["name"])
        self._objects.get(kind, {}).pop(key, None)
        if kind == "Pod" and (owner := owner_key(obj)):
            self._pods.get(owner, set()).discard(key)
            if not self._pods.get(owner):
                self._pods.pop(owner, None)

    def replace(self, kind: str, listed: Iterable[Object]) -> None:
        """Take a fresh list of a kind as the truth."""
        fresh = {key_of(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in listed}
        for key in set(self._objects.get(kind, {})) - set(fresh):
            self.drop(kind, self._objects[kind][key])
        for obj in fresh.values():
            self.put(kind, obj)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind, {}).get(key_of(namespace, name))

    def resources(self) -> list[Object]:
        return list(self._objects.get(names.KIND, {}).values())

    def pods(self, key: str) -> list[Object]:
        pods = self._objects.get("Pod", {})
        return [pods[name] for name in sorted(self._pods.get(key, ()))]


def _older(meta: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Versions of one object grow (as etcd's revisions do); a version that is no number is not older."""
    try:
        return int(meta["resourceVersion"]) < int(than["resourceVersion"])
    except (KeyError, ValueError):
        return False
