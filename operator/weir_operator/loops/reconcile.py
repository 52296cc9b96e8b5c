"""reconcile(key): observe, plan, apply what differs, write the status once if it changed. Level-triggered and idempotent.

A child is applied when what should be there, or what is there, is not what the last apply left: so an edit is repaired, a
mutating webhook is not fought, and a second pass writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from weir_operator.api import names
from weir_operator.api.conditions import Condition
from weir_operator.api.types import InferenceDeployment
from weir_operator.io.apply import NotLeader, Writer, utc_now
from weir_operator.io.kube import ApiError, Kube, Unreachable
from weir_operator.io.scrape import pod_token
from weir_operator.loops.claims import Claims, Stand, operator_name
from weir_operator.loops.events import Recorder
from weir_operator.loops.pace import Pace
from weir_operator.loops.queue import Retry
from weir_operator.loops.store import ALL_OF, CHILD_KINDS, Object, Store, key_of, owned_by
from weir_operator.plan.manifests import KEPT, Defaults, Manifest, children
from weir_operator.plan.news import news
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.plan import SpecError, parse
from weir_operator.plan.replicas import marks, takes_over
from weir_operator.plan.status import invalid_status, status

log = logging.getLogger(__name__)
Where = tuple[str, str, str]
"""Kind, namespace, name."""
WATCHED = ("Pod", *CHILD_KINDS, names.KIND)
_BOOKKEEPING = (
    "deployment.kubernetes.io/revision", "pv.kubernetes.io/bind-completed", "pv.kubernetes.io/bound-by-controller",
    "volume.kubernetes.io/selected-node", "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner", "autoscaling.alpha.kubernetes.io/conditions",
)
"""Annotations that controllers keep on children."""
LASTING_SECONDS = 60.0
"""An error that may pass is said as a condition once it has lasted so long."""


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


class NameTaken(Exception):
    """A child's name belongs to an object that is not ours."""


@dataclass(slots=True)
class Applied:
    """Of one child: digests of the manifest that was applied and of the object that came back."""

    wanted: str
    left: str


@dataclass(slots=True)
class Reconciler:
    """Passes over single resources. `image`: the server's default image; `key`: what pods' tokens are made from;
    `reports`: the tuner's news by key and uid of the resource; `kinds`: which of the optional kinds the cluster has."""

    kube: Kube
    writer: Writer
    store: Store
    image: str
    key: bytes
    operator_namespace: str = "default"
    lease_name: str = names.LEASE_NAME
    reports: dict[tuple[str, str], TuningReport] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    _applied: dict[Where, Applied] = field(default_factory=dict)
    _failing: dict[str, float] = field(default_factory=dict)  # key → since when applying fails
    pace: Pace = field(default_factory=Pace)
    events: Recorder = field(init=False)
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.events, self.claims = Recorder(self.writer), Claims(operator_name(self.operator_namespace, self.lease_name))

    async def __call__(self, key: str) -> float:
        """One pass; returns for how many seconds the resource shall rest. The status is written whatever came of it. Raises
        Retry where it has to be tried again."""
        if not self.writer.may_write():
            return 0.0  # whoever takes over passes over everything
        namespace, name = key.split("/", 1)
        raw = self.store.get(names.KIND, namespace, name)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            self._forget(namespace, name)
            self.claims.forget(key)
            return 0.0
        try:
            if await self._claimed(key, raw):
                await self._pass(key, raw)
        except NotLeader:
            pass
        except Unreachable as e:
            raise Retry(str(e)) from None
        return self.pace.rest(key)

    async def _claimed(self, key: str, raw: Object) -> bool:
        """Whether it is ours, and no other operator's. Raises Retry while that one is being asked."""
        holder, meta = _holder(raw), raw["metadata"]
        stand = self.claims.look(key, holder)
        if stand is Stand.ASK:
            await self._write_status(raw, raw["status"])
        if stand in (Stand.ASK, Stand.WAIT):
            raise Retry("it was another operator's, which is asked whether it is there")
        if stand is Stand.LEAVE:
            self._forget(meta["namespace"], meta["name"])
        elif raw.get("status") and holder != self.claims.name:  # another may have written the Secret, which alone is never read
            self._unapplied(meta["namespace"], meta["name"], ("Secret",))
        return stand is Stand.OURS

    async def _pass(self, key: str, raw: Object) -> None:
        try:
            resource = parse(_relevant(raw), lenient=True)
        except SpecError as e:
            await self._write_status(raw, invalid_status(raw, Condition("Ready", False, "SpecInvalid", str(e)), utc_now()))
            return
        if not raw.get("status"):  # in our name before anything is made: of two operators, one begins
            await self._write_status(raw, status(resource, self._observed(resource)))
            named = self.store.get(names.KIND, raw["metadata"]["namespace"], raw["metadata"]["name"])
            if named is None or not named.get("status"):
                return  # it is gone, or another has its name
            raw, resource = named, parse(_relevant(named), lenient=True)
        defaults = Defaults(self.image, pod_token(self.key, resource.metadata.uid), self.operator_namespace)
        trouble, again = None, None
        try:
            await self._make(resource, defaults)
            self._failing.pop(key, None)
        except NameTaken as e:
            trouble, again = Condition("Ready", False, "NameTaken", str(e)), str(e)
        except Retry as e:
            again = str(e)
        except ApiError as e:
            again = str(e)
            since = self._failing.setdefault(key, time.monotonic())
            if not e.passing or time.monotonic() - since >= LASTING_SECONDS:
                trouble = Condition("Ready", False, "ApplyRefused", e.message[:1000])
        await self._write_status(raw, status(resource, self._observed(resource, trouble, again is None)))
        if again:
            raise Retry(again)

    def _observed(self, resource: InferenceDeployment, trouble: Condition | None = None, applied: bool = True) -> Observed:
        meta = resource.metadata
        key = key_of(meta.namespace, meta.name)
        deployment = self.store.get("Deployment", meta.namespace, meta.name)
        if deployment is not None and not owned_by(deployment, meta.uid):
            deployment = None
        report = self.reports.get((key, meta.uid))
        return Observed(
            utc_now(), deployment, self.store.pods(key), trouble, applied, report, self.kinds,
            autoscalers=self.store.autoscalers(key, meta.uid), other_operator=self.claims.rival(key),
        )

    # ------------------------------------------------------------------ children

    async def _make(self, resource: InferenceDeployment, defaults: Defaults) -> None:
        """Have exactly the children that are wanted. Raises NameTaken, Retry, ApiError."""
        meta, absent = resource.metadata, set[Where]()
        deployment = ("Deployment", meta.namespace, meta.name)
        await self._find(resource, deployment, absent)  # its pods keep what it was made with
        seen = self._observed(resource)
        if takes_over(resource, seen):
            await self._read(resource, deployment)
            seen = self._observed(resource)
        for pod, cost in marks(resource, seen):
            await self.writer.annotate("Pod", pod, {names.DELETION_COST: cost})
        wanted = children(resource, defaults, seen)
        for manifest in wanted:
            await self._child(resource, manifest, absent)
        keep = {(m["kind"], m["metadata"]["name"]) for m in wanted}
        for kind in (*CHILD_KINDS, *names.OPTIONAL_KINDS):
            for live in self.store.owned(kind, key_of(meta.namespace, meta.name)):
                if kind not in KEPT and (kind, live["metadata"]["name"]) not in keep and owned_by(live, meta.uid):
                    await self.writer.delete(kind, live)
                    self.store.drop(kind, live)
                    self.pace.wrote(key_of(meta.namespace, meta.name))

    async def _find(self, resource: InferenceDeployment, where: Where, absent: set[Where]) -> Object | None:
        """A child as it is: what the watches told, else what the API server says. `absent` spares asking twice in a pass.
        What is somebody else's is not kept: no watch would tell that it is gone."""
        live = self.store.get(*where)
        if live is None and where not in absent:
            live = await self._read(resource, where)
            if live is None:
                absent.add(where)
        return live

    async def _read(self, resource: InferenceDeployment, where: Where) -> Object | None:
        """A child as the API server has it now."""
        live, known = await self.kube.get(*where), self.store.get(*where)
        if live is not None and _ours(live, resource):
            self.store.put(where[0], live)
        elif known is not None:
            self.store.drop(where[0], known)
        return live

    async def _child(self, resource: InferenceDeployment, manifest: Manifest, absent: set[Where]) -> None:
        """Apply one child if it needs it. Raises NameTaken, Retry, ApiError."""
        kind, meta = manifest["kind"], manifest["metadata"]
        where = (kind, meta["namespace"], meta["name"])
        wanted, known = digest(manifest), self._applied.get(where)
        if kind == "Secret":  # never read: its content follows from the resource's uid
            if known is None or known.wanted != wanted:
                await self.writer.apply(manifest, None)
                self._applied[where] = Applied(wanted, "")
            return
        live, counted = await self._find(resource, where, absent), kind != "Deployment" or "replicas" in manifest["spec"]
        if live is not None:
            if not _ours(live, resource):
                raise NameTaken(f"{kind} {meta['name']} exists and does not belong to this {names.KIND}; delete or rename it")
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
            if e.status in (404, 409) and live is not None:
                await self._read(resource, where)  # at once: the status is made of what is there, not of a gap
                raise Retry(f"{kind} {meta['name']} changed meanwhile") from None
            raise
        self.pace.wrote(key_of(resource.metadata.namespace, resource.metadata.name))
        self.store.put(kind, left)
        self._applied[where] = Applied(wanted, fingerprint(left, counted))

    # ------------------------------------------------------------------ status

    async def _write_status(self, raw: Object, status: Mapping[str, Any]) -> None:
        """In our name, if it changed. Raises Retry."""
        status = {**status, "operator": self.claims.name}
        if (raw.get("status") or {}) == status:
            return
        key = key_of(raw["metadata"]["namespace"], raw["metadata"]["name"])
        try:
            self.store.put(names.KIND, await self.writer.patch_status(raw, status))
            self.claims.wrote(key, _holder(raw))
            self.pace.wrote(key)
            if rows := _grown(raw.get("status") or {}, status):
                self.events.tell(raw, "EnvelopeGrown", f"pods are restarted one by one with a batch of at most {rows} rows")
            for item in news((raw.get("status") or {}).get("conditions", ()), status.get("conditions", ())):
                self.events.tell(raw, item.reason, item.message, item.warning)
        except ApiError as e:
            if e.status == 404:  # it is gone, whatever the watches have told
                namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
                if self.store.get(names.KIND, namespace, name) is raw:
                    self.store.drop(names.KIND, raw)
                    self._forget(namespace, name)
                    self.claims.forget(key)
                return
            if e.status == 409:
                fresh = await self.kube.get(names.KIND, raw["metadata"]["namespace"], raw["metadata"]["name"])
                if fresh:
                    self.store.put(names.KIND, fresh)
            raise Retry(f"status not written: {e}") from None

    def _forget(self, namespace: str, name: str) -> None:
        key = key_of(namespace, name)
        self._failing.pop(key, None)
        self.pace.forget(key)
        for known in [k for k in self.reports if k[0] == key]:
            del self.reports[known]
        self._unapplied(namespace, name)

    def _unapplied(self, namespace: str, name: str, kinds: Collection[str] = ()) -> None:
        """Forget what was applied of a resource: everything, or these kinds."""
        for where in [w for w in self._applied if w[1] == namespace and _stem(w) == name and (not kinds or w[0] in kinds)]:
            del self._applied[where]

    async def discover(self) -> bool:
        """Look which of the optional kinds the cluster has. True where that changed."""
        found = frozenset([kind for kind in names.OPTIONAL_KINDS if await self.kube.has(kind)])
        changed, self.kinds = self.kinds ^ found, found
        for kind in changed:  # of a kind that went, nothing is left
            self.store.replace(kind, (), self.store.known(kind), watched=False)
            for where in [w for w in self._applied if w[0] == kind]:
                del self._applied[where]
        return bool(changed)

    async def refresh(self, namespaces: tuple[str, ...], gap: bool = False) -> None:
        """List everything anew, and write the token Secrets once more: what no watch has told comes to light here. `gap`:
        because watches began anew, and what went before that they will not tell."""
        await self.discover()
        for kind in (*WATCHED, *sorted(self.kinds)):
            selector = None if kind in ALL_OF else names.MANAGED_SELECTOR
            before = self.store.known(kind)
            try:
                listed = [o for ns in namespaces or (None,) for o in await self.kube.list(kind, ns, selector)]
            except ApiError as e:
                if kind in WATCHED or e.status not in (403, 404):
                    raise
                log.warning("%s is not listed: %s", kind, e)  # it went a moment ago, or the operator has no right to it
                continue
            self.store.replace(kind, listed, before, kind in WATCHED, gap)
        for where in [w for w in self._applied if w[0] == "Secret"]:
            del self._applied[where]


def _grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> int | None:
    """The batch limit that pods are going to be restarted with, where that was just decided."""
    old, new = (((status.get("tuning") or {}).get("envelope") or {}).get("maxBatchSize") for status in (before, after))
    return new if new != old else None


def _holder(raw: Object) -> str:
    """The operator that a resource's status names."""
    return str((raw.get("status") or {}).get("operator") or "")


def _ours(live: Object, resource: InferenceDeployment) -> bool:
    """A child is known by its owner reference; a claim that outlives its resource by the labels that we gave it."""
    meta, labels = live["metadata"], live["metadata"].get("labels") or {}
    if owned_by(live, resource.metadata.uid):
        return True
    kept = labels.get(names.MANAGED_LABEL) == "true" and labels.get(names.OWNER_LABEL) == resource.metadata.name
    return live.get("kind") == "PersistentVolumeClaim" and kept and not meta.get("ownerReferences")


_SUFFIX = {"ConfigMap": "-boot", "PersistentVolumeClaim": "-models", "Service": "-pods"}


def _stem(where: Where) -> str:
    kind, _, name = where
    return name.rsplit("-control-", 1)[0] if kind == "Secret" else name.removesuffix(_SUFFIX.get(kind, ""))


def _relevant(raw: Object) -> dict[str, Any]:
    return {k: raw[k] for k in ("apiVersion", "kind", "metadata", "spec", "status") if raw.get(k) is not None}
