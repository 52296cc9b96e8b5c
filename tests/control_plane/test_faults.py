"""What happens around an operator: its definition goes and comes back, the API server stands still, somebody writes on."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest
from control_plane_kit import ROOT, Cluster, Operator, acted, child, condition, edit, make_ready, resource, settled, wait

CRD = "inferencedeployments.weir.dev"


def answer(operator: Operator, where: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/{where}", timeout=5) as found:
            return int(found.status), found.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def owners(cluster: Cluster, namespace: str) -> list[str]:
    deployment = child(cluster, namespace, "deployment") or {"metadata": {}}
    return [owner["uid"] for owner in deployment["metadata"].get("ownerReferences", ())]


def install(cluster: Cluster) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=30s")


@pytest.mark.parametrize("one_namespace", [False, True])
def test_the_definition_comes_late_goes_and_comes_back(cluster: Cluster, namespace: str, one_namespace: bool) -> None:
    """It is served a moment after it is announced, and at a flip no list sees it gone: the watches find it all the same."""
    cluster.kubectl("delete", "crd", CRD, "--timeout=60s")
    operator = Operator(cluster, namespace)
    try:
        operator.start(scope=one_namespace)
        said = wait(lambda: (a := answer(operator, "readyz"))[0] == 503 and CRD in a[1] and a[1], why="it says what is missing")
        assert "is not installed" in said
        assert answer(operator, "healthz")[0] == 200, "and that is no reason to be restarted"
        for turn in range(3):
            install(cluster)
            cluster.apply(resource(), namespace)
            uid = cluster.kubectl("get", "infd", "chat", "-n", namespace, "-o", "jsonpath={.metadata.uid}").stdout
            wait(lambda uid=uid: owners(cluster, namespace) == [uid], 90, f"this resource is reconciled, turn {turn}")
            wait(lambda: answer(operator, "readyz")[0] == 200, 60)
            if turn < 2:  # its children may stay: the collector may not have known the kind yet
                cluster.kubectl("delete", "crd", CRD, "--timeout=60s")
    finally:
        install(cluster)
        assert operator.stop() == 0
    assert "Traceback" not in operator.log


def test_a_definition_of_a_later_version_is_no_reason_to_give_up_what_serves(cluster: Cluster, namespace: str) -> None:
    """An upgrade replaces the definition first, a rollback leaves it behind; its defaults are in every object then."""
    later = json.loads(cluster.kubectl("get", "crd", CRD, "-o", "json").stdout)
    fields = later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    fields["tuning"]["properties"]["tomorrow"] = {"type": "string", "default": "Off"}
    operator = Operator(cluster, namespace).start()
    try:
        said = json.dumps(without_status(later))
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=said)
        cluster.apply(resource(), namespace)
        wait(lambda: cluster.get("infd", "chat", namespace)["spec"]["tuning"].get("tomorrow") == "Off")
        make_ready(cluster, namespace)
        wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
    finally:
        install(cluster)
    assert operator.stop() == 0


def without_status(definition: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": definition["metadata"]["name"]}
    return {k: v for k, v in definition.items() if k in ("apiVersion", "kind", "spec")} | {"metadata": meta}


def test_an_api_server_that_stands_still_and_comes_back(cluster: Cluster, namespace: str) -> None:
    operator = Operator(cluster, namespace).start()
    cluster.apply(resource(), namespace)
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
    server = cluster.named("kube-apiserver")
    server.send_signal(signal.SIGSTOP)
    try:
        wait(lambda: operator.metric("weir_operator_leader") == 0, 60, "what it cannot renew it does not hold")
    finally:
        server.send_signal(signal.SIGCONT)
    wait(lambda: operator.metric("weir_operator_leader") == 1, 60, "it leads again")
    edit(cluster, namespace, 6)
    wait(lambda: acted(cluster, namespace, 6), 60)
    assert condition(cluster, namespace, "Ready")["status"] == "True"
    assert operator.process and operator.process.poll() is None
    assert operator.stop() == 0
    assert "Traceback" not in operator.log


def test_somebody_who_writes_all_the_time_does_not_keep_us_from_our_work(cluster: Cluster, namespace: str) -> None:
    operator = Operator(cluster, namespace).start()
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    stop = threading.Event()

    def storm() -> None:
        i = 0
        while not stop.is_set():
            i += 1
            for kind, name in (("deployment", "chat"), ("configmap", "chat-boot"), ("infd", "chat")):
                cluster.kubectl("annotate", kind, name, "-n", namespace, f"storm={i}", "--overwrite", check=False)

    threads = [threading.Thread(target=storm) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for seconds in (3, 4, 5):
            edit(cluster, namespace, seconds)
            wait(lambda: acted(cluster, namespace, seconds), 60, "our change arrives all the same")  # noqa: B023
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    cluster.quiet(operator, namespace)
    assert "storm" in cluster.get("deployment", "chat", namespace)["metadata"]["annotations"], "and theirs stays"
    assert operator.stop() == 0
    assert "Traceback" not in operator.log
