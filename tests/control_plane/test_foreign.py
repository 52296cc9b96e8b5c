"""What is somebody else's: objects that have our children's names, and a webhook that writes into what we apply."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from control_plane_kit import Cluster, Operator, child, condition, resource, settled, wait

VARIABLE = {"name": "INJECTED", "value": "by a webhook"}
LABELS = {"app": "theirs"}
POD = {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "app", "image": "app:1"}]}}
TARGET = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs"}
THEIRS = {
    "Deployment": ("apps/v1", {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": POD}),
    "PodDisruptionBudget": ("policy/v1", {"maxUnavailable": 1, "selector": {"matchLabels": LABELS}}),
    "HorizontalPodAutoscaler": ("autoscaling/v2", {"scaleTargetRef": TARGET, "minReplicas": 1, "maxReplicas": 2}),
}


@pytest.mark.parametrize("kind", THEIRS)
def test_an_object_of_a_childs_name_is_left_alone_and_outlives_the_resource(
    cluster: Cluster, namespace: str, operator: Operator, kind: str,
) -> None:
    version, spec = THEIRS[kind]
    meta = {"name": "chat", "labels": LABELS}
    cluster.apply({"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}, namespace)

    def theirs() -> Any:
        """Without what its own controller says of it."""
        found = cluster.get(kind, "chat", namespace)
        meta = {k: v for k, v in found["metadata"].items() if k in ("uid", "labels", "ownerReferences", "generation")}
        ours = [entry["manager"] for entry in found["metadata"]["managedFields"] if "weir" in entry["manager"]]
        return meta, found["spec"], ours

    def refused() -> Any:
        """What stands beside the pods leaves Ready alone."""
        where, reason = ("Ready", "NameTaken") if kind == "Deployment" else ("IntegrationsReady", "Refused")
        return (c := condition(cluster, namespace, where)).get("reason") == reason and c

    before = theirs()
    scaler = {"mode": "External", "scaler": "HorizontalPodAutoscaler", "maxReplicas": 3}
    cluster.apply(resource(autoscaling=scaler), namespace)
    said = wait(refused, why="it is said")
    assert f"{kind} chat exists" in said["message"]
    cluster.apply(resource(autoscaling=scaler, slo={"ttft": "5s", "tpot": "80ms"}), namespace)
    wait(lambda: "ttft: 5.0" in (child(cluster, namespace, "configmap") or {})["data"]["boot.yaml"], why="the rest goes on")
    assert theirs() == before
    cluster.kubectl("delete", "infd", "chat", "-n", namespace, "--timeout=10s")
    wait(lambda: not child(cluster, namespace, "configmap"), 60, "the collector")
    assert theirs() == before
    cluster.apply(resource(autoscaling=scaler), namespace)
    wait(refused)
    cluster.kubectl("delete", kind, "chat", "-n", namespace)
    wait(lambda: child(cluster, namespace, kind), 90, "it goes on by itself once the name is free")


class Injects(BaseHTTPRequestHandler):
    """A mutating webhook that adds an environment variable to the first container of every Deployment that lacks it."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        env = asked["object"]["spec"]["template"]["spec"]["containers"][0].get("env") or []
        patch = [{"op": "add", "path": "/spec/template/spec/containers/0/env", "value": [*env, VARIABLE]}]
        answer: dict[str, Any] = {"uid": asked["uid"], "allowed": True}
        if VARIABLE not in env:
            answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def injector(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[None]:
    """The webhook, in force for this namespace."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run([
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
        "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate),
    ], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Injects) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bundle = base64.b64encode(certificate.read_bytes()).decode()
        hook = {
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": namespace},
            "webhooks": [{
                "name": "inject.weir.dev", "sideEffects": "None", "admissionReviewVersions": ["v1"], "failurePolicy": "Fail",
                "clientConfig": {"url": f"https://127.0.0.1:{server.server_port}/", "caBundle": bundle},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "rules": [{
                    "operations": ["CREATE", "UPDATE"], "apiGroups": ["apps"], "apiVersions": ["v1"],
                    "resources": ["deployments"],
                }],
            }],
        }
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(hook))
        try:
            dry = ("create", "deployment", "x", "--image=x", "-n", namespace, "--dry-run=server", "-o", "json")
            wait(lambda: VARIABLE["name"] in cluster.kubectl(*dry, check=False).stdout, why="the webhook is in force")
            yield
        finally:
            cluster.kubectl("delete", "mutatingwebhookconfiguration", namespace)
            server.shutdown()


@pytest.mark.usefixtures("injector")
def test_a_webhook_that_writes_into_our_deployment_is_not_fought(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    def injected() -> bool:
        pod = cluster.get("deployment", "chat", namespace)["spec"]["template"]["spec"]
        return VARIABLE in pod["containers"][0].get("env", ())

    def rollouts() -> int:
        return len(cluster.kubectl("get", "rs", "-n", namespace, "-l", "weir.dev/name=chat", "-o", "name").stdout.split())

    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    cluster.quiet(operator, namespace)
    assert injected()
    before, passes = len(cluster.writes(namespace)), operator.metric("weir_operator_reconciles_total")
    cluster.kubectl("annotate", "infd/chat", "-n", namespace, "note=again")
    wait(lambda: operator.metric("weir_operator_reconciles_total") > passes, why="another pass")
    cluster.quiet(operator, namespace)
    assert [f"{w['verb']} {w['objectRef']['resource']}" for w in cluster.writes(namespace)[before:]] == []
    assert rollouts() == 1
    change = json.dumps({"spec": {"engine": {"prefillChunkTokens": 32}}})
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", change)
    wait(lambda: "--prefill-chunk-size=32" in str(cluster.get("deployment", "chat", namespace)), why="our change arrives")
    wait(lambda: rollouts() == 2)
    cluster.quiet(operator, namespace)
    assert injected() and rollouts() == 2, "and theirs stays"
