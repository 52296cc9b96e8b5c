"""What befalls the watches: cut again and again, too old to go on, ended for good, the API server gone under them."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_proxy import ApiProxy
from control_plane_kit import (
    Cluster,
    Operator,
    acted,
    child,
    condition,
    edit,
    make_ready,
    resource,
    restart,
    settled,
    wait,
)

from weir_operator.handlers.watches import AGAIN_SECONDS
from weir_operator.loops.reconcile import WATCHED

WATCH = "/apis/weir.dev/v1alpha1/inferencedeployments?watch=1&timeoutSeconds=2&resourceVersion="


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    with ApiProxy(cluster) as made:
        yield made


def behind(cluster: Cluster, namespace: str, proxy: ApiProxy) -> Operator:
    return Operator(cluster, namespace, "behind", proxy.kubeconfig("behind")).start()


def threads(operator: Operator) -> int:
    assert operator.process
    lines = Path(f"/proc/{operator.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def compact(cluster: Cluster) -> None:
    """Forget every version of every object but the present ones."""
    etcd = next(arg.split("=")[1] for arg in cluster.named("etcd").args if "--listen-client-urls" in str(arg))  # type: ignore[union-attr]

    def ask(where: str, **body: object) -> dict:
        request = urllib.request.Request(f"{etcd}/v3/{where}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))

    revision = ask("maintenance/status")["header"]["revision"]
    ask("kv/compaction", revision=revision, physical=True)


def test_watches_that_are_cut_every_second_lose_nothing(cluster: Cluster, namespace: str, proxy: ApiProxy) -> None:
    """Each goes on where it was: nothing is listed anew for it."""
    operator = behind(cluster, namespace, proxy)
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    before, proxy.cut_after = proxy.seen["lists"], 1.0
    proxy.cut()
    took = []
    for seconds in range(3, 8):
        cuts = proxy.seen["cuts"]
        wait(lambda: proxy.seen["cuts"] > cuts + 10, why="watches are cut")  # noqa: B023
        edit(cluster, namespace, seconds)
        began = time.monotonic()
        wait(lambda: acted(cluster, namespace, seconds))  # noqa: B023
        took.append(time.monotonic() - began)
    assert proxy.seen["lists"] == before
    cluster.kubectl("delete", "service", "chat", "-n", namespace)
    wait(lambda: cluster.get("service", "chat", namespace), why="a deletion between two watches is seen")
    print(f"{proxy.seen['cuts']} watches cut; changes carried out after {', '.join(f'{t:.1f}' for t in took)} s")
    assert proxy.seen["cuts"] > 50
    assert proxy.seen["lists"] <= before + 1, "whether somebody else has taken the name"
    assert operator.stop() == 0
    assert "Traceback" not in operator.log and "watches-ended" not in operator.log


def test_what_happened_in_a_gap_that_no_watch_can_tell_of_is_made_up_for(
    cluster: Cluster, namespace: str, proxy: ApiProxy,
) -> None:
    """While the operator is cut off, a resource and a child go and a child is edited; etcd is compacted and the API server
    begins anew, so that what the watches last heard of is 410 Gone."""
    operator = behind(cluster, namespace, proxy)
    for name in ("chat", "other"):
        cluster.apply(resource(name), namespace)
    settled(cluster, operator, namespace)
    wait(lambda: cluster.get("deployment", "other", namespace))
    version = cluster.get("infd", "other", namespace)["metadata"]["resourceVersion"]
    proxy.go_away()
    cluster.kubectl("delete", "infd", "other", "-n", namespace)
    cluster.kubectl("delete", "service", "chat", "-n", namespace)
    empty = json.dumps({"data": {"boot.yaml": "knobs: {}\n"}})
    cluster.kubectl("patch", "configmap", "chat-boot", "-n", namespace, "--type=merge", "-p", empty)
    wait(lambda: cluster.get("deployment", "other", namespace) is None, 60, "the collector")
    compact(cluster)
    restart(cluster, "kube-apiserver")
    assert "410" in cluster.kubectl("get", "--raw", WATCH + version).stdout
    before, proxy.away = proxy.seen["lists"], False
    began = time.monotonic()
    wait(lambda: cluster.get("service", "chat", namespace), 60, "what was deleted comes back")
    wait(lambda: "ttft" in (child(cluster, namespace, "configmap") or {})["data"]["boot.yaml"], 60, "the edit is undone")
    wait(lambda: operator.metric("weir_operator_resources") == 1, 60, "what went is forgotten")
    print(f"right again {time.monotonic() - began:.1f} s after the API server was there again")
    assert proxy.seen["lists"] > before
    wait(lambda: operator.metric("weir_operator_watch_lag_seconds") == 0, 20, "and nobody waits for news of it")
    cluster.quiet(operator, namespace)
    assert cluster.get("deployment", "other", namespace) is None
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


def test_the_only_resource_that_went_in_a_gap_is_forgotten(cluster: Cluster, namespace: str, proxy: ApiProxy) -> None:
    """Its children were collected, too: no list and no watch has anything to tell."""
    operator = behind(cluster, namespace, proxy)
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    cluster.quiet(operator, namespace)
    proxy.go_away()
    cluster.kubectl("delete", "infd", "chat", "-n", namespace)
    kinds = "deployment,replicaset,pod,service,configmap,serviceaccount,networkpolicy"
    wait(lambda: not cluster.kubectl("get", kinds, "-n", namespace, "-l", "weir.dev/name=chat", "-o", "name").stdout, 60)
    proxy.watches_expire, proxy.away = True, False
    wait(lambda: operator.metric("weir_operator_resources") == 0, 60, "what went is forgotten")
    proxy.watches_expire = False
    cluster.apply(resource(), namespace)
    wait(lambda: child(cluster, namespace, "deployment"), 30, "and another is made when one comes")
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


@pytest.mark.parametrize("fault", [{"watches_expire": True}, {"watches_end": 410}, {"watches_tear": True}], ids=str)
def test_watches_that_cannot_go_on_begin_again_at_a_pace_and_lose_nothing(
    cluster: Cluster, namespace: str, proxy: ApiProxy, fault: dict[str, Any],
) -> None:
    """410 as an event in the stream, 410 as an answer, a stream that ends in the middle of a line."""
    operator = behind(cluster, namespace, proxy)
    for name in ("chat", "other"):
        cluster.apply(resource(name), namespace)
    settled(cluster, operator, namespace)
    wait(lambda: cluster.get("deployment", "other", namespace))
    vars(proxy).update(fault)
    proxy.cut()
    cluster.kubectl("delete", "infd", "other", "-n", namespace)
    cluster.kubectl("delete", "service", "chat", "-n", namespace)
    edit(cluster, namespace, 7)
    wait(lambda: operator.metric("weir_operator_resources") == 1, 60, "what went is forgotten")
    wait(lambda: acted(cluster, namespace, 7), 60, "the change is carried out")
    wait(lambda: cluster.get("service", "chat", namespace), 60, "what was deleted comes back")
    watches, began = proxy.seen["watches"], time.monotonic()
    if "watches_tear" not in fault:  # there may be no next line
        wait(lambda: proxy.seen["watches"] > watches + 2 * len(WATCHED), 60, "they are begun again and again")
        assert time.monotonic() - began > 1.5 * AGAIN_SECONDS, "and not as fast as they can"
    vars(proxy).update(dict.fromkeys(fault))
    edit(cluster, namespace, 8)
    wait(lambda: acted(cluster, namespace, 8), 60, "and it goes on")
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_watches_that_fall_silent_are_noticed(cluster: Cluster, namespace: str, proxy: ApiProxy) -> None:
    """They alone: the Lease is renewed all the while, and so gives nothing away."""
    operator = behind(cluster, namespace, proxy)
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    cluster.quiet(operator, namespace)
    proxy.hush()
    edit(cluster, namespace, 4)
    began = time.monotonic()
    wait(lambda: acted(cluster, namespace, 4), 150, "a silent watch is noticed")
    print(f"noticed {time.monotonic() - began:.0f} s after the watches fell silent")
    assert operator.metric("weir_operator_takeovers_total") == 1
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_an_api_server_that_ends_and_begins_again(cluster: Cluster, namespace: str, seconds: int) -> None:
    operator = Operator(cluster, namespace).start()
    cluster.apply(resource(), namespace)
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
    restart(cluster, "kube-apiserver", away=seconds)
    began = time.monotonic()
    edit(cluster, namespace, 9)
    wait(lambda: acted(cluster, namespace, 9), 60, "it goes on")
    print(f"a change was carried out {time.monotonic() - began:.1f} s after the API server was back from {seconds} s")
    cluster.kubectl("delete", "service", "chat", "-n", namespace)
    wait(lambda: cluster.get("service", "chat", namespace), 60, "the watches go on, too")
    assert condition(cluster, namespace, "Ready")["status"] == "True"
    assert operator.process and operator.process.poll() is None, "the same process throughout"
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


def test_watches_that_end_again_and_again_leave_no_thread_behind_and_can_be_stopped(
    cluster: Cluster, namespace: str, proxy: ApiProxy,
) -> None:
    """A 404 ends them for good, each time; they are begun again without an end, and a stop in between is
    a stop."""
    operator = behind(cluster, namespace, proxy)
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    proxy.watches_end = 404
    proxy.cut()
    wait(lambda: operator.log.count("begin again") >= 1, 60, "they are begun again")
    before = threads(operator)
    wait(lambda: operator.log.count("begin again") >= 4, 60, "and again")
    assert threads(operator) <= before + 1
    proxy.watches_end = None
    edit(cluster, namespace, 8)
    wait(lambda: acted(cluster, namespace, 8), 30, "once they are served the change is found")
    proxy.watches_end = 404
    proxy.cut()
    ended = operator.log.count("begin again")
    wait(lambda: operator.log.count("begin again") > ended, 30, "they have just ended")
    began = time.monotonic()
    assert operator.stop() == 0
    print(f"stopped within {time.monotonic() - began:.1f} s of the signal")


def test_a_stop_is_a_stop_at_any_moment_of_the_start(cluster: Cluster, namespace: str) -> None:
    """From before anything is listened to until the watches run. Python's own way to end holds until our handler is there."""
    slowest = 0.0
    term, ctrl_c = (signal.SIGTERM, -signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT, 130, 1)
    moments = (0.3, 0.6, 0.9, 1.2, 1.6, 2.2)
    for moment, (sign, *others) in zip(moments, (term, ctrl_c) * 3, strict=True):
        operator = Operator(cluster, namespace, f"at-{moment}").start()
        time.sleep(moment)
        began = time.monotonic()
        status = operator.stop(sign)
        slowest = max(slowest, time.monotonic() - began)
        ours = "leading" in operator.log
        assert status == 0 or (not ours and status in others), (moment, status, operator.log[-2000:])
        assert "Traceback" not in operator.log, operator.log
    print(f"the slowest of six stops took {slowest:.1f} s")
