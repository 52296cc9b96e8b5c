"""What the watches have seen: a cache of the resources and of their children, fed by events and refreshed by lists.

A missing child is looked for by name before it is believed missing, and a periodic list drops what no watch reported as
deleted; so a gap in a watch delays a repair and never causes a wrong one. What a list showed first, a watch has to tell soon
after: where it does not, the watch has stopped (`lag`).
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

from weir_operator.api import names

Object = Mapping[str, Any]
CHILD_KINDS = (
    "Deployment", "Service", "ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy",
    "HorizontalPodAutoscaler",
)
"""Kinds of children that are watched. Secrets are never read, and the optional kinds are listed now and then."""
ALL_OF = (names.KIND, "HorizontalPodAutoscaler")
"""Kinds of which every object is watched, and not only our own: an autoscaler of somebody else's may scale what is ours."""


def key_of(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def owner_key(obj: Object) -> str | None:
    """The resource that an object belongs to, by its label. An autoscaler without one belongs to what it scales: a resource, or
    the Deployment that has its name."""
    meta, target = obj["metadata"], (obj.get("spec") or {}).get("scaleTargetRef") or {}
    owner = (meta.get("labels") or {}).get(names.OWNER_LABEL)
    if owner is None and target.get("kind") in ("Deployment", names.KIND):
        owner = target.get("name")
    return key_of(meta["namespace"], owner) if owner else None


def owned_by(obj: Object, uid: str) -> bool:
    return any(ref.get("uid") == uid for ref in obj["metadata"].get("ownerReferences") or ())


def unmanaged(obj: Object) -> Object:
    """In a quarter of the memory: without the record of who set which field, but for who set a Deployment's number of pods,
    which is all that anybody here asks."""
    meta = obj["metadata"]
    if "managedFields" not in meta:
        return obj
    kept = [
        {"manager": entry["manager"], "fieldsV1": {"f:spec": {"f:replicas": {}}}} for entry in meta["managedFields"] or ()
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    ]
    rest = {k: v for k, v in meta.items() if k != "managedFields"}
    return {**obj, "metadata": {**rest, "managedFields": kept} if kept else rest}


def in_common(value: Any, like: Any) -> Any:
    """The same value, made of the parts of `like` that it equals, and of one string for all that are equal: a thousand objects
    of a kind differ in little but their names. Nobody changes a kept object."""
    if type(value) is str:
        return sys.intern(value)
    if isinstance(value, dict):
        before = like if isinstance(like, dict) else None
        kept = {sys.intern(k): in_common(v, before.get(k) if before else None) for k, v in value.items()}
        same = before is not None and before.keys() == kept.keys() and all(before[k] is v for k, v in kept.items())
        return before if same else kept
    if isinstance(value, list):
        were = like if isinstance(like, list) else None
        items = [in_common(v, old) for v, old in itertools.zip_longest(value, (were or ())[: len(value)])]
        same = were is not None and len(were) == len(items) and all(map(operator.is_, items, were))
        return were if same else items
    return like if type(value) is type(like) and value == like else value


class Store:
    """Objects by kind and namespace/name, and by kind and owner."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Object]] = {}
        self._owned: dict[tuple[str, str], set[str]] = {}
        self._untold: dict[tuple[str, str], float] = {}  # what a list showed and no watch has told: since when
        self.heard: dict[str, float] = {}  # Unix time of each kind's last news from a watch

    def told(self, kind: str, obj: Object, deleted: bool) -> None:
        """A watch's event."""
        self.heard[kind] = time.time()
        self._untold.pop((kind, key_of(obj["metadata"]["namespace"], obj["metadata"]["name"])), None)
        (self.drop if deleted else self.put)(kind, obj)

    def lag(self) -> float:
        """Seconds for which a watch owes the news that a list brought; 0 where none does."""
        return time.monotonic() - min(self._untold.values()) if self._untold else 0.0

    def put(self, kind: str, obj: Object) -> bool:
        """Keep an object, unless a newer version of it is known. Returns whether it is kept."""
        meta = obj["metadata"]
        known = self._objects.setdefault(kind, {})
        key = key_of(meta["namespace"], meta["name"])
        old = known.get(key)
        if old and old["metadata"]["uid"] == meta["uid"] and _older(meta, old["metadata"]):
            return False
        known[key] = obj = cast(Object, in_common(unmanaged(obj), old or next(iter(known.values()), None)))
        if old is not None and owner_key(old) != owner_key(obj):
            self._disown(kind, old, key)
        if owner := owner_key(obj):
            self._owned.setdefault((kind, owner), set()).add(key)
        return True

    def drop(self, kind: str, obj: Object) -> None:
        key = key_of(obj["metadata"]["namespace"], obj["metadata"]["name"])
        self._disown(kind, self._objects.get(kind, {}).pop(key, obj), key)

    def _disown(self, kind: str, obj: Object, key: str) -> None:
        if owner := owner_key(obj):
            self._owned.get((kind, owner), set()).discard(key)
            if not self._owned.get((kind, owner)):
                self._owned.pop((kind, owner), None)

    def known(self, kind: str) -> dict[str, Object]:
        return dict(self._objects.get(kind, {}))

    def replace(
        self, kind: str, listed: Iterable[Object], before: Mapping[str, Object], watched: bool = True, gap: bool = False,
    ) -> None:
        """Take a fresh list of a kind as the truth about what was known `before` it was asked for. What watches told
        meanwhile is newer: it is neither dropped nor brought back. After a `gap` a watch does not owe what went: it began
        anew, and that is not in what it tells."""
        fresh = {key_of(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in listed}
        now = self.known(kind)
        for key in before.keys() - fresh.keys():
            if now.get(key) is before[key]:
                self.drop(kind, before[key])
                if watched:
                    self._untold[kind, key] = time.monotonic()
        if gap:
            for owed in [o for o in self._untold if o[0] == kind and o[1] not in self._objects.get(kind, {})]:
                del self._untold[owed]
        for key, obj in fresh.items():
            if key in before and key not in now:
                continue
            if self.put(kind, obj) and watched and _version(obj) != _version(now.get(key)):
                self._untold.setdefault((kind, key), time.monotonic())

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self._objects.get(kind, {}).get(key_of(namespace, name))

    def resources(self) -> list[Object]:
        return list(self._objects.get(names.KIND, {}).values())

    def owned(self, kind: str, key: str) -> list[Object]:
        """The objects of a kind that belong to this resource, by their label or their target."""
        objects = self._objects.get(kind, {})
        return [objects[name] for name in sorted(self._owned.get((kind, key), ()))]

    def autoscalers(self, key: str, uid: str) -> tuple[Object, ...]:
        """Those of somebody else's that scale this resource or its Deployment."""
        found = self.owned("HorizontalPodAutoscaler", key)
        return tuple(o for o in found if not owned_by(o, uid) and not o["metadata"].get("deletionTimestamp"))

    def pods(self, key: str) -> list[Object]:
        return self.owned("Pod", key)


def _version(obj: Object | None) -> tuple[str, str] | None:
    return (obj["metadata"]["uid"], obj["metadata"]["resourceVersion"]) if obj else None


def _older(meta: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Versions of one object grow (as etcd's revisions do); a version that is no number is not older."""
    try:
        return int(meta["resourceVersion"]) < int(than["resourceVersion"])
    except (KeyError, ValueError):
        return False
