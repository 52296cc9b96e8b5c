"""The operator's parts without an API server: whom it polls, what it begins with, and a pass that the API server hinders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_server import until
from test_kube_and_store import obj

from weir_operator.api import names
from weir_operator.io.apply import Writer
from weir_operator.io.kube import ApiError, Unreachable
from weir_operator.loops import reconcile
from weir_operator.loops import resync as module
from weir_operator.loops.operator import Subjects, take_over
from weir_operator.loops.queue import Retry, WorkQueue
from weir_operator.loops.reconcile import Reconciler
from weir_operator.loops.resync import Resync
from weir_operator.loops.store import Store
from weir_operator.plan.observed import TuningReport

RAW = {
    "apiVersion": names.API_VERSION, "kind": names.KIND,
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "1", "generation": 1},
    "spec": {"model": {"source": "file:///m.gguf"}},
}
LABELS = {names.OWNER_LABEL: "chat"}


class Api:
    """Stands where the API server stands: answers an apply with its manifest, unless it is told to fail."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.statuses: list[dict[str, Any]] = []

    async def get(self, *_: Any) -> None:
        return None

    async def names(self, *_: Any) -> frozenset[str]:
        return frozenset()

    async def has(self, kind: str) -> bool:
        return False

    async def list(self, kind: str, *_: Any) -> list[Any]:
        if self.fails:
            raise self.fails
        return [RAW] if kind == names.KIND else []

    async def request(self, method: str, target: str, *, body: Any, **_: Any) -> Any:
        if target.endswith("/status"):
            self.statuses.append(body["status"])
            return {**RAW, "status": body["status"]}
        if self.fails and "events" not in target:
            raise self.fails
        return {**body, "metadata": {"uid": "x", "resourceVersion": "1", **body["metadata"]}}


class Bench:
    def __init__(self) -> None:
        api: Any = Api()
        self.api, self.store = api, Store()
        self.reconciler = Reconciler(api, Writer(api), self.store, "image", b"key")
        self.queue = WorkQueue(self.reconciler)

    def ready(self) -> dict[str, Any]:
        return next(c for c in self.api.statuses[-1]["conditions"] if c["type"] == "Ready")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def deployment(**status: Any) -> dict[str, Any]:
    made = obj("chat", **LABELS)
    made["metadata"]["ownerReferences"] = [{"uid": "u"}]
    return {**made, "status": status}


def pod(name: str, phase: str = "Running", ready: bool = True, **meta: Any) -> dict[str, Any]:
    made = obj(name, **LABELS)
    made["metadata"] |= {"ownerReferences": [{"kind": "ReplicaSet", "controller": True, "name": "chat-5d"}], **meta}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {**made, "status": {"phase": phase, "podIP": "10.0.0.1", "conditions": conditions}}


def test_a_pod_is_a_subject_from_when_it_runs_until_it_ends() -> None:
    store = Store()
    store.put(names.KIND, RAW)
    store.put("Deployment", deployment())
    for made in (
        pod("a"), pod("b", ready=False), pod("c", phase="Pending"), pod("d", deletionTimestamp="now"), pod("e", phase="Failed"),
        pod("f", ownerReferences=[]),
    ):
        store.put("Pod", made)
    assert not list(Subjects(store, str, lambda _: False)()), "another operator's"
    [subject] = Subjects(store, str, lambda key: key == "ns/chat")()
    assert [(e.name, e.ready) for e in subject.endpoints] == [("a", True), ("b", False)]


async def test_an_error_that_may_pass_does_not_freeze_the_status(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(reconcile.time, "monotonic", lambda: now[0])
    bench.store.put(names.KIND, RAW)
    bench.api.fails = ApiError(500, "InternalError", "failed calling webhook: no route to host")
    for ready, reason in ((1, "Serving"), (0, "Starting")):
        bench.store.drop("Deployment", deployment())
        bench.store.put("Deployment", deployment(readyReplicas=ready, replicas=1))
        with pytest.raises(Retry, match="webhook"):
            await bench.reconciler("ns/chat")
        assert bench.ready()["reason"] == reason
        progressing = next(c for c in bench.api.statuses[-1]["conditions"] if c["type"] == "Progressing")
        assert progressing["reason"] == "RollingOut"  # nothing was applied
    now[0] += reconcile.LASTING_SECONDS
    with pytest.raises(Retry):
        await bench.reconciler("ns/chat")
    assert bench.ready()["reason"] == "ApplyRefused"
    assert "webhook" in bench.ready()["message"]
    bench.api.fails = None
    await bench.reconciler("ns/chat")
    assert bench.ready()["reason"] == "Starting"


async def test_pods_are_told_of_whatever_became_of_the_spec(bench: Bench) -> None:
    """It takes no spec to count them: a resource that cannot be read must not be said to serve when it does no more."""
    wrong = {**RAW, "spec": {**RAW["spec"], "template": {"spec": {"containers": [{"name": "server", "args": []}]}}}}
    for ready, available in ((1, "True"), (0, "False")):
        bench.store.drop("Deployment", deployment())
        bench.store.put("Deployment", deployment(replicas=1, readyReplicas=ready))
        bench.store.put(names.KIND, wrong)
        await bench.reconciler("ns/chat")
        assert bench.ready()["reason"] == "SpecInvalid" and "engine.extraArgs" in bench.ready()["message"]
        assert bench.api.statuses[-1]["readyReplicas"] == ready
        assert {c["type"]: c["status"] for c in bench.api.statuses[-1]["conditions"]}["Available"] == available


async def test_a_resource_that_went_unseen_is_forgotten_at_its_first_refused_write(bench: Bench) -> None:
    """Its deletion fell into a gap of the watches: no pass may go on making children of it."""
    bench.store.put(names.KIND, RAW)

    async def gone(method: str, target: str, *, body: Any, **_: Any) -> Any:
        if target.endswith("/status"):
            raise ApiError(404, "NotFound", "chat not found")
        return {**body, "metadata": {"uid": "x", "resourceVersion": "1", **body["metadata"]}}

    bench.api.request = gone
    await bench.reconciler("ns/chat")
    assert bench.store.resources() == [] and not bench.reconciler.children._applied
    newer = {**RAW, "metadata": {**RAW["metadata"], "uid": "made-anew"}}
    bench.store.put(names.KIND, RAW)

    async def made_anew(method: str, target: str, **rest: Any) -> Any:
        if target.endswith("/status"):
            bench.store.put(names.KIND, newer)
        return await gone(method, target, **rest)

    bench.api.request = made_anew
    await bench.reconciler("ns/chat")
    assert bench.store.resources() == [newer]


async def test_reports_are_of_one_resource_and_of_one_time_as_leader(bench: Bench) -> None:
    bench.store.put(names.KIND, RAW)
    bench.reconciler.reports["ns/chat", "another uid"] = TuningReport({"mode": "old"}, 0, 0)
    await bench.reconciler("ns/chat")
    assert "tuning" not in bench.api.statuses[-1]
    bench.reconciler.reports["ns/chat", "u"] = TuningReport({"mode": "Auto"}, 0, 0)
    await bench.reconciler("ns/chat")
    assert bench.api.statuses[-1]["tuning"]["mode"] == "Auto"
    take_over(bench.reconciler, bench.queue)
    assert bench.reconciler.reports == {}
    assert set(bench.queue._due) == {"ns/chat"}


@pytest.mark.parametrize(("error", "words"), [
    (ApiError(404, "NotFound", "the server could not find the requested resource"), f"CRD {names.CRD_NAME} is not installed"),
    (Unreachable("the API server does not answer"), "does not answer"),
])
async def test_nothing_begins_before_everything_was_listed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str,
) -> None:
    monkeypatch.setattr(module, "RELIST_SECONDS", 0.01)
    began = asyncio.Event()

    async def part() -> None:
        assert bench.store.get(names.KIND, "ns", "chat")
        began.set()

    resync = Resync(bench.reconciler, bench.queue, ())
    assert resync.wrong
    bench.api.fails = error
    tasks = [asyncio.create_task(t) for t in (resync.then(part), resync.run())]
    await until(lambda: words in (resync.wrong or ""))
    assert not began.is_set()
    bench.api.fails = None
    async with asyncio.timeout(10):
        await began.wait()
    assert resync.wrong is None
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
