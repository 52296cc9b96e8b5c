"""Children that the API server refuses, one by one; namespaces that it refuses; and what is written again, and when."""

from __future__ import annotations

from typing import Any

import pytest
from test_operator_parts import RAW, pod

from weir_operator.api import names
from weir_operator.io.apply import Writer
from weir_operator.io.kube import ApiError
from weir_operator.loops import children
from weir_operator.loops.queue import Retry
from weir_operator.loops.reconcile import Reconciler
from weir_operator.loops.store import Store

EVERYTHING = {**RAW, "spec": {
    "model": {"source": "file:///m.gguf"}, "monitoring": {"podMonitor": True}, "disruption": {"maxUnavailable": "50%"},
}}
REFUSED = ApiError(403, "Forbidden", "exceeded quota: small")


class Api:
    """Answers an apply with its manifest, unless it refuses that plural or namespace; keeps what it was asked."""

    def __init__(self) -> None:
        self.refuses: dict[str, ApiError] = {}
        self.status: dict[str, Any] = {}
        self.applied: list[tuple[str, str]] = []  # plural, force
        self.there: dict[str, Any] = {}

    async def get(self, kind: str, *_: Any) -> Any:
        return self.there.get(kind)

    async def names(self, *_: Any) -> frozenset[str]:
        return frozenset()

    async def has(self, kind: str) -> bool:
        return kind == "PodMonitor"

    async def list(self, kind: str, namespace: str | None, *_: Any) -> list[Any]:
        if namespace in self.refuses:
            raise self.refuses[namespace]
        own = {**EVERYTHING, "metadata": {**RAW["metadata"], "namespace": namespace or "ns"}}
        return [own] if kind == names.KIND else []

    async def request(self, method: str, target: str, *, query: Any, body: Any, **_: Any) -> Any:
        if "/events" in target:
            return {}
        if target.endswith("/status"):
            if "status" in self.refuses:
                raise self.refuses["status"]
            self.status |= body["status"]
            return {**EVERYTHING, "status": dict(self.status)}
        plural = target.split("/")[-2]
        if plural in self.refuses:
            raise self.refuses[plural]
        self.applied.append((plural, query["force"]))
        return {**body, "metadata": {"uid": "x", "resourceVersion": "1", **body["metadata"]}}

    def made(self) -> set[str]:
        return {plural for plural, _ in self.applied}

    def condition(self, kind: str) -> tuple[str, str, str]:
        found = next(c for c in self.status["conditions"] if c["type"] == kind)
        return found["status"], found["reason"], found["message"]


class Bench:
    def __init__(self) -> None:
        api: Any = Api()
        self.api: Api = api
        self.store, self.leads = Store(), True
        self.reconciler = Reconciler(api, Writer(api, lambda: 60.0 if self.leads else 0.0), self.store, "image", b"key")
        self.reconciler.children.kinds = frozenset({"PodMonitor"})
        self.store.put(names.KIND, EVERYTHING)

    async def passes(self) -> str | None:
        """One pass; why it has to be made again."""
        try:
            await self.reconciler("ns/chat")
        except Retry as e:
            return str(e)
        return None


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(("plural", "kind"), [("podmonitors", "PodMonitor"), ("poddisruptionbudgets", "PodDisruptionBudget")])
async def test_what_stands_beside_the_pods_does_not_make_them_unready(bench: Bench, plural: str, kind: str) -> None:
    bench.api.refuses[plural] = REFUSED
    assert "quota" in str(await bench.passes())
    assert {"deployments", "services", "networkpolicies"} <= bench.api.made()
    assert bench.api.condition("IntegrationsReady") == ("False", "Refused", f"{kind}: exceeded quota: small")
    assert bench.api.condition("Ready")[1] == "Starting"
    del bench.api.refuses[plural]
    assert await bench.passes() is None
    assert bench.api.condition("IntegrationsReady")[:2] == ("True", "Complete") and plural in bench.api.made()


@pytest.mark.parametrize("plural", ["serviceaccounts", "secrets", "configmaps", "networkpolicies"])
async def test_no_pod_is_made_without_what_it_stands_on_and_what_guards_it(bench: Bench, plural: str) -> None:
    bench.api.refuses[plural] = REFUSED
    assert "quota" in str(await bench.passes())
    assert "deployments" not in bench.api.made() and "poddisruptionbudgets" in bench.api.made()
    assert bench.api.condition("Ready") == ("False", "ApplyRefused", "exceeded quota: small")
    del bench.api.refuses[plural]
    assert await bench.passes() is None
    assert "deployments" in bench.api.made()


async def test_a_service_that_is_refused_keeps_no_pod_from_being_made(bench: Bench) -> None:
    bench.api.refuses["services"] = REFUSED
    await bench.passes()
    assert "deployments" in bench.api.made() and bench.api.condition("Ready")[1] == "ApplyRefused"


async def test_what_is_believed_absent_is_applied_without_force(bench: Bench) -> None:
    """Somebody may have made one of that name between the question and the apply; the Secret's name is nobody else's."""
    await bench.passes()
    assert dict(bench.api.applied) == {plural: str(plural == "secrets").lower() for plural in bench.api.made()}
    assert len(bench.api.made()) == 8
    bench.store.drop("Service", bench.store.get("Service", "ns", "chat") or {})
    bench.api.refuses["services"] = ApiError(409, "Conflict", "conflict with kubectl")
    assert "changed meanwhile" in str(await bench.passes()), "it went again"
    bench.api.there["Service"] = {"kind": "Service", "metadata": {"name": "chat", "namespace": "ns", "uid": "z"}}
    assert "does not belong" in str(await bench.passes())
    assert bench.api.condition("Ready")[1] == "NameTaken"


async def test_a_definition_without_a_status_is_said_and_the_resource_is_not_forgotten(bench: Bench) -> None:
    bench.api.refuses["status"] = ApiError(404, "NotFound", "the server could not find the requested resource")
    bench.api.there[names.KIND] = EVERYTHING
    assert "has no status" in str(await bench.passes())
    assert len(bench.store.resources()) == 1


async def test_a_secret_is_written_again_where_pods_may_lack_it_and_else_once_a_day(
    bench: Bench, monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])

    async def secrets_written() -> int:
        await bench.reconciler.refresh(())
        bench.store.put(names.KIND, {**EVERYTHING, "status": bench.api.status})
        bench.api.applied.clear()
        await bench.passes()
        return [plural for plural, _ in bench.api.applied].count("secrets")

    assert await secrets_written() == 1
    assert await secrets_written() == 0, "nothing speaks for a second time"
    bench.store.put("Pod", pod("new", phase="Pending"))
    monkeypatch.setattr(bench.store, "replace", lambda *_: None)  # the API has no pods
    assert await secrets_written() == 1, "a pod that does not start may lack it"
    bench.store.drop("Pod", pod("new"))
    now[0] += children.SECRET_SECONDS + 1
    assert await secrets_written() == 1 and await secrets_written() == 0


async def test_who_does_not_lead_forgets_what_is_gone_all_the_same(bench: Bench) -> None:
    await bench.passes()
    assert bench.reconciler.children._applied
    bench.leads = False
    bench.store.drop(names.KIND, EVERYTHING)
    await bench.passes()
    assert not bench.reconciler.children._applied


async def test_a_namespace_that_cannot_be_listed_does_not_take_the_others_with_it(bench: Bench) -> None:
    refusal = ApiError(403, "Forbidden", "no")
    bench.api.refuses["b"] = refusal
    assert await bench.reconciler.refresh(("a", "b")) == {"b"}
    assert {raw["metadata"]["namespace"] for raw in bench.store.resources()} == {"a"}
    bench.api.refuses["a"] = refusal
    with pytest.raises(ApiError):
        await bench.reconciler.refresh(("a", "b"))
    bench.api.refuses.clear()
    assert await bench.reconciler.refresh(("a", "b")) == frozenset()
    assert {raw["metadata"]["namespace"] for raw in bench.store.resources()} == {"a", "b"}
