"""Who says how many pods, and which end: the pure part, and the loop that decides it over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from fake_server import FakeServer
from prometheus_client import REGISTRY
from test_tuner_loop import EPOCH, Bench, Law

from weir_operator.api import names
from weir_operator.cli.plugin.texts import count_text
from weir_operator.cli.plugin.top import table
from weir_operator.io.scrape import ControlClient
from weir_operator.loops import tuner as module
from weir_operator.loops.rounds import Rounds
from weir_operator.loops.steering import Subject
from weir_operator.plan.manifests import Defaults, children
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.plan import parse
from weir_operator.plan.replicas import desired_replicas, marks, owner, wanted_replicas
from weir_operator.plan.status import status
from weir_operator.tuner.replicas import Scaling, least_cached
from weir_operator.tuner.types import Learned, PodView, Poll, TunerState
from weir_server.contract import Plant

OWN = {"mode": "Internal", "minReplicas": 2, "maxReplicas": 6}


def resource(autoscaling: Any, status: Any = None, replicas: int = 1, generation: int = 1, **spec: Any) -> Any:
    return parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "uid": "u", "generation": generation},
        "spec": {
            "model": {"source": "file:///m.gguf"}, "slo": {"ttft": "1s", "tpot": "50ms"}, "replicas": replicas,
            "autoscaling": autoscaling, **spec,
        },
        "status": status or {},
    })


def said(number: int, reason: str, **tuning: Any) -> dict[str, Any]:
    owner = {"type": "AutoscalerOwned", "reason": reason}
    return {"desiredReplicas": number, "observedGeneration": 1, "conditions": [owner], "tuning": tuning}


def there(number: int, *pods: Any, **more: Any) -> Observed:
    return Observed(deployment={"spec": {"replicas": number}, "metadata": {}}, pods=pods, **more)


def hpa(kind: str, made_by: str = "") -> dict[str, Any]:
    owners = [{"kind": "ScaledObject", "name": made_by, "uid": "k"}] if made_by else []
    spec = {"scaleTargetRef": {"kind": kind, "name": "chat"}}
    return {"metadata": {"name": "theirs", "ownerReferences": owners}, "spec": spec}


ON_DEPLOYMENT, ON_RESOURCE = {"autoscalers": (hpa("Deployment"),)}, {"autoscalers": (hpa(names.KIND),)}


def pod(name: str, cost: str | None = None) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "annotations": {names.DELETION_COST: cost} if cost else {}}}


@pytest.mark.parametrize(("found", "seen", "wanted"), [
    (resource(OWN), Observed(), 2),
    (resource(OWN, replicas=4), Observed(), 4),  # a first Deployment begins with what the spec has, inside the bounds
    (resource(OWN, replicas=9), Observed(), 6),
    (resource(OWN), there(5), 5),  # taken over as it is
    (resource(OWN, said(2, "BySpec")), there(5), 5),
    (resource(OWN, said(3, "OnDeployment")), there(5), 5),  # what another autoscaler was last seen to want is old
    (resource(OWN, said(4, "ByOperator")), there(2), 4),  # decided, and not applied yet
    (resource(OWN, said(4, "CapacityUnknown")), there(2), 4),
    (resource(OWN, said(4, "ByOperator"), generation=2), there(5), 5),  # edited since: to External and back, for all we know
    (resource(OWN, said(4, "AtMaximum")), Observed(), 4),  # somebody deleted the Deployment
    (resource(OWN, said(9, "ByOperator")), there(6), 6),
    (resource(OWN, {"conditions": said(0, "ByOperator")["conditions"]}), there(5), 5),  # somebody cleared the number
    (resource({"mode": "External"}, said(4, "ByOperator")), there(5), 5),
    (resource({"mode": "Disabled"}, said(4, "ByOperator"), replicas=3), there(5), 3),
    (resource(OWN, said(3, "ByOperator")), there(5, **ON_DEPLOYMENT), 5),  # somebody else's: it is there, so it says how many
    (resource(OWN, said(3, "ByOperator")), there(8, **ON_DEPLOYMENT), 8),  # and its bounds are its own
    (resource(OWN, said(3, "AnotherOnDeployment")), there(5), 5),  # it is gone: taken over as it is
    (resource(OWN, said(3, "ByOperator")), there(5, **ON_RESOURCE), 3),
    (resource(OWN, said(3, "AnotherOnResource")), there(5), 3),
    (resource({"mode": "Disabled"}, replicas=3), there(5, **ON_DEPLOYMENT), 5),
    (resource({"mode": "Disabled"}, replicas=3), there(5, **ON_RESOURCE), 3),
])
def test_one_owner_says_how_many(found: Any, seen: Observed, wanted: int) -> None:
    assert wanted_replicas(found, seen) == wanted


def test_the_deployment_follows_the_status_and_a_report_only_the_status() -> None:
    """So that whoever dies between the two writes leaves a number that was decided, never one that was not."""
    report = TuningReport({}, 2, 2, desired=5, scaling=Scaling.OUT, generation=1)
    found, seen = resource(OWN, said(3, "ByOperator")), there(3, tuning=report)
    [deployment] = [m for m in children(found, Defaults("i", "t"), seen) if m["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 3
    assert status(found, seen)["desiredReplicas"] == 5
    assert desired_replicas(resource(OWN, said(3, "ByOperator"), generation=2), seen) == 3, "it is of another spec"
    assert desired_replicas(resource({"mode": "External"}), seen) == 3
    assert desired_replicas(found, replace(seen, **ON_DEPLOYMENT)) == 3, "it has another owner"


@pytest.mark.parametrize(("found", "seen", "reason", "truth"), [
    (resource({"mode": "Disabled"}), there(1), "BySpec", False),
    (resource({"mode": "External"}), there(1), "OnDeployment", True),
    (resource(OWN), there(2), "ByOperator", True),
    (resource(OWN, said(2, "AtMaximum")), there(2), "AtMaximum", True),  # a new leader has not looked yet
    (resource(OWN), there(2, tuning=TuningReport({}, 1, 1, scaling=Scaling.UNKNOWN)), "CapacityUnknown", True),
    (resource(OWN), there(6, tuning=TuningReport({}, 1, 1, scaling=Scaling.AT_MOST)), "AtMaximum", True),
    (resource(OWN, said(6, "AtMaximum")), there(6, tuning=TuningReport({}, 1, 1, scaling=Scaling.ENOUGH)), "ByOperator", True),
    (resource(OWN), there(2, scalable=False), "FixedHere", False),
    (resource({"mode": "External"}), there(2, scalable=False), "FixedHere", False),
    (resource(OWN), there(2, **ON_DEPLOYMENT), "AnotherOnDeployment", True),
    (resource({"mode": "Disabled"}), there(2, **ON_DEPLOYMENT), "AnotherOnDeployment", True),
    (resource({"mode": "External"}), there(2, **ON_DEPLOYMENT), "OnDeployment", True),
    (resource(OWN), there(2, **ON_RESOURCE), "AnotherOnResource", True),
    (resource({"mode": "Disabled"}), there(2, **ON_RESOURCE), "BySpec", False),
    (resource(OWN, said(2, "AnotherOnResource")), there(2), "ByOperator", True),
])
def test_the_condition_says_who(found: Any, seen: Observed, reason: str, truth: bool) -> None:
    condition = owner(found, seen)
    assert (condition.reason, condition.status) == (reason, truth)


def test_an_autoscaler_of_somebody_elses_is_named_with_who_made_it() -> None:
    seen = there(4, autoscalers=(hpa("Deployment", "chat"),))
    assert owner(resource(OWN), seen).message.startswith("HorizontalPodAutoscaler theirs of ScaledObject chat sets the number")


def test_what_another_autoscaler_owns_is_left_out_of_what_is_applied() -> None:
    for mode in (OWN, {"mode": "Disabled"}):
        made = children(resource(mode), Defaults("i", "t"), there(5, **ON_DEPLOYMENT))
        [spec] = [m["spec"] for m in made if m["kind"] == "Deployment"]
        assert "replicas" not in spec
    assert marks(resource(OWN, said(2, "ByOperator")), there(4, pod("a"), **ON_DEPLOYMENT)) == []


def test_a_pause_is_said_where_it_holds_the_number() -> None:
    assert "paused holds it" in owner(resource(OWN, tuning={"paused": True}), there(2)).message


def test_those_that_leave_are_cheap_before_there_are_fewer_and_others_costs_are_theirs() -> None:
    pods = (pod("a"), pod("b"), pod("c", names.CHEAP), pod("d", "7"))
    shrinking = resource(OWN, said(2, "ByOperator", replicas={"leaving": ["b"]}))
    assert [(p["metadata"]["name"], cost) for p, cost in marks(shrinking, there(4, *pods))] == [("b", names.CHEAP), ("c", None)]
    assert marks(shrinking, there(2, *pods)) == []
    assert marks(resource({"mode": "External"}, shrinking.status), there(4, *pods)) == []


def test_a_growing_deployment_has_a_disruption_budget_from_the_start() -> None:
    kinds = [m["kind"] for m in children(resource(OWN), Defaults("i", "t"), Observed())]
    assert "PodDisruptionBudget" in kinds


# ---------------------------------------------------------------- the loop

LEARNED = Learned("llama////", 64, 2.0, 100, 8, 16, 0.01, 8, 10.0, Plant(0.04, 0.003, 1e-6, 0.002, 64), 900.0)
"""A pod of the fake servers' class does 10 rows/s."""
SAVED = {"state": {"pods": {}, "learned": [asdict(LEARNED)]}}


class Loaded:
    """A loop over two fake servers, between which a load is split, with a clock that the test moves."""

    def __init__(self, bench: Bench, servers: list[FakeServer]) -> None:
        self.bench, self.servers, self.load, self.queued = bench, servers, 10.0, [0.0, 0.0]
        self.wish, self.taken, self.generation, self.more, self.saved = dict(OWN), 2, 1, {}, SAVED
        self.passed: int | None = None  # the generation of the last pass, where that is behind
        bench.loop._subjects = lambda: [self.subject()]
        self.rounds = Rounds(lambda: bench.now)

    def subject(self) -> Subject:
        status = {"observedGeneration": self.passed or self.generation}
        found = resource(self.wish, status, generation=self.generation, **self.more)
        taken = self.taken if self.wish["mode"] == "Internal" else None
        return Subject("ns/chat", found, tuple(self.bench.endpoints), self.saved, taken)

    async def go(self, seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            for i, server in enumerate(self.servers):
                self.queued[i] += 5 * self.load / len(self.servers)
                server.counters |= {"monotonic": self.bench.now + 5, "queued": int(self.queued[i])}
            await self.bench.poll()
            self.rounds.heard(self.subject(), self.bench.news.rounds[-1])

    @property
    def report(self) -> TuningReport:
        return self.bench.news.reports[-1]

    @property
    def outcomes(self) -> list[str]:
        counts = [r.count for r in self.bench.news.rounds if r.count]
        return [c.decision.outcome.value for c in counts if c.decision.outcome]


@pytest.fixture
async def loaded(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loaded]:
    monkeypatch.setattr(module, "decide", Law())
    async with FakeServer() as a, FakeServer() as b, ControlClient() as client:
        yield Loaded(Bench(client, [a.endpoint("chat-0"), b.endpoint("chat-1")], Law()), [a, b])


def gauge(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"namespace": "ns", "name": "chat"})


async def test_work_that_doubles_asks_for_pods_and_says_so_at_once(loaded: Loaded) -> None:
    await loaded.go(400)
    assert loaded.report.desired == 2 and "ScaledOut" not in loaded.outcomes
    loaded.load, polls = 30.0, 0
    while "ScaledOut" not in loaded.outcomes and polls < 30:
        await loaded.go(5)
        polls += 1
    assert loaded.report.desired == 4 and loaded.report.scaling is Scaling.OUT, "in the report of the same poll"
    assert gauge("weir_tuner_replicas") == 4
    assert loaded.bench.news.reports[-1].status["history"][0]["changes"] == {"replicas": [2, 4]}
    told = loaded.rounds.explained("ns/chat")["replicas"]
    assert (told["desired"], told["outcome"], told["capacity"]) == (4, "ScaledOut", 10.0)
    assert "What would change it: over 32 rows/s offered" in count_text(told, loaded.bench.now)
    loaded.load = 50.0
    await loaded.go(250)  # two answer, four were asked for: no more are asked for meanwhile
    assert loaded.report.desired == 4 and loaded.outcomes[-1] == "Pending"


async def test_another_leader_goes_on_with_what_was_decided(loaded: Loaded) -> None:
    loaded.load = 30.0
    await loaded.go(300)
    assert loaded.report.desired == 4
    loaded.saved, loaded.taken = json.loads(json.dumps(dict(loaded.report.status))), 4
    loaded.bench.epoch = EPOCH + 1
    loaded.bench.fresh()
    loaded.bench.loop._subjects = lambda: [loaded.subject()]
    count = len(loaded.outcomes)
    await loaded.go(60)
    assert loaded.report.desired == 4 and loaded.outcomes[count:] == [], "nothing is said of a number on a few readings"
    assert loaded.bench.news.reports[-1].status["state"]["replicas"]["wanted"]


async def test_fewer_after_the_stabilisation_and_the_one_with_least_in_its_cache_goes(loaded: Loaded) -> None:
    loaded.wish |= {"minReplicas": 1}
    loaded.servers[1].counters["cached_tokens"] = 5
    await loaded.go(10)
    for i in range(100):
        loaded.servers[0].counters["cached_tokens"] = 10 * i  # the older one, which a ReplicaSet would keep anyway
        loaded.servers[1].counters["cached_tokens"] = 5
        loaded.load = 4.0
        await loaded.go(10)
        if loaded.report.desired == 1:
            break
    assert "Stabilising" in loaded.outcomes and "ScaledIn" in loaded.outcomes
    assert loaded.report.status["replicas"] == {"outcome": "ScaledIn", "leaving": ["chat-1"]}
    del loaded.bench.endpoints[1], loaded.servers[1]
    await loaded.go(40)
    assert loaded.report.status["replicas"] == {"outcome": "ScaledIn"}, "who has left is told of no more"


async def test_an_edit_of_the_spec_begins_with_what_is_and_a_pause_holds(loaded: Loaded) -> None:
    await loaded.go(130)
    loaded.more, loaded.load, loaded.generation = {"tuning": {"paused": True}}, 60.0, 2
    await loaded.go(400)
    assert loaded.report.desired == 2 and "ScaledOut" not in loaded.outcomes
    loaded.more, loaded.generation, loaded.taken, loaded.passed = {}, 3, 5, 2  # another owner set it in between
    await loaded.go(5)
    assert loaded.report.desired != 5 and loaded.report.generation == 2, "no pass has looked yet: this is of the spec before"
    loaded.passed = None
    await loaded.go(5)
    assert loaded.report.desired == 5 and loaded.report.generation == 3
    loaded.wish, loaded.generation = {"mode": "External"}, 4
    await loaded.go(40)
    assert loaded.report.desired is None and gauge("weir_tuner_replicas") is None


async def test_silent_pods_hold_the_number(loaded: Loaded) -> None:
    loaded.load = 30.0
    await loaded.go(300)
    assert loaded.report.desired == 4

    async def nothing(_: Any) -> Any:
        from aiohttp import web
        return web.Response(status=500)

    for server in loaded.servers:
        server.behave = nothing
    await loaded.go(400)
    assert loaded.report.desired == 4 and loaded.outcomes[-1] == "Unknown"
    assert loaded.report.scaling is Scaling.UNKNOWN


@pytest.mark.parametrize(("mode", "load"), [("External", 0.5), ("Internal", 0.5), ("Disabled", None)])
async def test_autoscalers_of_others_are_told_the_load(loaded: Loaded, mode: str, load: float | None) -> None:
    loaded.wish |= {"mode": mode}
    await loaded.go(130)
    found = gauge("weir_tuner_load_ratio")
    assert found == (pytest.approx(load, rel=0.1) if load else None)


def test_a_pod_of_which_nothing_is_known_has_least_to_lose() -> None:
    busy = PodView("busy", "x", None, tuple(
        Poll(5.0 * i, replace(FakeServer().window(), instance="one", monotonic=5.0 * i, cached_tokens=i)) for i in range(3)
    ))
    blank = PodView("blank", "x", None, (Poll(0.0, None),))
    assert least_cached({"busy": busy, "blank": blank}, 1) == ("blank",)
    assert least_cached({"busy": busy, "blank": blank}, 0) == ()
    assert least_cached({"busy": busy}, -1) == ()


def test_top_says_who_sets_the_number_where_it_is_not_the_spec() -> None:
    def titled(truth: str) -> Any:
        return table({}, {"status": {"conditions": [{"type": "AutoscalerOwned", "status": truth, "message": "now 3"}]}}).title

    assert (titled("True"), titled("False"), table({}, {}).title) == ("now 3", None, None)


def test_the_tuners_state_reads_past_what_is_kept_of_the_number() -> None:
    kept = {"pods": {}, "replicas": {"wanted": [[1.0, 2]]}}
    assert TunerState.from_json(kept) == TunerState()
