"""The tuner loop in the operator: a pod's control port is found by its address, polled with its token, and steered."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from control_plane_kit import Cluster, Operator, child, condition, decoded, make_ready, resource, settled, wait

from weir_operator.io import kube as connection
from weir_operator.io.apply import Writer
from weir_operator.io.kube import Kube
from weir_operator.loops.reconcile import Reconciler
from weir_operator.loops.steering import Steering
from weir_operator.loops.store import Store
from weir_operator.plan.plan import parse
from weir_operator.plan.tuning import report, resumable
from weir_operator.tuner.types import Mix, Pending, PodState, TunerState
from weir_server.contract import CONTROL_PORT

LABEL = "weir.dev/name=chat"


@pytest.fixture
def operator(cluster: Cluster, namespace: str) -> Iterator[Operator]:
    made = Operator(cluster, namespace).start("--tick-seconds=4", "--poll-seconds=1")
    yield made
    assert made.stop() == 0
    assert "Traceback" not in made.log


async def _until(what: Any, seconds: float, why: str) -> Any:
    return await asyncio.to_thread(wait, what, seconds, why)


async def test_what_the_tuner_knows_survives_in_the_status_and_is_written_once(
    cluster: Cluster, namespace: str, kube_config: None,
) -> None:
    await asyncio.to_thread(cluster.apply, resource(), namespace)
    pending = Pending(1.5, {"max_batch_size": 4.0}, {"max_batch_size": 8.0}, 2.5)
    state = TunerState(None, {
        "new": PodState("i", 1.25),
        "known": PodState("i", 1.25, mix=Mix(1.0, (1.0,), 2.0, 3.0, 4.0), pending=pending, spread={170: 0.5}, ceiling=9),
    })
    async with await Kube.connect() as kube:
        store, key = Store(), f"{namespace}/chat"
        reconciler = Reconciler(kube, Writer(kube), store, "registry/weir-server:test", b"key")
        await reconciler.refresh((namespace,))
        [raw] = store.resources()
        news = report(parse({k: v for k, v in raw.items() if k != "status"}), {}, set(), {}, state, (), {}, "", ())
        reconciler.reports[key, raw["metadata"]["uid"]] = resumable(news, state, None)
        await reconciler(key)
        stored = await asyncio.to_thread(cluster.get, "infd", "chat", namespace)
        assert Steering.resumed(stored["status"]["tuning"]).state == state
        await _until(lambda: child(cluster, namespace, "pod"), 30, "the controllers have done their part")
        await reconciler.refresh((namespace,))
        await reconciler(key)
        writes = len(cluster.writes(namespace))
        await reconciler.refresh((namespace,))
        await reconciler(key)
        assert [w["objectRef"]["resource"] for w in cluster.writes(namespace)[writes:]] == ["secrets"]  # by design: unread


async def test_a_ready_pod_is_polled_steered_and_let_go(
    cluster: Cluster, namespace: str, operator: Operator, fake_server: Any,
) -> None:
    address = f"127.{random.randint(1, 250)}.{random.randint(0, 250)}.{random.randint(2, 250)}"
    await asyncio.to_thread(cluster.apply, resource(tuning={"knobs": {"maxBatchSize": {"initial": 6}}}), namespace)
    await asyncio.to_thread(settled, cluster, operator, namespace)
    secret = await asyncio.to_thread(cluster.kubectl, "get", "secret", "-n", namespace, "-l", LABEL, "-o", "json")
    token = decoded(json.loads(secret.stdout)["items"][0], "token")
    try:
        server = await fake_server(address, CONTROL_PORT, token)
    except OSError as e:
        pytest.skip(f"port {CONTROL_PORT} is taken on this machine: {e.strerror}")
    await asyncio.to_thread(make_ready, cluster, namespace, address)
    await _until(lambda: condition(cluster, namespace, "MetricsAvailable").get("status") == "True", 40, "it is polled")
    await _until(lambda: len(server.puts) > 0, 20, "it is steered")
    assert server.puts[0]["slo"] == {"ttft": 2.0, "tpot": 0.08}
    assert server.puts[0]["fallback"]["max_batch_size"] == 6
    assert server.puts[0]["lease_seconds"] == 180
    status = (await asyncio.to_thread(cluster.get, "infd", "chat", namespace))["status"]["tuning"]
    assert status["knobs"]["maxBatchSize"] == 4
    assert status["mode"] == "Auto"
    assert [p["name"] for p in status["pods"]]

    change = json.dumps({"spec": {"tuning": {"mode": "Disabled"}}})
    await asyncio.to_thread(cluster.kubectl, "patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", change)
    await _until(lambda: server.puts[-1]["lease_seconds"] == 0, 20, "the lease is given back")
    assert server.board.target.max_batch_size == 6

    await server.__aexit__()
    await _until(lambda: condition(cluster, namespace, "MetricsAvailable").get("status") == "False", 60, "silence is said")
    assert condition(cluster, namespace, "MetricsAvailable")["reason"] == "NoPodAnswers"
    assert condition(cluster, namespace, "Ready")["status"] == "True"


async def test_a_list_of_several_pages_is_what_kubectl_lists(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, kube_config: None,
) -> None:
    monkeypatch.setattr(connection, "PAGE", 3)
    items = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"m{i}", "labels": {"x": "y"}}} for i in range(7)]
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    await asyncio.to_thread(cluster.kubectl, "create", "-n", namespace, "-f", "-", stdin=made)
    async with await Kube.connect() as kube:
        found = await kube.list("ConfigMap", namespace, "x=y")
    assert [(o["kind"], o["metadata"]["name"]) for o in found] == [("ConfigMap", f"m{i}") for i in range(7)]
