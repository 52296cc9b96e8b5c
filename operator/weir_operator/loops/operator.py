"""The whole operator in one event loop: lease, watches' queue, reconcile, tuner, health."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weir_operator.api import names
from weir_operator.api.types import InferenceDeployment
from weir_operator.io.apply import Writer
from weir_operator.io.kube import Kube
from weir_operator.io.metrics import KNOWN, WATCH_LAG
from weir_operator.io.scrape import ControlClient, Endpoint, pod_token, url_for
from weir_operator.loops.health import serve
from weir_operator.loops.lease import LeaseLoop
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.reconcile import Reconciler
from weir_operator.loops.resync import Resync, enqueue_all
from weir_operator.loops.rounds import Rounds
from weir_operator.loops.steering import Subject
from weir_operator.loops.store import Store, key_of, owned_by
from weir_operator.loops.tuner import Round, TunerLoop, TunerSettings
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.plan import SpecError, parse
from weir_operator.plan.replicas import decided_replicas, internal
from weir_operator.plan.trouble import is_ready, is_running
from weir_server.contract import CONTROL_PORT

log = logging.getLogger(__name__)
SPREAD = 0.5
"""Of the poll interval: what is left of it is for pods that hang."""
LAG_SECONDS = 60.0
"""A watch that has not told of what a list showed: by then it has stopped."""
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Watch = Callable[[Store, WorkQueue, Resync, asyncio.Event], Awaitable[None]]
Heard = Callable[[Subject, Round], None]


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """`namespaces`: empty = all. `own_namespace`: where the Lease, called `lease_name`, and the key are."""

    server_image: str
    namespaces: tuple[str, ...] = ()
    own_namespace: str = "default"
    lease_name: str = names.LEASE_NAME
    health_port: int = 8082
    tuner: TunerSettings = field(default_factory=TunerSettings)


def own_namespace() -> str:
    return os.environ.get("POD_NAMESPACE") or (_OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.exists() else "default")


class ClusterSink:
    """Reports go to the status by way of a pass; moves become Events."""

    def __init__(
        self, reconciler: Reconciler, queue: WorkQueue, store: Store, rounds: Rounds, listeners: Sequence[Heard],
    ) -> None:
        self._reconciler, self._queue, self._store, self._rounds = reconciler, queue, store, rounds
        self._listeners = (rounds.heard, *listeners)

    def publish(self, subject: Subject, news: TuningReport) -> None:
        self._reconciler.reports[subject.identity] = news
        self._queue.add(subject.key)

    def polled(self, subject: Subject, round_: Round) -> None:
        for heard in self._listeners:
            heard(subject, round_)
        raw = self._store.get(names.KIND, *subject.key.split("/", 1))
        for move in round_.decision.moves:
            if raw is None or move.pod in round_.failed:
                continue
            message = f"{', '.join(f'{k}={v:g}' for k, v in sorted(move.knobs.items()))} ({move.rule})"
            self._reconciler.events.tell(raw, "KnobsMoved", message)
        if raw is not None and (count := round_.count) and count.decision.outcome and count.changed:
            said = f"{count.before} → {count.decision.desired}: {count.decision.reason}"
            self._reconciler.events.tell(raw, count.decision.outcome.value, said)

    def forgotten(self, key: str) -> None:
        self._rounds.forgotten(key)


class Subjects:
    """Every resource that is `ours` and can be read, with the control ports of its own running pods: ready or not, a pod is
    remembered until it is gone. Disabled resources too: they get a fallback. `token`: of a resource's pods, by its uid."""

    def __init__(self, store: Store, token: Callable[[str], str], ours: Callable[[str], bool]) -> None:
        self._store, self._token, self._ours = store, token, ours
        self._parsed: dict[str, tuple[str, InferenceDeployment | None]] = {}

    def __call__(self) -> Iterable[Subject]:
        raws = {key_of(raw["metadata"]["namespace"], raw["metadata"]["name"]): raw for raw in self._store.resources()}
        self._parsed = {where: known for where, known in self._parsed.items() if where in raws}
        for where, raw in raws.items():
            if not self._ours(where) or (resource := self._read(where, raw)) is None:
                continue  # another operator's; or its status says why
            token = self._token(resource.metadata.uid)
            endpoints = tuple(
                Endpoint(pod["metadata"]["name"], url_for(pod["status"]["podIP"], CONTROL_PORT), token, is_ready(pod))
                for pod in self._store.pods(where)
                if is_running(pod) and pod["status"].get("podIP") and _belongs(self._store, pod, resource.metadata.uid, where)
            )
            yield Subject(where, resource, endpoints, resource.status.get("tuning") or {}, self._count(where, resource))

    def _count(self, where: str, resource: InferenceDeployment) -> int | None:
        """How many pods are wanted, where the operator sets that, has said so, and the Deployment is there."""
        deployment = self._store.get("Deployment", *where.split("/", 1))
        uid = resource.metadata.uid
        seen = Observed(deployment=deployment, autoscalers=self._store.autoscalers(where, uid))
        if not internal(resource, seen) or deployment is None or not owned_by(deployment, uid):
            return None
        return decided_replicas(resource)

    def _read(self, where: str, raw: Mapping[str, Any]) -> InferenceDeployment | None:
        """The typed resource, read once for each version: this runs at every poll."""
        version, found = raw["metadata"]["resourceVersion"], self._parsed.get(where)
        if found is None or found[0] != version:
            try:
                found = (version, parse(dict(raw), lenient=True))
            except SpecError:
                found = (version, None)
            self._parsed[where] = found
        return found[1]


def _belongs(store: Store, pod: Mapping[str, Any], uid: str, where: str) -> bool:
    """The token must not be sent to a pod that merely carries our labels: its ReplicaSet must be named for our Deployment."""
    deployment = store.get("Deployment", *where.split("/", 1))
    if deployment is None or not owned_by(deployment, uid):
        return False
    prefix = deployment["metadata"]["name"] + "-"
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(ref.get("kind") == "ReplicaSet" and ref.get("controller") and ref["name"].startswith(prefix) for ref in owners)


def take_over(reconciler: Reconciler, queue: WorkQueue) -> None:
    """At the start of a time as leader."""
    reconciler.begin()
    enqueue_all(reconciler.store, queue)


async def run(
    settings: OperatorSettings, kube: Kube, watch: Watch, stop: asyncio.Event, listeners: Sequence[Heard] = (),
) -> None:
    """Run until `stop` is set; then the Lease is given back. `listeners` hear every round of the tuner. Raises what a part
    raised if it failed."""
    store, rounds = Store(), Rounds()
    WATCH_LAG.set_function(store.lag)
    KNOWN.resources, KNOWN.heard = store.resources, lambda: store.heard
    lease: LeaseLoop
    writer = Writer(kube, lambda: lease.left())
    key = await Writer(kube).control_key(settings.own_namespace)  # who cannot have it says so at once
    reconciler = Reconciler(kube, writer, store, settings.server_image, key, settings.own_namespace, settings.lease_name)
    queue = WorkQueue(reconciler)
    resync = Resync(reconciler, queue, settings.namespaces)

    identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"

    async def read_key() -> None:
        """Anew before each time as leader: it may have been changed since."""
        reconciler.key = await Writer(kube).control_key(settings.own_namespace)

    lease = LeaseLoop(
        kube, writer, settings.own_namespace, settings.lease_name, identity, read_key, lambda: take_over(reconciler, queue),
    )
    beat = time.monotonic()

    async def heartbeat() -> None:
        nonlocal beat
        while True:
            beat = time.monotonic()
            await asyncio.sleep(1)

    def healthy() -> str | None:
        silent = time.monotonic() - beat
        if silent > 15:
            return f"the event loop has stood still for {silent:.0f} s"
        if (lag := store.lag()) > LAG_SECONDS:
            return f"the watches have stopped: what a list showed {lag:.0f} s ago was not told by one"
        return None

    health = await serve(settings.health_port, healthy, lambda: healthy() or resync.wrong, rounds.explained)
    try:
        async with ControlClient() as client:
            sink = ClusterSink(reconciler, queue, store, rounds, listeners)
            subjects = Subjects(store, lambda uid: pod_token(reconciler.key, uid), reconciler.claims.holds)
            tuner = TunerLoop(client, subjects, lease.epoch, sink, replace(settings.tuner, spread=SPREAD))
            writers = [
                resync.then(tuner.run), resync.then(queue.run), resync.run(), resync.then(resync.discover),
                reconciler.events.run(), heartbeat(),
            ]
            groups: list[list[asyncio.Future[Any]]] = [
                [asyncio.ensure_future(part) for part in parts]
                for parts in (writers, [lease.run()], [watch(store, queue, resync, stop)])
            ]
            stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([*groups[0], *groups[1], *groups[2], stopped], return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            for group in groups:  # the Lease is given back once nothing writes any more
                for task in group if group is not groups[2] else ():
                    task.cancel()
                await asyncio.wait(group, timeout=4)
            for task in done:
                if task is not stopped:
                    task.result()  # a part that ended by itself has failed
    finally:
        await health.cleanup()
