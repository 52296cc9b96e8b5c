"""reconcile(key): observe, plan, apply what differs, write the status once if it changed. Level-triggered and idempotent.

A child is applied when what should be there, or what is there, is not what the last apply left: so an edit is repaired, a
mutating webhook is not fought, and a second pass writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weir_operator.api import names
from weir_operator.api.conditions import Condition
from weir_operator.api.types import InferenceDeployment
from weir_operator.io.apply import NotLeader, Writer, utc_now
from weir_operator.io.kube import ApiError, Kube, Unreachable
from weir_operator.io.scrape import pod_token
from weir_operator.loops.events import Recorder
from weir_operator.loops.queue import Retry
from weir_operator.loops.store import CHILD_KINDS, Object, Store, key_of, owned_by
from weir_operator.plan.manifests import Defaults, Manifest, children
from weir_operator.plan.news import news
from weir_operator.plan.plan import SpecError, parse
from weir_operator.plan.status import Observed, TuningReport, invalid_status, status

log = logging.getLogger(__name__)
WATCHED = ("Pod", *CHILD_KINDS, names.KIND)
LASTING_SECONDS = 60.0
"""An error that may pass is said as a condition once it has lasted so long."""


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(obj: Mapping[str, Any]) -> str:
    """Of an object without what changes by itself: status, versions, bookkeeping."""
    meta = {k: v for k, v in obj["metadata"].items() if k in ("labels", "ownerReferences", "uid", "deletionTimestamp")}
    notes = obj["metadata"].get("annotations") or {}
    meta["annotations"] = {k: v for k, v in notes.items() if k != "deployment.kubernetes.io/revision"}
    return digest({"metadata": meta, **{k: v for k, v in obj.items() if k not in ("metadata", "status")}})


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
    `reports`: the tuner's news by key and uid of the resource."""

    kube: Kube
    writer: Writer
    store: Store
    image: str
    key: bytes
    reports: dict[tuple[str, str], TuningReport] = field(default_factory=dict)
    _applied: dict[tuple[str, str, str], Applied] = field(default_factory=dict)
    _failing: dict[str, float] = field(default_factory=dict)  # key → since when applying fails
    events: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.events = Recorder(self.writer)

    async def __call__(self, key: str) -> None:
        """One pass. The status is written whatever came of it. Raises Retry where it has to be tried again."""
        if not self.writer.may_write():
            return  # whoever takes over passes over everything
        namespace, name = key.split("/", 1)
        raw = self.store.get(names.KIND, namespace, name)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            self._forget(namespace, name)
            return
        try:
            await self._pass(key, raw)
        except NotLeader:
            return
        except Unreachable as e:
            raise Retry(str(e)) from None

    async def _pass(self, key: str, raw: Object) -> None:
        try:
            resource = parse(_relevant(raw))
        except SpecError as e:
            await self._write_status(raw, invalid_status(raw, Condition("Ready", False, "SpecInvalid", str(e)), utc_now()))
            return
        defaults = Defaults(self.image, pod_token(self.key, resource.metadata.uid))
        trouble, again = None, None
        try:
            for manifest in children(resource, defaults):
                await self._child(resource, manifest)
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

    def _observed(self, resource: InferenceDeployment, trouble: Condition | None, applied: bool) -> Observed:
        meta = resource.metadata
        key = key_of(meta.namespace, meta.name)
        deployment = self.store.get("Deployment", meta.namespace, meta.name)
        if deployment is not None and not owned_by(deployment, meta.uid):
            deployment = None
        return Observed(utc_now(), deployment, self.store.pods(key), trouble, applied, self.reports.get((key, meta.uid)))

    async def _child(self, resource: InferenceDeployment, manifest: Manifest) -> None:
        """Apply one child if it needs it. Raises NameTaken, ApiError."""
        kind, meta = manifest["kind"], manifest["metadata"]
        where = (kind, meta["namespace"], meta["name"])
        wanted, known = digest(manifest), self._applied.get(where)
        if kind == "Secret":  # never read: its content follows from the resource's uid
            if known is None or known.wanted != wanted:
                await self.writer.apply(manifest, None)
                self._applied[where] = Applied(wanted, "")
            return
        live = self.store.get(*where) or await self.kube.get(*where)
        if live is not None:
            if not owned_by(live, resource.metadata.uid):
                raise NameTaken(f"{kind} {meta['name']} exists and does not belong to this {names.KIND}; delete or rename it")
            self.store.put(kind, live)
            if known and known.wanted == wanted and known.left == fingerprint(live):
                return
        try:
            left = await self.writer.apply(manifest, live)
        except ApiError as e:
            if e.status in (404, 409) and live is not None:  # what was seen is not what is there: look again next time
                self.store.drop(kind, live)
                raise Retry(f"{kind} {meta['name']} changed meanwhile") from None
            raise
        self.store.put(kind, left)
        self._applied[where] = Applied(wanted, fingerprint(left))

    async def _write_status(self, raw: Object, status: Mapping[str, Any]) -> None:
        if (raw.get("status") or {}) == status:
            return
        try:
            self.store.put(names.KIND, await self.writer.patch_status(raw, status))
            for item in news((raw.get("status") or {}).get("conditions", ()), status["conditions"]):
                self.events.tell(raw, item.reason, item.message, item.warning)
        except ApiError as e:
            if e.status == 404:
                return
            if e.status == 409:
                fresh = await self.kube.get(names.KIND, raw["metadata"]["namespace"], raw["metadata"]["name"])
                if fresh:
                    self.store.put(names.KIND, fresh)
            raise Retry(f"status not written: {e}") from None

    def _forget(self, namespace: str, name: str) -> None:
        key = key_of(namespace, name)
        self._failing.pop(key, None)
        for known in [k for k in self.reports if k[0] == key]:
            del self.reports[known]
        for where in [w for w in self._applied if w[1] == namespace and _stem(w) == name]:
            del self._applied[where]

    async def refresh(self, namespaces: tuple[str, ...]) -> None:
        """List everything anew, and write the token Secrets once more: what no watch has told comes to light here."""
        for kind in WATCHED:
            selector = None if kind == names.KIND else names.MANAGED_SELECTOR
            before = self.store.known(kind)
            listed = [o for ns in namespaces or (None,) for o in await self.kube.list(kind, ns, selector)]
            self.store.replace(kind, listed, before)
        for where in [w for w in self._applied if w[0] == "Secret"]:
            del self._applied[where]


def _stem(where: tuple[str, str, str]) -> str:
    kind, _, name = where
    return name.rsplit("-control-", 1)[0] if kind == "Secret" else name.removesuffix("-boot") if kind == "ConfigMap" else name


def _relevant(raw: Object) -> dict[str, Any]:
    return {k: raw[k] for k in ("apiVersion", "kind", "metadata", "spec", "status") if raw.get(k) is not None}
