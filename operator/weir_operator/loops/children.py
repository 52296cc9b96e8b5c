"""The children of a resource, kept as they are planned.

A child is applied when what should be there, or what is there, is not what the last apply left: so an edit is repaired, a
mutating webhook is not fought, and a second pass writes nothing. What pods stand on comes first, and they wait for it; of what
stands beside them, each goes its own way: one that is refused holds up no other.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from weir_operator.api import names
from weir_operator.api.types import InferenceDeployment
from weir_operator.io.apply import Writer
from weir_operator.io.kube import ApiError, Kube
from weir_operator.loops.census import Census
from weir_operator.loops.pace import Pace
from weir_operator.loops.queue import Retry
from weir_operator.loops.store import ALL_OF, CHILD_KINDS, Object, Store, key_of, owned_by
from weir_operator.plan.manifests import BEFORE_PODS, KEPT, Defaults, Manifest, children
from weir_operator.plan.observed import Observed
from weir_operator.plan.replicas import marks, takes_over

Where = tuple[str, str, str]
"""Kind, namespace, name."""
_BOOKKEEPING = (
    "deployment.kubernetes.io/revision", "pv.kubernetes.io/bind-completed", "pv.kubernetes.io/bound-by-controller",
    "volume.kubernetes.io/selected-node", "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner", "autoscaling.alpha.kubernetes.io/conditions",
)
"""Annotations that controllers keep on children."""
SECRET_SECONDS = 24 * 3600.0
"""A Secret is never read: it is written again so often, and earlier where pods do not start or do not answer."""


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(obj: Mapping[str, Any], replicas: bool = True) -> str:
    """Of an object without what changes by itself: status, versions, bookkeeping; and its number of pods where that is somebody
    else's."""
    meta = {k: v for k, v in obj["metadata"].items() if k in ("labels", "ownerReferences", "uid", "deletionTimestamp")}
    notes = obj["metadata"].get("annotations") or {}
    meta["annotations"] = {k: v for k, v in notes.items() if k not in _BOOKKEEPING}
    rest = {k: v for k, v in obj.items() if k not in ("metadata", "status")}
    if not replicas:
        rest["spec"] = {k: v for k, v in rest["spec"].items() if k != "replicas"}
    return digest({"metadata": meta, **rest})


def _owns_replicas(deployment: Object) -> bool:
    """Whether letting go of the number of pods would reset it: our own apply set it, and nobody else has since."""
    return any(
        entry.get("manager") == names.FIELD_MANAGER and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in deployment["metadata"].get("managedFields") or ()
    )


def _ours(live: Object, resource: InferenceDeployment) -> bool:
    """A child is known by its owner reference; a claim that outlives its resource by the labels that we gave it."""
    meta, labels = live["metadata"], live["metadata"].get("labels") or {}
    if owned_by(live, resource.metadata.uid):
        return True
    kept = labels.get(names.MANAGED_LABEL) == "true" and labels.get(names.OWNER_LABEL) == resource.metadata.name
    return live.get("kind") == "PersistentVolumeClaim" and kept and not meta.get("ownerReferences")


class NameTaken(Exception):
    """A child's name belongs to an object that is not ours."""


def _check(live: Object, resource: InferenceDeployment) -> None:
    """Raises NameTaken."""
    if not _ours(live, resource):
        named = f"{live['kind']} {live['metadata']['name']}"
        raise NameTaken(f"{named} exists and does not belong to this {names.KIND}; delete or rename it")


Failure = NameTaken | ApiError | Retry


@dataclass(slots=True)
class Applied:
    """Of one child: digests of the manifest that was applied and of the object that came back, and when."""

    wanted: str
    left: str
    at: float


@dataclass(slots=True)
class Children:
    """`kinds`: which of the optional kinds the cluster has."""

    kube: Kube
    writer: Writer
    store: Store
    pace: Pace
    kinds: frozenset[str] = frozenset()
    census: Census = field(init=False)
    _applied: dict[str, dict[Where, Applied]] = field(default_factory=dict)  # by the resource's key

    def __post_init__(self) -> None:
        self.census = Census(self.kube)

    async def make(
        self, resource: InferenceDeployment, defaults: Defaults, observed: Callable[[], Observed]
    ) -> list[tuple[str, Failure]]:
        """Have exactly the children that are wanted. Returns those that are not as they should be, by kind, and why."""
        meta, failures = resource.metadata, list[tuple[str, Failure]]()
        deployment = ("Deployment", meta.namespace, meta.name)
        try:
            seen = observed()
            if seen.deployment is None or takes_over(resource, seen):  # its pods keep what it was made with
                await self._read(resource, deployment)
                seen = observed()
            for pod, cost in marks(resource, seen):
                await self.writer.annotate("Pod", pod, {names.DELETION_COST: cost})
        except ApiError as e:
            return [("Deployment", e)]
        wanted = children(resource, defaults, seen)
        for manifest in wanted:
            kind = manifest["kind"]
            if kind == "Deployment" and any(failed in BEFORE_PODS for failed, _ in failures):
                continue
            try:
                await self._child(resource, manifest)
            except (NameTaken, ApiError, Retry) as e:
                failures.append((kind, e))
        for kind, live in self._unwanted(resource, wanted):
            try:
                await self._delete(resource, kind, live)
            except ApiError as e:
                failures.append((kind, e))
        return failures

    def _unwanted(self, resource: InferenceDeployment, wanted: list[Manifest]) -> list[tuple[str, Object]]:
        """Children that were asked for once and are no more."""
        key = key_of(resource.metadata.namespace, resource.metadata.name)
        keep = {(m["kind"], m["metadata"]["name"]) for m in wanted}
        kinds = [kind for kind in (*CHILD_KINDS, *names.OPTIONAL_KINDS) if kind not in KEPT]
        found = [(kind, live) for kind in kinds for live in self.store.owned(kind, key)]
        uid = resource.metadata.uid
        return [(kind, live) for kind, live in found if owned_by(live, uid) and (kind, live["metadata"]["name"]) not in keep]

    async def _delete(self, resource: InferenceDeployment, kind: str, live: Object) -> None:
        await self.writer.delete(kind, live)
        self.store.drop(kind, live)
        self.pace.wrote(key_of(resource.metadata.namespace, resource.metadata.name))

    async def _find(self, resource: InferenceDeployment, where: Where) -> Object | None:
        """A child as it is: what the watches told, else what the API server says, where somebody else's may have the name and
        no watch tells of it."""
        live = self.store.get(*where)
        if live is None and where[0] not in ALL_OF and not await self.census.free(*where):
            live = await self._read(resource, where)
        return live

    async def _read(self, resource: InferenceDeployment, where: Where) -> Object | None:
        """A child as the API server has it now. What is somebody else's is not kept: no watch would tell that it is gone."""
        live, known = await self.kube.get(*where), self.store.get(*where)
        if live is not None and _ours(live, resource):
            self.store.put(where[0], live)
        elif known is not None:
            self.store.drop(where[0], known)
        return live

    async def _child(self, resource: InferenceDeployment, manifest: Manifest) -> None:
        """Apply one child if it needs it. Raises NameTaken, Retry, ApiError."""
        kind, meta = manifest["kind"], manifest["metadata"]
        where = (kind, meta["namespace"], meta["name"])
        applied = self._applied.setdefault(key_of(resource.metadata.namespace, resource.metadata.name), {})
        wanted, known = digest(manifest), applied.get(where)
        if kind == "Secret":  # never read: its content follows from the resource's uid
            if known is None or known.wanted != wanted:
                await self.writer.apply(manifest, None)
                applied[where] = Applied(wanted, "", time.monotonic())
            return
        live, counted = await self._find(resource, where), kind != "Deployment" or "replicas" in manifest["spec"]
        if live is not None:
            _check(live, resource)
            if known and known.wanted == wanted and known.left == fingerprint(live, counted):
                return
        try:
            if live is not None and not counted and _owns_replicas(live):
                live = await self.writer.hand_over(live)
            left = await self.writer.apply(manifest, live)
        except ApiError as e:
            if e.status == 404 and kind in names.OPTIONAL_KINDS:
                self.kinds -= {kind}  # its definition went a moment ago
                raise Retry(f"the cluster has no {kind} any more") from None
            if e.status == 409 or (e.status == 404 and live is not None):
                # at once, where the watches are not to tell: the status is made of what is there, not of a gap
                if kind not in ALL_OF and (found := await self._read(resource, where)):
                    _check(found, resource)
                raise Retry(f"{kind} {meta['name']} changed meanwhile") from None
            raise
        self.pace.wrote(key_of(resource.metadata.namespace, resource.metadata.name))
        self.store.put(kind, left)
        applied[where] = Applied(wanted, fingerprint(left, counted), time.monotonic())

    # ------------------------------------------------------------------ what was applied

    def forget(self, key: str, kinds: Collection[str] = ()) -> None:
        """Apply anew what belongs to a resource: everything, or these kinds."""
        applied = self._applied.pop(key, {})
        if kinds and (kept := {where: known for where, known in applied.items() if where[0] not in kinds}):
            self._applied[key] = kept

    def lack(self, kind: str) -> None:
        """The cluster has no such kind any more, and of it nothing is left."""
        for applied in self._applied.values():
            for where in [w for w in applied if w[0] == kind]:
                del applied[where]

    def doubt_secrets(self, doubtful: Callable[[str], bool]) -> None:
        """Have Secrets written again, of resources that are `doubtful` and where it is long ago."""
        before = time.monotonic() - SECRET_SECONDS
        for key, applied in list(self._applied.items()):
            if doubtful(key) or any(where[0] == "Secret" and known.at < before for where, known in applied.items()):
                self.forget(key, ("Secret",))
