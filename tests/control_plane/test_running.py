"""Two replicas, one leader: take-over, the pods' own fence, connections that fall silent."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from control_plane_kit import Cluster, Operator, acted, decoded, edit, make_ready, resource, settled, wait
from frozen_proxy import FrozenProxy

from weir_server.contract import CONTROL_PORT, KnobsRequest

LABEL = "weir.dev/name=chat"


def through(cluster: Cluster, port: int, name: str) -> Path:
    """The admin's kubeconfig by way of another port."""
    file = cluster.folder / f"{name}.kubeconfig"
    found = yaml.safe_load(cluster.kubeconfig.read_text())
    found["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    file.write_text(yaml.safe_dump(found))
    return file


def test_a_killed_leader_is_followed(cluster: Cluster, namespace: str) -> None:
    first = Operator(cluster, namespace, "first").start()
    cluster.apply(resource(), namespace)
    settled(cluster, first, namespace)
    second = Operator(cluster, namespace, "second").start()
    wait(lambda: second.metric("weir_operator_leader") == 0)
    first.stop(signal.SIGKILL)
    edit(cluster, namespace, 7)
    began = time.monotonic()
    wait(lambda: acted(cluster, namespace, 7), 40, "the second takes over")
    print(f"taken over and acted {time.monotonic() - began:.1f} s after the leader was killed")
    assert second.stop() == 0


async def test_a_paused_leader_that_wakes_up_moves_no_knob(cluster: Cluster, namespace: str, fake_server: Any) -> None:
    """The pod's own fence: what the old leader would still send is refused by the pod, whatever the operator thinks."""
    address = f"127.{random.randint(1, 250)}.{random.randint(0, 250)}.{random.randint(2, 250)}"
    until = asyncio.to_thread
    first = await until(Operator(cluster, namespace, "first").start, "--tick-seconds=4", "--poll-seconds=1")
    await until(cluster.apply, resource(), namespace)
    await until(settled, cluster, first, namespace)
    secret = await until(cluster.kubectl, "get", "secret", "-n", namespace, "-l", LABEL, "-o", "json")
    try:
        server = await fake_server(address, CONTROL_PORT, decoded(json.loads(secret.stdout)["items"][0], "token"))
    except OSError as e:
        pytest.skip(f"port {CONTROL_PORT} is taken on this machine: {e.strerror}")
    await until(make_ready, cluster, namespace, address)
    await until(wait, lambda: server.puts, 30, "the first steers it")
    second = await until(Operator(cluster, namespace, "second").start, "--tick-seconds=4", "--poll-seconds=1")
    await until(wait, lambda: second.metric("weir_operator_leader") == 0, 30, "the second runs")
    old = server.puts[-1]
    assert first.process and second.process
    first.process.send_signal(signal.SIGSTOP)
    await until(wait, lambda: server.board.fence.epoch > old["epoch"], 60, "the second steers it")
    before = len(server.puts)
    first.process.send_signal(signal.SIGCONT)
    await until(wait, lambda: first.metric("weir_operator_leader") == 0, 30, "the sleeper sees that it no longer leads")
    await until(wait, lambda: len(server.puts) > before, 120, "the lease of the knobs is renewed by the second")
    assert {put["epoch"] for put in server.puts[before:]} == {server.board.fence.epoch}
    with pytest.raises(Exception) as refused:  # and if it had sent one all the same
        server.board.put(KnobsRequest(**{**old, "seq": old["seq"] + 100}), time.monotonic())
    assert getattr(refused.value, "status", None) == 409
    for operator in (first, second):
        assert await until(operator.stop) == 0
        assert "Traceback" not in operator.log


def test_connections_that_fall_silent_are_given_up(cluster: Cluster, namespace: str) -> None:
    """Every open connection stays open and says nothing more, as behind a firewall that forgot them: those of the Lease, by
    which it is noticed first, and those of the watches."""
    target = urlsplit(cluster.url)
    with FrozenProxy(str(target.hostname), int(target.port or 0)) as proxy:
        operator = Operator(cluster, namespace, "behind", through(cluster, proxy.port, "behind")).start()
        cluster.apply(resource(), namespace)
        settled(cluster, operator, namespace)
        edit(cluster, namespace, 3)
        wait(lambda: acted(cluster, namespace, 3))
        proxy.freeze()
        edit(cluster, namespace, 4)
        began = time.monotonic()
        wait(lambda: acted(cluster, namespace, 4), 150, "it goes on over new connections")
        print(f"acted {time.monotonic() - began:.0f} s after the connections fell silent")
        assert operator.stop() == 0
