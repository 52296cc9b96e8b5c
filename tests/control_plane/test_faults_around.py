"""What befalls the operator's surroundings: its clock jumps, a node is lost, the key of the tokens changes, another operator
serves the same resources."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import struct
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from control_plane_kit import (
    Cluster,
    Operator,
    acted,
    child,
    condition,
    decoded,
    edit,
    make_ready,
    resource,
    settled,
    wait,
)

from weir_operator.loops.pace import BURST, REFILL_SECONDS
from weir_server.contract import CONTROL_PORT

HERE = Path(__file__).parent
LABEL = "weir.dev/name=chat"
until = asyncio.to_thread


def loopback() -> str:
    return f"127.{random.randint(1, 250)}.{random.randint(0, 250)}.{random.randint(2, 250)}"


def token(cluster: Cluster, namespace: str) -> str:
    """What the pods' Secret says now."""
    listed = json.loads(cluster.kubectl("get", "secret", "-n", namespace, "-l", LABEL, "-o", "json").stdout)["items"]
    return decoded(listed[0], "token")


def rotate(cluster: Cluster, namespace: str) -> None:
    key = json.dumps({"stringData": {"key": uuid.uuid4().hex}})
    cluster.kubectl("patch", "secret", "weir-operator-key", "-n", namespace, "--type=merge", "-p", key)


async def control_port(fake_server: Any, address: str, bearer: str) -> Any:
    try:
        return await fake_server(address, CONTROL_PORT, bearer)
    except OSError as e:
        pytest.skip(f"port {CONTROL_PORT} is taken on this machine: {e.strerror}")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler: the clock of a process cannot be shifted")
    made = tmp_path_factory.mktemp("shim") / "clock_shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(made), str(HERE / "clock_shim.c")], check=True)
    return made


async def test_a_clock_that_jumps_an_hour_moves_nothing_but_the_time_of_day(
    cluster: Cluster, namespace: str, fake_server: Any, shim: Path, tmp_path: Path,
) -> None:
    """Forth, and back by two: the Lease is held, the pod is steered and its lease renewed, changes are carried out."""
    file, address = tmp_path / "shift", loopback()
    file.write_bytes(struct.pack("q", 0))
    operator = Operator(cluster, namespace)
    operator.env = {"LD_PRELOAD": str(shim), "CLOCK_SHIFT": str(file)}
    await until(operator.start, "--tick-seconds=4", "--poll-seconds=1", "--lease-seconds=6")
    await until(cluster.apply, resource(), namespace)
    await until(settled, cluster, operator, namespace)
    server = await control_port(fake_server, address, await until(token, cluster, namespace))
    await until(make_ready, cluster, namespace, address)
    await until(wait, lambda: server.puts, 30, "it is steered")
    for seconds, jump in ((4, 3600), (5, -3600)):
        file.write_bytes(struct.pack("q", jump))
        await until(edit, cluster, namespace, seconds)
        began = time.monotonic()
        await until(wait, lambda: acted(cluster, namespace, seconds), 15)  # noqa: B023
        print(f"clock {jump:+d} s: a change was carried out after {time.monotonic() - began:.1f} s")
        sent = len(server.puts)
        await until(wait, lambda: len(server.puts) > sent + 2, 30, "the lease of the knobs is renewed")  # noqa: B023
        read = await until(operator.metric, "weir_tuner_last_reading_timestamp_seconds")
        assert abs(read - (time.time() + jump)) < 60, "the clock did jump, and readings are dated by it"
    assert await until(operator.metric, "weir_operator_takeovers_total") == 1
    assert {put["epoch"] for put in server.puts} == {server.board.fence.epoch}
    assert server.board.expires_in(time.monotonic()) > 0
    assert await until(operator.stop) == 0
    assert "Traceback" not in operator.log


def heartbeat(cluster: Cluster, name: str) -> None:
    """What a node's kubelet says of it now and then: that it is ready."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    told = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "told by the test",
            "lastHeartbeatTime": now, "lastTransitionTime": now}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))
    cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p",
                    json.dumps({"status": {"conditions": [told]}}))


def test_a_node_that_falls_silent_takes_its_pod_with_it_and_gives_it_back(cluster: Cluster, namespace: str) -> None:
    name = f"n-{namespace}"
    operator = Operator(cluster, namespace).start()
    cluster.apply(resource(), namespace)
    try:
        pod = wait(lambda: child(cluster, namespace, "pod"))["metadata"]["name"]
        heartbeat(cluster, name)
        target = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": {"kind": "Node", "name": name}}
        cluster.kubectl("create", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}/binding", "-f", "-",
                        stdin=json.dumps(target))
        make_ready(cluster, namespace)
        wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
        began = time.monotonic()
        wait(lambda: condition(cluster, namespace, "Ready").get("status") == "False", 60, "the pod no longer counts")
        print(f"said {time.monotonic() - began:.1f} s after it was last well (the node counts as lost after 8 s)")
        status = json.loads(cluster.kubectl("get", "node", name, "-o", "json").stdout)["status"]["conditions"]
        assert next(c for c in status if c["type"] == "Ready")["status"] == "Unknown"
        assert condition(cluster, namespace, "Available")["reason"] == "NoPodServes"
        heartbeat(cluster, name)
        make_ready(cluster, namespace)  # as its kubelet does
        wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")

        cluster.kubectl("delete", "pod", pod, "-n", namespace, "--wait=false")  # nobody is there to end it
        wait(lambda: condition(cluster, namespace, "Ready").get("status") == "False", why="a pod that ends does not count")
        listed = json.loads(cluster.kubectl("get", "pod", "-n", namespace, "-l", LABEL, "-o", "json").stdout)["items"]
        assert {p["metadata"]["name"] for p in listed if p["metadata"].get("deletionTimestamp")} == {pod}
    finally:
        cluster.kubectl("delete", "node", name, "--ignore-not-found")
        cluster.kubectl("delete", "pod", "--all", "-n", namespace, "--force", "--grace-period=0")
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


async def test_a_key_that_is_changed_reaches_the_pods_when_the_lease_changes_hands(
    cluster: Cluster, namespace: str, fake_server: Any,
) -> None:
    """Pods' tokens follow from the key. Until a pod's volume has the new one it refuses, and that is said; its knobs stay. The
    replica that stands by began with the old key, the one that led wrote Secrets from it: neither keeps it."""
    address = loopback()
    first = await until(Operator(cluster, namespace, "first").start, "--tick-seconds=4", "--poll-seconds=1")
    await until(cluster.apply, resource(), namespace)
    await until(settled, cluster, first, namespace)
    second = await until(Operator(cluster, namespace, "second").start, "--tick-seconds=4", "--poll-seconds=1")
    await until(wait, lambda: second.metric("weir_operator_leader") == 0, 30, "the second stands by")
    old = await until(token, cluster, namespace)
    server = await control_port(fake_server, address, old)
    await until(make_ready, cluster, namespace, address)
    await until(wait, lambda: server.puts, 30, "it is steered")
    await until(rotate, cluster, namespace)
    await until(cluster.kubectl, "delete", "lease", "weir-operator", "-n", namespace)
    await until(wait, lambda: token(cluster, namespace) != old, 30, "the pods' Secret follows whoever leads then")
    silent = lambda: condition(cluster, namespace, "MetricsAvailable")  # noqa: E731
    await until(wait, lambda: silent().get("status") == "False" and "401" in silent()["message"], 60, "it is said")
    target, server.token = server.board.target, await until(token, cluster, namespace)  # the kubelet has renewed the volume
    await until(wait, lambda: silent().get("status") == "True", 60, "and the pod is steered again")
    assert server.board.target == target
    deployment = await until(cluster.get, "deployment", "chat", namespace)
    assert deployment["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "1", "no pod was restarted for it"

    leads, stands_by = sorted((first, second), key=lambda o: -o.metric("weir_operator_leader"))
    old = await until(token, cluster, namespace)
    await until(rotate, cluster, namespace)
    assert await until(leads.stop) == 0  # the other has the key of before in its memory
    await until(wait, lambda: token(cluster, namespace) != old, 30, "the pods' Secret follows")
    assert await until(stands_by.stop) == 0
    assert "Traceback" not in first.log + second.log


@pytest.mark.parametrize("when", ["at its start", "when it takes over"])
def test_a_key_that_is_none_ends_the_operator_with_a_sentence(cluster: Cluster, namespace: str, when: str) -> None:
    said = f"Secret {namespace}/weir-operator-key has no data.key: put one there, or delete it to get another"
    operator = Operator(cluster, namespace)
    if when == "when it takes over":
        operator.start()
        wait(lambda: operator.metric("weir_operator_leader") == 1, why="it leads")
        cluster.kubectl("patch", "secret", "weir-operator-key", "-n", namespace, "--type=merge", "-p", '{"data":{"key":null}}')
        cluster.kubectl("delete", "lease", "weir-operator", "-n", namespace)
    else:
        cluster.kubectl("create", "secret", "generic", "weir-operator-key", "-n", namespace, "--from-literal=token=x")
        operator.start()
    assert operator.process and operator.process.wait(60) == 2
    assert operator.log.strip().splitlines()[-1] == f"weir-operator: {said}" and "Traceback" not in operator.log


def test_a_manager_who_forces_its_value_on_a_field_of_ours_is_answered_at_a_pace(cluster: Cluster, namespace: str) -> None:
    """As a controller with another opinion does: whenever ours is there, it sets its own. Both go on; we do so at our pace."""
    operator = Operator(cluster, namespace).start()
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    wanted = cluster.get("configmap", "chat-boot", namespace)["data"]
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "chat-boot"}, "data": {"boot.yaml": "slo: {}\n"}}
    forced, began = 0, time.monotonic()
    before = len(cluster.writes(namespace))
    while time.monotonic() - began < 25:
        if cluster.get("configmap", "chat-boot", namespace)["data"] == wanted:
            forced += 1
            cluster.kubectl("apply", "-n", namespace, "--server-side", "--force-conflicts", "--field-manager=rival", "-f", "-",
                            stdin=json.dumps(theirs))
    ours = [w for w in cluster.writes(namespace)[before:] if w["objectRef"]["resource"] == "configmaps"]
    print(f"forced {forced} times in 25 s, answered {len(ours)} times")
    assert BURST / 2 < len(ours) <= BURST + 25 / REFILL_SECONDS + 2
    wait(lambda: cluster.get("configmap", "chat-boot", namespace)["data"] == wanted, 30, "the last word is ours")
    assert operator.stop() == 0
    assert "Traceback" not in operator.log
