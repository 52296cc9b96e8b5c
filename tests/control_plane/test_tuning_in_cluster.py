"""The tuner loop in the operator: a pod's control port is found by its address, polled with its token, and steered."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from control_plane_kit import Cluster, Operator, condition, decoded, make_ready, resource, settled, wait

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
