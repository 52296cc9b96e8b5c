"""Children that may be asked for: made, changed and deleted as the spec says, and quiet in between."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane_kit import ROOT, Cluster, Operator, child, condition, resource, settled, wait

MONITORS = "podmonitors.monitoring.coreos.com"


def patch(cluster: Cluster, namespace: str, spec: Any) -> None:
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))


def definition(group: str, kind: str, plural: str, version: str) -> str:
    """A CRD of somebody else's, open in shape: what matters here is that it comes and goes."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return json.dumps({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group, "scope": "Namespaced", "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    })


EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda f: f.stem)
def test_a_second_pass_over_every_example_writes_nothing(
    cluster: Cluster, namespace: str, operator: Operator, file: Path,
) -> None:
    for manifest in yaml.safe_load_all(file.read_text()):
        cluster.apply(manifest, namespace)
    [name] = [m["metadata"]["name"] for m in yaml.safe_load_all(file.read_text()) if m["kind"] == "InferenceDeployment"]
    wait(lambda: condition(cluster, namespace, "Ready", name).get("reason"), why="a status")
    assert condition(cluster, namespace, "Ready", name)["reason"] not in ("ApplyRefused", "SpecInvalid", "NameTaken")
    cluster.quiet(operator, namespace)
    before, passes = len(cluster.writes(namespace)), operator.metric("weir_operator_reconciles_total")
    cluster.kubectl("annotate", f"infd/{name}", "-n", namespace, "note=again")
    wait(lambda: operator.metric("weir_operator_reconciles_total") > passes, why="another pass")
    cluster.quiet(operator, namespace)
    assert [f"{w['verb']} {w['objectRef']['resource']}" for w in cluster.writes(namespace)[before:]] == []
    for manifest in yaml.safe_load_all(file.read_text()):
        assert "unchanged" in cluster.apply(manifest, namespace).stdout
    shown = cluster.kubectl("diff", "-n", namespace, "-f", str(file), check=False)
    assert shown.returncode == 0, shown.stdout


def test_what_is_no_longer_asked_for_goes_and_what_is_asked_for_comes(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    scaler = {"mode": "External", "scaler": "HorizontalPodAutoscaler", "maxReplicas": 3}
    cluster.apply(resource(autoscaling=scaler, service={"headless": True}), namespace)
    wait(lambda: cluster.get("hpa", "chat", namespace), why="the autoscaler")
    settled(cluster, operator, namespace)
    policy = cluster.get("networkpolicy", "chat", namespace)["spec"]
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == [8080, 8081]
    assert policy["ingress"][1]["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": operator.namespace,
    }
    assert cluster.get("pdb", "chat", namespace)["spec"]["maxUnavailable"] == 1
    assert cluster.get("service", "chat-pods", namespace)["spec"]["clusterIP"] == "None"
    patch(cluster, namespace, {
        "autoscaling": {"mode": "Disabled", "scaler": None}, "service": {"headless": False},
        "networkPolicy": {"enabled": False}, "disruption": {"maxUnavailable": "50%"},
    })
    for kind, name in (("hpa", "chat"), ("service", "chat-pods"), ("networkpolicy", "chat")):
        wait(lambda: cluster.get(kind, name, namespace) is None, why=f"{kind} {name} goes")  # noqa: B023
    wait(lambda: cluster.get("pdb", "chat", namespace)["spec"]["maxUnavailable"] == "50%")
    assert cluster.get("service", "chat", namespace)


def test_an_optional_kind_is_noticed_when_it_comes_and_goes(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.apply(resource(monitoring={"podMonitor": True, "labels": {"release": "prometheus"}}), namespace)
    said = wait(lambda: (c := condition(cluster, namespace, "IntegrationsReady")).get("status") == "False" and c)
    assert said["reason"] == "KindMissing" and "PodMonitor" in said["message"]
    settled(cluster, operator, namespace)
    assert child(cluster, namespace, "deployment"), "everything else is made"
    kit = Path(os.environ.get("WEIR_OPTIONAL_CRDS", "/nonexistent"), "monitoring.coreos.com_podmonitors.yaml")
    made = kit.read_text() if kit.exists() else definition("monitoring.coreos.com", "PodMonitor", "podmonitors", "v1")
    for _ in range(2):
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=made)
        try:
            found = wait(lambda: cluster.get("podmonitors", "chat", namespace), 60, "the PodMonitor")
            assert found["metadata"]["labels"]["release"] == "prometheus"
            assert found["spec"]["podMetricsEndpoints"][0]["port"] == "http"
            wait(lambda: condition(cluster, namespace, "IntegrationsReady")["status"] == "True")
        finally:
            cluster.kubectl("delete", "crd", MONITORS)
        wait(lambda: condition(cluster, namespace, "IntegrationsReady")["status"] == "False", 60, "its going is noticed")
    assert "Traceback" not in operator.log


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
def test_deleting_leaves_what_retain_says_and_nothing_else(
    cluster: Cluster, namespace: str, operator: Operator, policy: str,
) -> None:
    model = {"source": "hf://acme/tiny@main", "cache": {"size": "1Gi", "reclaimPolicy": policy}, "secretRef": {"name": "hub"}}
    manifest = resource(model=model, service={"headless": True})
    cluster.apply(manifest, namespace)
    settled(cluster, operator, namespace)
    claim = cluster.get("pvc", "chat-models", namespace)
    assert bool(claim["metadata"].get("ownerReferences")) is (policy == "Delete")
    cluster.kubectl("delete", "infd", "chat", "-n", namespace, "--timeout=10s")
    kinds = (
        "deployment,replicaset,pod,service,configmap,serviceaccount,secret,pdb,networkpolicy,hpa"
        + (",pvc" if policy == "Delete" else "")
    )
    wait(lambda: not cluster.kubectl("get", kinds, "-n", namespace, "-l", "weir.dev/name=chat", "-o", "name").stdout, 60)
    if policy == "Delete":
        return
    assert cluster.get("pvc", "chat-models", namespace)["metadata"]["uid"] == claim["metadata"]["uid"]
    cluster.apply(manifest, namespace)  # takes up what was kept
    settled(cluster, operator, namespace)
    assert condition(cluster, namespace, "Ready")["reason"] == "Starting"
    assert cluster.get("pvc", "chat-models", namespace)["metadata"]["uid"] == claim["metadata"]["uid"]


def test_a_claim_of_that_name_that_is_somebody_elses_is_left_alone(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "chat-models"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
    }
    cluster.apply(claim, namespace)
    before = cluster.get("pvc", "chat-models", namespace)
    cluster.apply(resource(model={"source": "hf://acme/tiny", "cache": {"size": "1Gi"}}), namespace)
    said = wait(lambda: (c := condition(cluster, namespace, "Ready")).get("reason") == "NameTaken" and c)
    assert "PersistentVolumeClaim chat-models" in said["message"]
    assert cluster.get("pvc", "chat-models", namespace)["spec"] == before["spec"]


def test_every_source_and_a_sidecar_are_templates_that_the_api_server_takes(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    app = {"spec": {"containers": [{"name": "app", "image": "app:1"}]}}
    for i, spec in enumerate((
        {"model": {"source": "oci://registry.example/models/tiny:1#m.gguf"}},
        {"model": {"source": "s3://bucket/m.gguf", "cache": {"claimName": "shared"}}},
        {"model": {"source": "https://host/m.gguf", "sha256": "0" * 64}},
        {"sidecar": True, "template": app, "model": {"source": "hf://acme/tiny/m.gguf"}},
        {"auth": {"secretRef": {"name": "keys"}}},
    )):
        cluster.apply(resource(f"chat-{i}", **spec), namespace)
    made = {i: wait(lambda: cluster.get("deployment", f"chat-{i}", namespace), why=f"case {i}") for i in range(5)}  # noqa: B023
    pods = {i: d["spec"]["template"]["spec"] for i, d in made.items()}
    volume = {v["name"]: v for v in pods[0]["volumes"]}["model"]
    assert volume["image"]["reference"] == "registry.example/models/tiny:1"
    assert pods[0]["containers"][0]["args"][1] == "/models/m.gguf"
    assert pods[1]["initContainers"][0]["args"][:3] == ["fetch", "s3://bucket/m.gguf", "--to=/models/s3/bucket/m.gguf"]
    assert pods[2]["initContainers"][0]["args"][-1] == "--sha256=" + "0" * 64
    first, second = pods[3]["initContainers"]
    assert (first["name"], second["name"], second["restartPolicy"]) == ("fetch", "server", "Always")
    assert [c["name"] for c in pods[3]["containers"]] == ["app"]
    assert second["startupProbe"] and "--leave-seconds=5" in second["args"]
    assert "--api-key-file=/run/weir/keys/keys" in pods[4]["containers"][0]["args"]
    cluster.kubectl("delete", "infd", "--all", "-n", namespace)
