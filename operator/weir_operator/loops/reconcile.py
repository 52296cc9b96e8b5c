"""reconcile(key): observe, plan, apply what differs, write the status once if it changed. Level-triggered and idempotent."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir_operator.api import names
from weir_operator.api.conditions import Condition
from weir_operator.api.types import InferenceDeployment
from weir_operator.io.apply import NotLeader, Writer, utc_now
from weir_operator.io.kube import ApiError, Kube, Unreachable
from weir_operator.io.scrape import pod_token
from weir_operator.loops.children import Children, Failure, NameTaken
from weir_operator.loops.claims import Claims, Stand, operator_name
from weir_operator.loops.events import Recorder
from weir_operator.loops.pace import Pace
from weir_operator.loops.queue import Retry
from weir_operator.loops.store import ALL_OF, CHILD_KINDS, Object, Store, key_of, owned_by, unmanaged
from weir_operator.plan.manifests import BESIDE_PODS, Defaults
from weir_operator.plan.news import news
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.plan import SpecError, parse, unread
from weir_operator.plan.status import invalid_status, status

log = logging.getLogger(__name__)
WATCHED = ("Pod", *CHILD_KINDS, names.KIND)
LASTING_SECONDS = 60.0
"""An error that may pass is said as a condition once it has lasted so long."""


@dataclass(slots=True)
class Reconciler:
    """Passes over single resources. `image`: the server's default image; `key`: what pods' tokens are made from;
    `reports`: the tuner's news by key and uid of the resource."""

    kube: Kube
    writer: Writer
    store: Store
    image: str
    key: bytes
    operator_namespace: str = "default"
    lease_name: str = names.LEASE_NAME
    reports: dict[tuple[str, str], TuningReport] = field(default_factory=dict)
    _failing: dict[str, float] = field(default_factory=dict)  # key → since when applying fails
    pace: Pace = field(default_factory=Pace)
    children: Children = field(init=False)
    events: Recorder = field(init=False)
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.children = Children(self.kube, self.writer, self.store, self.pace)
        self.events, self.claims = Recorder(self.writer), Claims(operator_name(self.operator_namespace, self.lease_name))

    async def __call__(self, key: str) -> float:
        """One pass; returns for how many seconds the resource shall rest. The status is written whatever came of it. Raises
        Retry where it has to be tried again."""
        raw = self.store.get(names.KIND, *key.split("/", 1))
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            self._forget(key)
            self.claims.forget(key)
            return 0.0
        if not self.writer.may_write():
            return 0.0  # whoever takes over passes over everything
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
        holder = _holder(raw)
        stand = self.claims.look(key, holder)
        if stand is Stand.ASK:
            await self._write_status(raw, raw["status"])
        if stand in (Stand.ASK, Stand.WAIT):
            raise Retry("it was another operator's, which is asked whether it is there")
        if stand is Stand.LEAVE:
            self._forget(key)
        elif raw.get("status") and holder != self.claims.name:  # another may have written the Secret, which alone is never read
            self.children.forget(key, ("Secret",))
        return stand is Stand.OURS

    async def _pass(self, key: str, raw: Object) -> None:
        try:
            resource = parse(_relevant(raw), lenient=True)
        except SpecError as e:
            wrong = Condition("Ready", False, "SpecInvalid", str(e))
            await self._write_status(raw, invalid_status(raw, wrong, self._observed(unread(raw))))
            return
        if not raw.get("status"):  # in our name before anything is made: of two operators, one begins
            await self._write_status(raw, status(resource, self._observed(resource)))
            named = self.store.get(names.KIND, raw["metadata"]["namespace"], raw["metadata"]["name"])
            if named is None or not named.get("status"):
                return  # it is gone, or another has its name
            raw, resource = named, parse(_relevant(named), lenient=True)
        defaults = Defaults(self.image, pod_token(self.key, resource.metadata.uid), self.operator_namespace)
        failures = await self.children.make(resource, defaults, lambda: self._observed(resource))
        await self._write_status(raw, status(resource, self._observed(resource, *self._said(key, failures), not failures)))
        if failures:
            raise Retry(str(failures[0][1]))

    def _said(self, key: str, failures: Sequence[tuple[str, Failure]]) -> tuple[Condition | None, str]:
        """What the status says of children that are not as they should be: of what pods need, and of what stands beside."""
        if not any(isinstance(e, ApiError) for _, e in failures):
            self._failing.pop(key, None)
        trouble, refused = None, ""
        for kind, e in failures:
            if isinstance(e, Retry):
                continue
            if isinstance(e, ApiError) and e.passing:
                since = self._failing.setdefault(key, time.monotonic())
                if time.monotonic() - since < LASTING_SECONDS:
                    continue
            reason, words = ("NameTaken", str(e)) if isinstance(e, NameTaken) else ("ApplyRefused", e.message[:1000])
            if kind in BESIDE_PODS:
                refused = refused or f"{kind}: {words}"
            else:
                trouble = trouble or Condition("Ready", False, reason, words)
        return trouble, refused

    def _observed(
        self, resource: InferenceDeployment, trouble: Condition | None = None, refused: str = "", applied: bool = True
    ) -> Observed:
        meta = resource.metadata
        key = key_of(meta.namespace, meta.name)
        deployment = self.store.get("Deployment", meta.namespace, meta.name)
        if deployment is not None and not owned_by(deployment, meta.uid):
            deployment = None
        report = self.reports.get((key, meta.uid))
        return Observed(
            utc_now(), deployment, self.store.pods(key), trouble, refused, applied, report, self.children.kinds,
            autoscalers=self.store.autoscalers(key, meta.uid), other_operator=self.claims.rival(key),
        )

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
            if e.status == 404:
                await self._gone(key, raw)  # whatever the watches have told
                return
            if e.status == 409:
                fresh = await self.kube.get(names.KIND, raw["metadata"]["namespace"], raw["metadata"]["name"])
                if fresh:
                    self.store.put(names.KIND, fresh)
            raise Retry(f"status not written: {e}") from None

    async def _gone(self, key: str, raw: Object) -> None:
        """Of a resource that has no status to be written. Raises Retry where it is there all the same."""
        where = (names.KIND, *key.split("/", 1))
        if await self.kube.get(*where) is not None:
            raise Retry(f"the CRD {names.CRD_NAME} has no status: install the definition of this version")
        if self.store.get(*where) is raw:
            self.store.drop(names.KIND, raw)
            self._forget(key)
            self.claims.forget(key)

    def _forget(self, key: str) -> None:
        self._failing.pop(key, None)
        self.pace.forget(key)
        self.children.forget(key)
        for known in [k for k in self.reports if k[0] == key]:
            del self.reports[known]

    def begin(self) -> None:
        """At the start of a time as leader. What an earlier one saw is old: another has written since."""
        self.reports.clear()
        self._failing.clear()
        self.claims.forget_all()

    async def discover(self) -> bool:
        """Look which of the optional kinds the cluster has. True where that changed."""
        found = frozenset([kind for kind in names.OPTIONAL_KINDS if await self.kube.has(kind)])
        changed, self.children.kinds = self.children.kinds ^ found, found
        for kind in changed:  # of a kind that went, nothing is left
            self.store.replace(kind, (), self.store.known(kind), watched=False)
            self.children.lack(kind)
        return bool(changed)

    async def refresh(self, namespaces: tuple[str, ...], gap: bool = False) -> frozenset[str]:
        """List everything anew: what no watch has told comes to light here. `gap`: because watches began anew, and what went
        before that they will not tell. Returns the namespaces that the operator has no right to (any more): what was known of
        them is forgotten, and the others go on. Raises ApiError where nothing can be listed."""
        await self.discover()
        lost = set[str]()
        for kind in (*WATCHED, *sorted(self.children.kinds)):
            before = self.store.known(kind)
            try:
                listed = await self._listed(kind, namespaces, lost)
            except ApiError as e:
                if kind in WATCHED or e.status not in (403, 404):
                    raise
                log.warning("%s is not listed: %s", kind, e)  # it went a moment ago, or the operator has no right to it
                continue
            self.store.replace(kind, listed, before, kind in WATCHED, gap)
        self.children.doubt_secrets(self._doubtful)
        return frozenset(lost)

    async def _listed(self, kind: str, namespaces: tuple[str, ...], lost: set[str]) -> list[Object]:
        """The objects of one kind. A namespace that does not let itself be listed joins the `lost`, unless it is the last."""
        selector = None if kind in ALL_OF else names.MANAGED_SELECTOR
        found: list[Object] = []
        for namespace in namespaces or (None,):
            if namespace in lost:
                continue
            try:
                found += await self.kube.list(kind, namespace, selector, unmanaged)
            except ApiError as e:
                if e.status != 403 or namespace is None or kind not in WATCHED or len(lost) + 1 == len(namespaces):
                    raise
                lost.add(namespace)
        return found

    def _doubtful(self, key: str) -> bool:
        """Whether pods lack their Secret, for all that can be seen: some do not start, or do not answer."""
        starting = any((pod.get("status") or {}).get("phase") == "Pending" for pod in self.store.pods(key))
        return starting or any(report.silent for known, report in self.reports.items() if known[0] == key)


def _grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> int | None:
    """The batch limit that pods are going to be restarted with, where that was just decided."""
    old, new = (((status.get("tuning") or {}).get("envelope") or {}).get("maxBatchSize") for status in (before, after))
    return new if new != old else None


def _holder(raw: Object) -> str:
    """The operator that a resource's status names."""
    return str((raw.get("status") or {}).get("operator") or "")


def _relevant(raw: Object) -> dict[str, Any]:
    return {k: raw[k] for k in ("apiVersion", "kind", "metadata", "spec", "status") if raw.get(k) is not None}
