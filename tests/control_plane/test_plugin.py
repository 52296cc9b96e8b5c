"""`kubectl infd` against a real API server: statuses as the operator writes them, edits as the CRD allows them, and pods and
the operator itself asked through the API server's proxy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import yaml
from aiohttp import web
from control_plane_kit import ASSETS, ROOT, Cluster, Operator, child, decoded, make_ready, resource, settled, wait

from weir_server.contract import CONTROL_PORT, HTTP_PORT

HISTORY = [{
    "time": "2026-01-01T00:00:00Z", "pod": "chat-1", "rule": "set-point", "outcome": "Moved", "reason": "more rows fit",
    "changes": {"max_batch_size": [4, 9], "admission_watermark": [0.01, 0.03]}, "predicted": {"goodput": 1.5},
}]
TUNING = {
    "mode": "Auto", "slo": "97%", "history": HISTORY,
    "pods": [{"name": "chat-1", "knobs": {"maxBatchSize": 9, "maxQueueDepth": 12}, "outcome": "Settling"}],
}
READY = {
    "type": "Ready", "status": "True", "reason": "Serving", "message": "1 of 1 pods serve",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def infd(cluster: Cluster, namespace: str) -> Run:
    """The plugin as kubectl starts it, in the test's namespace."""
    def run(*args: str, entry: str = "main") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", f"from weir_operator.cli.plugin import {entry}; {entry}()", *args]
        env = {
            **os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": f"{ASSETS}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "200",
        }
        place = ["-n", namespace] if entry == "main" else []
        return subprocess.run([*command, *place], capture_output=True, text=True, env=env, timeout=120, check=False)

    return run


@pytest.fixture
def written(cluster: Cluster, namespace: str) -> None:
    """A resource with a status, and no operator."""
    cluster.apply(resource(), namespace)
    status = {"readyReplicas": 1, "url": "http://chat", "model": "m", "conditions": [READY], "tuning": TUNING}
    patch = json.dumps({"status": status})
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)


@pytest.mark.usefixtures("written")
def test_status_explain_and_history_say_what_the_status_holds(infd: Run) -> None:
    text = infd("status").stdout
    assert "chat  1/1 ready" in text
    assert "● Ready: Serving – 1 of 1 pods serve" in text
    assert "\x1b" not in text  # no colours in a pipe
    explained = infd("explain", "chat").stdout
    assert "97%" in explained
    assert "chat-1: maxBatchSize 9, maxQueueDepth 12." in explained
    assert "Moved (set-point) at 2026-01-01T00:00:00Z: more rows fit" in explained
    assert "predicted: goodput 1.5" in explained
    assert "As of the last status: the operator cannot be asked (no pod of the operator was found)." in explained
    assert "admission_watermark 1% → 3%, max_batch_size 4 → 9" in infd("history", "chat").stdout
    assert json.loads(infd("history", "chat", "-o", "json").stdout) == HISTORY
    assert yaml.safe_load(infd("explain", "chat", "-o", "yaml").stdout)["status"]["mode"] == "Auto"
    [shown] = json.loads(infd("status", "-o", "json").stdout)
    assert shown["resource"]["metadata"]["name"] == "chat" and shown["children"] == []
    advised = infd("advise", "chat")
    assert (advised.returncode, advised.stderr) == (1, "kubectl-infd: no pod of the operator was found\n")


@pytest.mark.usefixtures("written")
def test_pause_resume_and_mode_write_one_field(infd: Run, cluster: Cluster, namespace: str) -> None:
    def spec() -> Any:
        return cluster.get("infd", "chat", namespace)["spec"]["tuning"]

    assert infd("pause", "chat").stdout == "inferencedeployments/chat paused\n"
    assert (spec()["mode"], spec()["paused"]) == ("Auto", True)
    assert infd("resume", "chat").returncode == 0
    assert spec()["paused"] is False
    assert infd("tuning", "mode", "chat", "Advise").returncode == 0
    assert (spec()["mode"], spec()["paused"]) == ("Advise", False)
    managers = {m["manager"] for m in cluster.get("infd", "chat", namespace)["metadata"]["managedFields"]}
    assert "kubectl-infd" in managers


@pytest.mark.usefixtures("written")
def test_a_knob_rollback_passes_the_crds_rules_and_is_undone(infd: Run, cluster: Cluster, namespace: str) -> None:
    declared = {"maxBatchSize": {"initial": 4, "max": 32}, "kvCacheBudget": {"max": "2Gi"}}
    cluster.apply(resource(tuning={"knobs": declared}), namespace)

    def knobs() -> Any:
        return cluster.get("infd", "chat", namespace)["spec"]["tuning"]["knobs"]

    before = knobs()
    done = infd("tuning", "rollback", "chat")
    assert "pinned to admissionWatermarkPercent 1, maxBatchSize 4, as before the move of chat-1" in done.stdout, done.stderr
    assert knobs()["maxBatchSize"] == {"min": 4, "initial": 4, "max": 4}
    assert knobs()["admissionWatermarkPercent"] == {"min": 1, "initial": 1, "max": 1}
    assert knobs()["kvCacheBudget"] == {"max": "2Gi"}
    assert infd("tuning", "release", "chat").returncode == 0
    assert {k: v for k, v in knobs().items() if v} == {k: v for k, v in before.items() if v}
    assert "weir.dev/bounds-before-rollback" not in cluster.get("infd", "chat", namespace)["metadata"].get("annotations", {})
    assert infd("tuning", "release", "chat").stderr == "kubectl-infd: no knob is pinned\n"


@pytest.mark.usefixtures("written")
def test_names_are_completed_from_the_namespace(infd: Run, cluster: Cluster, namespace: str) -> None:
    cluster.apply(resource("other"), namespace)
    assert infd("explain", "--namespace", namespace, "", entry="complete").stdout.splitlines() == ["chat", "other", ":4"]
    assert infd("explain", "--namespace", namespace, "ch", entry="complete").stdout.splitlines() == ["chat", ":4"]


def test_a_name_that_is_not_there_is_one_line(infd: Run, cluster: Cluster) -> None:
    done = infd("explain", "nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("kubectl-infd: no InferenceDeployment 'nothing'")
    assert "Traceback" not in done.stderr
    refused = subprocess.run(
        [sys.executable, "-c", "from weir_operator.cli.plugin import main; main()", "status"], capture_output=True, text=True,
        env={**os.environ, "KUBECONFIG": str(cluster.token_config("nobody", "nobody"))}, timeout=60, check=False,
    )
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1), refused.stderr


# ---------------------------------------------------------------- with an operator

@pytest.fixture
def operator(cluster: Cluster, namespace: str) -> Any:
    made = Operator(cluster, namespace).start("--tick-seconds=3", "--poll-seconds=1", "--decision-log=-")
    yield made
    assert made.stop() == 0
    assert "Traceback" not in made.log


def test_a_template_rollback_prints_the_spec_before_and_writes_it(
    infd: Run, cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    cluster.apply(resource(engine={"prefillChunkTokens": 64}, slo={"ttft": "2s", "tpot": "80ms"}), namespace)
    settled(cluster, operator, namespace)
    wait(lambda: child(cluster, namespace, "replicaset"), why="the first revision")
    assert "no earlier revision is kept" in infd("rollback", "chat").stderr
    cluster.apply(resource(engine={"prefillChunkTokens": 128}, slo={"ttft": "3s", "tpot": "80ms"}), namespace)

    def two() -> bool:
        listed = cluster.kubectl("get", "replicaset", "-n", namespace, "-o", "json").stdout
        return len(json.loads(listed)["items"]) == 2

    wait(two, why="a second revision")
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", '{"spec": {"replicas": 2}}')
    printed = infd("rollback", "chat")
    assert printed.returncode == 0, printed.stderr
    spec = yaml.safe_load(printed.stdout)["spec"]
    assert (spec["engine"]["prefillChunkTokens"], spec["slo"]["ttft"]) == (64, "2s")
    assert "--write puts it back" in printed.stderr
    assert cluster.get("infd", "chat", namespace)["spec"]["engine"]["prefillChunkTokens"] == 128
    assert infd("rollback", "chat", "--write").returncode == 0
    back = cluster.get("infd", "chat", namespace)["spec"]
    assert (back["engine"]["prefillChunkTokens"], back["slo"]["ttft"], back["replicas"]) == (64, "2s", 2)


def own_address() -> str:
    """An address of this machine that the API server's proxy will go to: it refuses loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        return str(s.getsockname()[0])


EXPOSITION = """
weir_process_start_time_seconds 1
weir_requests_running 3
weir_requests_waiting 2
weir_requests_waiting_by_bound{{bound="kv"}} 2
weir_kv_usage_ratio 0.25
weir_requests_rejected_total{{reason="queue_full",bound="kv"}} {n}
weir_requests_finished_total{{reason="stop"}} {n}
weir_time_to_first_token_seconds_bucket{{le="0.5"}} {n}
weir_time_to_first_token_seconds_bucket{{le="+Inf"}} {n}
weir_time_per_output_token_seconds_bucket{{le="+Inf"}} 0
weir_knob_effective{{knob="max_batch_size"}} 7
weir_knob_effective{{knob="max_queue_depth"}} 12
weir_knob_effective{{knob="admission_watermark"}} 0.02
"""


@pytest.fixture
async def metrics() -> AsyncIterator[str]:
    """/metrics on the port that pods have for it; each reading finds ten rows more."""
    address, served = own_address(), 0
    if not address or address.startswith("127."):
        pytest.skip("this machine has no address but loopback, which the API server's proxy refuses")

    async def get(_: web.Request) -> web.Response:
        nonlocal served
        served += 10
        return web.Response(text=EXPOSITION.format(n=served))

    app = web.Application()
    app.router.add_get("/metrics", get)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, HTTP_PORT).start()
    except OSError as e:
        pytest.skip(f"port {HTTP_PORT} is taken on this machine: {e.strerror}")
    yield address
    await runner.cleanup()


OPERATOR_LABELS = {  # of a release with a name of its own
    "app.kubernetes.io/name": "inference", "app.kubernetes.io/component": "operator", "app.kubernetes.io/part-of": "weir",
}
BESIDE = pytest.mark.parametrize("more", [
    {}, {"sidecar": True, "template": {"spec": {"containers": [{"name": "app", "image": "app:1"}]}}},
], ids=["alone", "sidecar"])


def operator_pod(cluster: Cluster, namespace: str, name: str, address: str, port: int) -> None:
    """There is no node: a Pod object that says where the operator listens."""
    container = {"name": "operator", "image": "x", "ports": [{"name": "health", "containerPort": port}]}
    cluster.apply({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": OPERATOR_LABELS},
        "spec": {"containers": [container], "nodeName": "none"},
    }, namespace)
    status = {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}
    cluster.kubectl("patch", "pod", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", json.dumps(status))


@BESIDE
async def test_the_operator_and_the_pods_answer_through_the_api_servers_proxy(
    infd: Run, cluster: Cluster, namespace: str, operator: Operator, metrics: str, fake_server: Any, tmp_path: Any,
    more: dict[str, Any],
) -> None:
    await asyncio.to_thread(cluster.apply, resource(**more), namespace)
    await asyncio.to_thread(settled, cluster, operator, namespace)
    label = "weir.dev/name=chat"
    secret = await asyncio.to_thread(cluster.kubectl, "get", "secret", "-n", namespace, "-l", label, "-o", "json")
    try:
        await fake_server(metrics, CONTROL_PORT, decoded(json.loads(secret.stdout)["items"][0], "token"))
    except OSError as e:
        pytest.skip(f"port {CONTROL_PORT} is taken on this machine: {e.strerror}")
    pod = (await asyncio.to_thread(make_ready, cluster, namespace, metrics))["metadata"]["name"]
    await asyncio.to_thread(operator_pod, cluster, namespace, "weir-follower", metrics, HTTP_PORT)  # not the leader: 404
    await asyncio.to_thread(operator_pod, cluster, namespace, "weir-leader", metrics, operator.port)

    def explained() -> Any:
        done = infd("explain", "chat", "-o", "json")
        pods = json.loads(done.stdout).get("pods", ())
        return next((p for p in pods if p.get("record") and p["record"]["outcome"] == "Idle"), None)

    found = await asyncio.to_thread(wait, explained, 60, "the tuner's own words")
    assert found["pod"] == pod and found["limit"]["what"] == "nothing"
    text = (await asyncio.to_thread(infd, "explain", "chat")).stdout
    assert "nothing limits it: 0 of 4 rows run, 0 of 32 wait" in text
    assert "Traffic: nothing has arrived" in text

    top = await asyncio.to_thread(infd, "top", "chat", "--seconds=1")
    row = next(line.split() for line in top.stdout.splitlines() if line.startswith(pod))
    assert row[1:5] == ["3", "2", "kv", "25%"] and row[-4:] == ["7", "12", "2%", "–"], top.stdout
    shown = json.loads((await asyncio.to_thread(infd, "top", "chat", "-o", "json")).stdout)[pod]
    assert shown["finishedPerSecond"] == pytest.approx(5, rel=0.5) and shown["ttft"]["p50"] == 0.25

    unreached = await asyncio.to_thread(infd, "bench", "chat")  # no kubelet carries a port
    assert unreached.returncode == 1 and "kubectl port-forward to" in unreached.stderr, unreached.stderr
    assert len(unreached.stderr.splitlines()) == 1

    tree = (await asyncio.to_thread(infd, "status", "chat")).stdout
    assert "● Deployment chat  1 of 1 ready" in tree or "○ Deployment chat" in tree
    assert f"● Pod {pod}  ready" in tree and "maxBatchSize 4" in tree
    assert tree.index("Deployment chat") < tree.index(f"Pod {pod}")

    log = tmp_path / "operator.log"
    log.write_text(operator.log)  # the log lines and the decisions in one stream, as a container has them
    command = [sys.executable, "-m", "weir_operator", "replay", str(log)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 3


@BESIDE
def test_the_pod_of_a_size_is_as_the_servers_pods_are_and_goes_however_it_ends(
    cluster: Cluster, namespace: str, operator: Operator, more: dict[str, Any],
) -> None:
    """There is no node, so it never runs: Ctrl-C ends the wait."""
    more = {**more, "template": {"spec": {**more.get("template", {}).get("spec", {}), "nodeSelector": {"a": "b"}}}}
    cluster.apply(resource(replicas=0, **more), namespace)
    settled(cluster, operator, namespace)

    def pods() -> list[Any]:
        return list(json.loads(cluster.kubectl("get", "pod", "-n", namespace, "-o", "json").stdout)["items"])

    assert pods() == []
    command = [sys.executable, "-c", "from weir_operator.cli.plugin import main; main()", "size", "chat", "-n", namespace]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": f"{ASSETS}{os.pathsep}{os.environ['PATH']}"},
    )
    try:
        [pod] = wait(pods, 60, "its pod")
        assert pod["spec"]["containers"][0]["args"][:2] == ["size", "/models/m.gguf"]
        assert pod["spec"]["nodeSelector"] == {"a": "b"} and "weir.dev/name" not in pod["metadata"].get("labels", {})
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
    wait(lambda: not pods(), 60, "it is gone")


@pytest.mark.usefixtures("written")
def test_what_kubectl_cannot_do_is_its_own_sentence(infd: Run, cluster: Cluster, namespace: str) -> None:
    """No node: no log, no port-forward, no pod for a size. Each ends in one line and a status."""
    for verb in ("bench", "size"):
        done = infd(verb, "chat")
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "no pod of chat is ready" in infd("bench", "chat").stderr
    assert "no Deployment yet" in infd("size", "chat").stderr
    assert "No resources found" in infd("logs", "chat").stderr
