"""autoscaling.mode Internal on a real API server: offered work doubles, pods come and go, and no hand-over dips.

There is no node: the controllers make pods, the test says that they run, and fake control ports at their addresses tell of a
load that is spread over them, by the affine plant that the law's own tests use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from control_plane_kit import (
    Cluster,
    Operator,
    child,
    condition,
    decoded,
    make_ready,
    replicas,
    resource,
    wait,
    watching_replicas,
)
from fake_server import FakeServer
from law_kit import FlowPod
from test_recipes import blocks

from weir_operator.api import names
from weir_operator.io.apply import Writer
from weir_operator.io.kube import Kube
from weir_operator.loops.operator import Subjects
from weir_operator.loops.queue import Retry
from weir_operator.loops.reconcile import Reconciler
from weir_operator.loops.store import Store
from weir_operator.plan.observed import TuningReport
from weir_operator.tuner.replicas import Scaling
from weir_server.contract import CONTROL_PORT, Window

LABEL = "weir.dev/name=chat"


def patch(cluster: Cluster, namespace: str, spec: Any) -> None:
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))


def desired(cluster: Cluster, namespace: str) -> int:
    return int(cluster.get("infd", "chat", namespace)["status"]["desiredReplicas"])


class Flowing(FakeServer):
    """A control port behind which rows flow in real time. `saved`: prompt tokens a second that its prefix cache saves."""

    def __init__(self, host: str, token: str, saved: float) -> None:
        self.flow, self.began, self.saved = FlowPod(prompt=32, output=16, offered=0.0), time.monotonic(), saved
        super().__init__(host, CONTROL_PORT, token)

    def window(self) -> Window:
        board, passed = self.board, time.monotonic() - self.began - self.flow.now
        self.flow.advance(max(passed, 1e-3))
        return replace(
            self.flow.window(), instance=board.instance, target=board.target, effective=board.target, envelope=board.envelope,
            cached_tokens=int(self.saved * self.flow.now),
        )


class Fleet:
    """What kubelets would do with the pods of `chat`, and a load that is spread over those that serve. A younger pod's cache
    saves more, against the order in which a ReplicaSet would end them."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace, self.load = cluster, namespace, 0.0
        self.servers: dict[str, Flowing] = {}
        self._token = ""
        self._made = 0

    async def keep(self) -> None:
        while True:
            present = set(await asyncio.to_thread(pods, self.cluster, self.namespace))
            for gone in set(self.servers) - present:
                await self.servers.pop(gone).__aexit__()
            for name in sorted(present - set(self.servers)):
                await self._start(name)
            for server in self.servers.values():
                server.flow.offered = self.load / len(self.servers)
            await asyncio.sleep(0.3)

    async def _start(self, name: str) -> None:
        if not self._token:
            secret = await asyncio.to_thread(child, self.cluster, self.namespace, "secret")
            self._token = decoded(secret or {}, "token")
        self._made += 1
        address = f"127.{random.randint(1, 250)}.{random.randint(0, 250)}.{random.randint(2, 250)}"
        self.servers[name] = await Flowing(address, self._token, 10.0 * self._made).__aenter__()
        status = {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady", "PodScheduled")],
        }
        await asyncio.to_thread(
            self.cluster.kubectl, "patch", "pod", name, "-n", self.namespace, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": status}),
        )


@pytest.fixture
async def fleet(cluster: Cluster, namespace: str) -> AsyncIterator[Fleet]:
    made = Fleet(cluster, namespace)
    keeping = asyncio.create_task(made.keep())
    yield made
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    for server in made.servers.values():
        await server.__aexit__()


OWN = {"mode": "Internal", "minReplicas": 1, "maxReplicas": 6, "scaleDownStabilization": "1h"}
TIMES = ("--tick-seconds=1", "--poll-seconds=0.5", "--replica-tick-seconds=4")


async def test_offered_work_doubles_and_falls_and_no_hand_over_dips(
    cluster: Cluster, namespace: str, fleet: Fleet,
) -> None:
    """One such pod does about 3.6 rows a second within the objectives."""
    operator = Operator(cluster, namespace).start(*TIMES)
    run: Callable[..., Awaitable[Any]] = asyncio.to_thread

    async def seen_to(what: Callable[[], Any], why: str) -> Any:
        return await run(wait, what, 60, why)

    await run(cluster.apply, resource(replicas=2, tuning={"mode": "Disabled"}), namespace)
    fleet.load = 4.2
    await seen_to(lambda: len(fleet.servers) == 2, "two pods serve")
    with watching_replicas(cluster, namespace) as seen:
        await run(patch, cluster, namespace, {"autoscaling": OWN, "replicas": 1})
        await seen_to(lambda: condition(cluster, namespace, "AutoscalerOwned").get("reason") == "ByOperator", "it takes over")
        assert desired(cluster, namespace) == 2

        fleet.load = 8.4
        await seen_to(lambda: replicas(cluster, namespace) >= 3, "more pods")
        await seen_to(lambda: len(fleet.servers) == replicas(cluster, namespace), "they serve")
        many = replicas(cluster, namespace)
        await seen_to(lambda: '"ScaledOut"' in cluster.kubectl("get", "events", "-n", namespace, "-o", "json").stdout, "told")
        history = cluster.get("infd", "chat", namespace)["status"]["tuning"]["history"]
        assert any(h["outcome"] == "ScaledOut" for h in history), history

        assert operator.stop() == 0
        operator = Operator(cluster, namespace, "next").start(*TIMES)
        await seen_to(lambda: operator.metric("weir_operator_leader") == 1, "another process leads")
        await seen_to(lambda: operator.metric("weir_tuner_replicas") >= many, "and goes on with the number")

        await run(patch, cluster, namespace, {"autoscaling": {"mode": "External"}})
        await seen_to(lambda: condition(cluster, namespace, "AutoscalerOwned").get("reason") == "OnDeployment", "handed over")
        await run(cluster.kubectl, "scale", "deployment/chat", "--replicas=5", "-n", namespace)
        await seen_to(lambda: len(fleet.servers) == 5, "somebody else's number")
        await run(patch, cluster, namespace, {"autoscaling": {"mode": "Internal"}})
        await seen_to(lambda: condition(cluster, namespace, "AutoscalerOwned").get("reason") == "ByOperator", "and back")
        assert desired(cluster, namespace) == 5
        lowest = min(seen)

        keep = max(fleet.servers, key=lambda name: fleet.servers[name].saved)
        fleet.load = 1.0
        await run(patch, cluster, namespace, {"autoscaling": {"scaleDownStabilization": "6s"}})
        await seen_to(lambda: replicas(cluster, namespace) == 1, "one carries it")
        await seen_to(lambda: list(fleet.servers) == [keep], "the one whose cache saves most stays")

        await run(patch, cluster, namespace, {"autoscaling": {"mode": "Disabled"}, "replicas": 3})
        await seen_to(lambda: replicas(cluster, namespace) == 3, "the spec's number again")
    assert lowest == 2 and min(seen) == 1 and many >= 3, seen
    assert seen.index(5) < seen.index(1), seen
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


async def test_the_status_comes_first_and_another_process_ends_what_one_began(
    cluster: Cluster, namespace: str, kube_config: None,
) -> None:
    """Each write of a scale-in may be the last one of its process. A pass after it writes nothing."""
    await asyncio.to_thread(cluster.apply, resource(replicas=3, autoscaling=OWN), namespace)
    key = f"{namespace}/chat"

    def news(number: int, generation: int, *leaving: str) -> TuningReport:
        shown = {"replicas": {"outcome": "ScaledIn", "leaving": list(leaving)}} if leaving else {}
        return TuningReport(shown, 0, 0, desired=number, scaling=Scaling.IN, generation=generation)

    async with await Kube.connect() as kube:
        async def process(report: TuningReport | None = None) -> Reconciler:
            """A fresh one, after its first pass."""
            made = Reconciler(kube, Writer(kube), Store(), "registry/weir-server:test", b"key")
            await made.refresh((namespace,))
            [raw] = made.store.resources()
            if report:
                made.reports[key, raw["metadata"]["uid"]] = replace(report, generation=raw["metadata"]["generation"])
            await made(key)
            return made

        await process()
        listed = await asyncio.to_thread(wait, lambda: len(pods(cluster, namespace)) == 3 and pods(cluster, namespace), 30)
        leaving = sorted(listed)[:2]
        await process(news(1, 1, *leaving))  # and it dies
        assert desired(cluster, namespace) == 1 and replicas(cluster, namespace) == 3
        assert not any(names.DELETION_COST in notes for notes in pods(cluster, namespace).values())
        last = await process()
        assert replicas(cluster, namespace) == 1
        [left] = await asyncio.to_thread(wait, lambda: len(p := pods(cluster, namespace)) == 1 and list(p), 30)
        assert left not in leaving
        await asyncio.to_thread(wait, lambda: child(cluster, namespace, "deployment")["status"]["replicas"] == 1, 30)
        await last.refresh((namespace,))
        await last(key)
        before = len(cluster.writes(namespace))
        await last.refresh((namespace,))
        await last(key)
        assert [w["objectRef"]["resource"] for w in cluster.writes(namespace)[before:]] == ["secrets"]  # by design: unread


async def test_what_is_taken_over_is_what_is_there_not_what_watches_last_told(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, kube_config: None,
) -> None:
    """A watch of the Deployment that is behind, and a last write of the other autoscaler's that ours collides with."""
    run, key = asyncio.to_thread, f"{namespace}/chat"
    await run(cluster.apply, resource(replicas=1, autoscaling={**OWN, "mode": "External"}), namespace)
    async with await Kube.connect() as kube:
        made = Reconciler(kube, Writer(kube), Store(), "registry/weir-server:test", b"key")
        await made.refresh((namespace,))
        await made(key)

        async def told_of_the_resource_alone() -> int | None:
            """What the tuner goes by then."""
            made.store.put(names.KIND, await run(cluster.get, "infd", "chat", namespace))
            [subject] = Subjects(made.store, str, lambda _: True)()
            return subject.replicas

        async def passes() -> None:
            """Until one needs no other: the controllers write, too."""
            for _ in range(20):
                with contextlib.suppress(Retry):
                    await made(key)
                    return
            raise AssertionError("twenty passes came to nothing")

        await run(cluster.kubectl, "scale", "deployment/chat", "--replicas=5", "-n", namespace)
        await run(patch, cluster, namespace, {"autoscaling": {"mode": "Internal"}})
        assert await told_of_the_resource_alone() is None, "nothing is ours before a pass has said so"
        await passes()
        assert await run(desired, cluster, namespace) == 5 == await run(replicas, cluster, namespace)
        assert await told_of_the_resource_alone() == 5

        await run(patch, cluster, namespace, {"autoscaling": {"mode": "External"}})
        await told_of_the_resource_alone()
        await passes()
        await run(patch, cluster, namespace, {"autoscaling": {"mode": "Internal"}})
        await told_of_the_resource_alone()
        apply = made.writer.apply

        async def beaten(manifest: Any, live: Any) -> Any:
            if manifest["kind"] == "Deployment":
                monkeypatch.setattr(made.writer, "apply", apply)
                await run(cluster.kubectl, "scale", "deployment/chat", "--replicas=6", "-n", namespace)
            return await apply(manifest, live)

        monkeypatch.setattr(made.writer, "apply", beaten)
        with pytest.raises(Retry):
            await made(key)
        assert await run(desired, cluster, namespace) == 6
        await passes()
        assert await run(replicas, cluster, namespace) == 6


def pods(cluster: Cluster, namespace: str) -> dict[str, dict[str, str]]:
    """Annotations by name."""
    listed = json.loads(cluster.kubectl("get", "pods", "-n", namespace, "-l", LABEL, "-o", "json").stdout)["items"]
    return {p["metadata"]["name"]: p["metadata"].get("annotations") or {} for p in listed}


def test_the_recipes_are_accepted_by_the_definitions_that_they_are_for(
    cluster: Cluster, namespace: str, optional_kinds: None,
) -> None:
    found = {block["kind"]: block for block in blocks() if "kind" in block}
    assert set(found) == {"HorizontalPodAutoscaler", "ScaledObject"}
    for manifest in found.values():
        strict = ("--dry-run=server", "--validate=strict")
        cluster.kubectl("create", "-n", namespace, *strict, "-f", "-", stdin=json.dumps(manifest))
    for field in ("type", "metadata"):  # the definition does look at them
        broken = json.loads(json.dumps(found["ScaledObject"]))
        broken["spec"]["triggers"][0][field] = 7
        done = cluster.kubectl(
            "create", "-n", namespace, "--dry-run=server", "-f", "-", stdin=json.dumps(broken), check=False,
        )
        assert done.returncode != 0 and field in done.stderr


async def test_a_larger_envelope_is_rolled_out_once_and_told(
    cluster: Cluster, namespace: str, kube_config: None,
) -> None:
    grows = {"envelope": "Roll", "knobs": {"maxBatchSize": {"max": 64}}}
    wanted = resource(engine={"limits": {"maxBatchSize": 8}}, tuning=grows)
    await asyncio.to_thread(cluster.apply, wanted, namespace)
    key = f"{namespace}/chat"

    def limit() -> str:
        [server] = cluster.get("deployment", "chat", namespace)["spec"]["template"]["spec"]["containers"]
        return next(arg for arg in server["args"] if arg.startswith("--max-requests-per-batch"))

    async with await Kube.connect() as kube:
        reconciler = Reconciler(kube, Writer(kube), Store(), "registry/weir-server:test", b"key")

        async def again() -> None:
            await reconciler.refresh((namespace,))
            await reconciler(key)

        telling = asyncio.create_task(reconciler.events.run())
        await again()
        assert limit() == "--max-requests-per-batch=8"
        [raw] = reconciler.store.resources()
        reconciler.reports[key, raw["metadata"]["uid"]] = TuningReport({}, 1, 1, proposal=16)
        await again()
        assert limit() == "--max-requests-per-batch=8", "not while the first rollout is under way"
        await asyncio.to_thread(make_ready, cluster, namespace)
        await asyncio.to_thread(wait, lambda: child(cluster, namespace, "deployment")["status"].get("readyReplicas") == 1, 30)
        await again()
        assert limit() == "--max-requests-per-batch=8", "the status comes first"
        await again()
        assert limit() == "--max-requests-per-batch=16"
        await asyncio.to_thread(
            wait, lambda: "EnvelopeGrown" in cluster.kubectl("get", "events", "-n", namespace, "-o", "json").stdout, 30,
        )
        reconciler.reports[key, raw["metadata"]["uid"]] = TuningReport({}, 1, 1, proposal=32)
        await again()
        await again()
        assert limit() == "--max-requests-per-batch=16", "one an hour"
        kept = {"envelope": "Keep", "knobs": {"maxBatchSize": {"max": 8}}}
        await asyncio.to_thread(patch, cluster, namespace, {"tuning": kept})
        await again()
        assert limit() == "--max-requests-per-batch=8"
        telling.cancel()
