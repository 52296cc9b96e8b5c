"""Who leads: two operators, one Lease; and what is left when none runs."""

from __future__ import annotations

import signal
import threading

import pytest
from api_proxy import ApiProxy
from control_plane_kit import Cluster, Operator, acted, child, edit, resource, settled, wait

BOOT = "chat-boot"
KINDS = ("deployment", "service", "configmap", "serviceaccount", "secret", "replicaset", "pod")


def holder(cluster: Cluster, namespace: str) -> str:
    return str(((cluster.get("lease", "weir-operator", namespace) or {}).get("spec") or {}).get("holderIdentity") or "")


def test_leaders_follow_one_another_and_a_sleeper_writes_nothing(cluster: Cluster, namespace: str) -> None:
    first = Operator(cluster, namespace, "first").start()
    cluster.apply(resource(), namespace)
    settled(cluster, first, namespace)
    second = Operator(cluster, namespace, "second").start()
    wait(lambda: second.metric("weir_operator_leader") == 0)
    one = holder(cluster, namespace)

    assert first.stop() == 0  # gives the Lease back: the other need not wait for it to run out
    edit(cluster, namespace, 5)
    wait(lambda: acted(cluster, namespace, 5), 10, "the second operator acts")
    two = holder(cluster, namespace)
    assert two not in ("", one)
    transitions = cluster.get("lease", "weir-operator", namespace)["spec"]["leaseTransitions"]

    third = Operator(cluster, namespace, "third").start()
    wait(lambda: third.metric("weir_operator_leader") == 0)
    assert second.process is not None
    second.process.send_signal(signal.SIGSTOP)  # asleep with the Lease in hand
    edit(cluster, namespace, 6)
    wait(lambda: acted(cluster, namespace, 6), 40, "the third operator takes over")
    assert holder(cluster, namespace) not in (one, two)
    assert cluster.get("lease", "weir-operator", namespace)["spec"]["leaseTransitions"] > transitions
    before = len(cluster.writes(namespace))
    second.process.send_signal(signal.SIGCONT)
    wait(lambda: second.metric("weir_operator_leader") == 0, why="the sleeper sees that it no longer leads")
    assert [w["verb"] for w in cluster.writes(namespace)[before:]] == []
    assert (second.stop(), third.stop()) == (0, 0)
    for operator in (first, second, third):
        assert "Traceback" not in operator.log


@pytest.mark.parametrize(("write", "kind", "name"), [
    (f"/configmaps/{BOOT}", "configmap", BOOT), ("/inferencedeployments/chat/status", "infd", "chat"),
])
def test_what_a_sleeper_was_about_to_write_overwrites_nothing(
    cluster: Cluster, namespace: str, write: str, kind: str, name: str,
) -> None:
    """It is stopped between its look at the clock and the arrival of its write: only the API server can refuse that one."""
    armed, held, go, answered = (threading.Event() for _ in range(4))

    def stop(_: int, moment: str, path: str) -> None:
        if not path.endswith(write):
            return
        if moment == "before" and armed.is_set() and not held.is_set():
            assert first.process
            first.process.send_signal(signal.SIGSTOP)
            held.set()
            go.wait(120)
        elif moment == "after" and go.is_set():
            answered.set()

    with ApiProxy(cluster) as proxy:
        first = Operator(cluster, namespace, "first", proxy.kubeconfig(namespace)).start()
        cluster.apply(resource(), namespace)
        settled(cluster, first, namespace)
        second = Operator(cluster, namespace, "second").start()
        wait(lambda: second.metric("weir_operator_leader") == 0)
        cluster.quiet(first, namespace)
        proxy.at_write = stop
        armed.set()
        edit(cluster, namespace, 4)
        try:
            assert held.wait(30), "it is about to write"
            edit(cluster, namespace, 5)
            wait(lambda: acted(cluster, namespace, 5), 60, "the second takes over")
            cluster.quiet(second, namespace)
            before = cluster.get(kind, name, namespace)["metadata"]["resourceVersion"]
            go.set()
            assert answered.wait(30), "the write of the first arrives"
            assert cluster.get(kind, name, namespace)["metadata"]["resourceVersion"] == before
        finally:
            go.set()
            first.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
        wait(lambda: first.metric("weir_operator_leader") == 0, why="the sleeper sees that it no longer leads")
        assert acted(cluster, namespace, 5)
        assert (first.stop(), second.stop()) == (0, 0)
    assert "Traceback" not in first.log + second.log


def test_a_lease_that_somebody_deletes_is_made_anew_by_who_held_it(cluster: Cluster, namespace: str) -> None:
    first = Operator(cluster, namespace, "first").start()
    cluster.apply(resource(), namespace)
    settled(cluster, first, namespace)
    second = Operator(cluster, namespace, "second").start()
    wait(lambda: second.metric("weir_operator_leader") == 0)
    one, old = holder(cluster, namespace), cluster.get("lease", "weir-operator", namespace)["metadata"]["uid"]
    cluster.kubectl("delete", "lease", "weir-operator", "-n", namespace)
    wait(lambda: cluster.get("lease", "weir-operator", namespace)["metadata"]["uid"] != old, why="there is one again")
    assert holder(cluster, namespace) == one
    edit(cluster, namespace, 5)
    wait(lambda: acted(cluster, namespace, 5), why="it goes on")
    assert (first.metric("weir_operator_leader"), second.metric("weir_operator_leader")) == (1, 0)
    assert second.metric("weir_operator_takeovers_total") == 0
    assert (first.stop(), second.stop()) == (0, 0)
    assert "Traceback" not in first.log + second.log


def test_deleting_it_leaves_nothing_even_with_the_operator_gone(cluster: Cluster, namespace: str) -> None:
    operator = Operator(cluster, namespace).start()
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    assert operator.stop() == 0
    assert holder(cluster, namespace) == ""
    cluster.kubectl("delete", "infd", "chat", "-n", namespace, "--timeout=10s")

    def left() -> str:
        return cluster.kubectl("get", ",".join(KINDS), "-n", namespace, "-l", "weir.dev/name=chat", "-o", "name").stdout

    wait(lambda: not left(), 60, "garbage collection")


def test_a_deployment_deleted_while_no_operator_ran_comes_back(cluster: Cluster, namespace: str) -> None:
    first = Operator(cluster, namespace, "first").start()
    cluster.apply(resource(), namespace)
    settled(cluster, first, namespace)
    first.stop()
    cluster.kubectl("delete", "deployment", "chat", "-n", namespace)
    second = Operator(cluster, namespace, "second").start()
    wait(lambda: child(cluster, namespace, "deployment"), 40)
    wait(lambda: second.metric("weir_operator_watch_lag_seconds") == 0, why="watches tell all that the first list showed")
    assert second.stop() == 0
