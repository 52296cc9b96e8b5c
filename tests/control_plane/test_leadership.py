"""Who leads: two operators, one Lease; and what is left when none runs."""

from __future__ import annotations

import signal

from control_plane_kit import Cluster, Operator, acted, child, edit, resource, settled, wait

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
