"""The operator against a real API server and controller manager: apply, repair, ownership, status, quiet."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from control_plane_kit import Cluster, Operator, child, condition, decoded, make_ready, resource, settled, wait

KINDS = ("deployment", "service", "configmap", "serviceaccount", "secret")


def patch(cluster: Cluster, namespace: str, kind: str, name: str, change: Any, *more: str) -> None:
    cluster.kubectl("patch", kind, name, "-n", namespace, "--type=merge", "-p", json.dumps(change), *more)


def test_children_status_and_manners(cluster: Cluster, namespace: str, operator: Operator) -> None:
    manifest = resource()
    cluster.apply(manifest, namespace)
    settled(cluster, operator, namespace)
    for kind in KINDS:
        found = child(cluster, namespace, kind)
        assert found, kind
        assert found["metadata"]["ownerReferences"][0]["kind"] == "InferenceDeployment"
    made = cluster.get("infd", "chat", namespace)
    assert made["metadata"]["generation"] == 1
    assert "finalizers" not in made["metadata"]
    assert [k for k in made["metadata"]["annotations"] if "kubectl" not in k] == []
    for entry in made["metadata"]["managedFields"]:
        if entry["manager"] == "weir-operator":
            assert entry.get("subresource") == "status"
    assert made["status"]["observedGeneration"] == 1
    assert made["status"]["url"] == f"http://chat.{namespace}.svc:8080"
    assert cluster.kubectl("diff", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest), check=False).returncode == 0


def test_a_second_pass_writes_nothing(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    cluster.quiet(operator, namespace)
    before = len(cluster.writes(namespace))
    passes = operator.metric("weir_operator_reconciles_total")
    for i in range(3):
        cluster.kubectl("annotate", "infd/chat", "-n", namespace, f"note={i}", "--overwrite")
        wait(lambda: operator.metric("weir_operator_reconciles_total") > passes)  # noqa: B023
        passes = operator.metric("weir_operator_reconciles_total")
    assert cluster.writes(namespace)[before:] == []


def test_edits_and_deletions_of_children_are_repaired(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    patch(cluster, namespace, "service", "chat", {"spec": {"selector": {"weir.dev/name": "stolen"}}})
    wait(lambda: cluster.get("service", "chat", namespace)["spec"]["selector"]["weir.dev/name"] == "chat")
    patch(cluster, namespace, "configmap", "chat-boot", {"data": {"boot.yaml": "{}"}})
    wait(lambda: "slo" in cluster.get("configmap", "chat-boot", namespace)["data"]["boot.yaml"])
    cluster.kubectl("set", "image", "deployment/chat", "server=evil", "-n", namespace)
    wait(lambda: "evil" not in str(cluster.get("deployment", "chat", namespace)["spec"]))
    cluster.kubectl("label", "configmap", "chat-boot", "weir.dev/managed-", "-n", namespace)
    wait(lambda: cluster.get("configmap", "chat-boot", namespace)["metadata"]["labels"].get("weir.dev/managed") == "true")
    for kind, name in (("serviceaccount", "chat"), ("deployment", "chat"), ("service", "chat")):
        old = cluster.get(kind, name, namespace)["metadata"]["uid"]
        cluster.kubectl("delete", kind, name, "-n", namespace)
        wait(lambda: cluster.get(kind, name, namespace)["metadata"]["uid"] != old)  # noqa: B023


def test_foreign_objects_are_never_touched_and_work_goes_on_when_they_are_gone(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    cluster.kubectl("create", "service", "clusterip", "chat", "--tcp=80", "-n", namespace)
    cluster.kubectl("create", "serviceaccount", "chat", "-n", namespace)
    cluster.kubectl("create", "configmap", "chat-boot", "--from-literal=a=b", "-n", namespace)
    cluster.kubectl("create", "secret", "generic", "chat-control", "--from-literal=a=b", "-n", namespace)
    foreign = (("service", "chat"), ("serviceaccount", "chat"), ("configmap", "chat-boot"), ("secret", "chat-control"))
    before = {kind: cluster.get(kind, name, namespace) for kind, name in foreign}
    cluster.apply(resource(), namespace)
    for kind in ("ServiceAccount", "ConfigMap", "Service"):  # in the order in which they are applied
        said = wait(lambda: kind in (c := condition(cluster, namespace, "Ready")).get("message", "") and c)  # noqa: B023
        assert said["reason"] == "NameTaken"
        for other, name in foreign:
            assert cluster.get(other, name, namespace) == before[other]
        foreign = tuple((other, name) for other, name in foreign if other != kind.lower())
        cluster.kubectl("delete", kind.lower(), before[kind.lower()]["metadata"]["name"], "-n", namespace)
        if kind != "ServiceAccount":  # it went on by itself after the first; an event spares us the growing delays
            cluster.kubectl("annotate", "infd/chat", "-n", namespace, "note=again")
    wait(lambda: child(cluster, namespace, "deployment"), 90)
    cluster.kubectl("delete", "infd", "chat", "-n", namespace)
    wait(lambda: not child(cluster, namespace, "deployment"))
    assert cluster.get("secret", "chat-control", namespace) == before["secret"]


def test_ready_follows_the_pods_both_ways(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.apply(resource(), namespace)
    pod = make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
    since = condition(cluster, namespace, "Ready")["lastTransitionTime"]
    assert condition(cluster, namespace, "ModelLoaded")["status"] == "True"
    killed = {"exitCode": 137, "reason": "OOMKilled", "startedAt": since, "finishedAt": since}
    status = {
        "conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}],
        "containerStatuses": [{
            "name": "server", "ready": False, "restartCount": 1, "image": "x", "imageID": "x",
            "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": killed},
        }],
    }
    patch(cluster, namespace, "pod", pod["metadata"]["name"], {"status": status}, "--subresource=status")
    said = wait(lambda: (c := condition(cluster, namespace, "Ready")).get("reason") == "OutOfMemory" and c)
    assert said["status"] == "False"
    assert pod["metadata"]["name"] in said["message"]
    assert condition(cluster, namespace, "Available")["status"] == "False"
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")


def test_a_cleared_status_comes_back(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    patch(cluster, namespace, "infd", "chat", {"status": {"conditions": [], "url": "http://elsewhere"}}, "--subresource=status")
    wait(lambda: condition(cluster, namespace, "Ready").get("reason"))
    wait(lambda: cluster.get("infd", "chat", namespace)["status"]["url"].endswith(".svc:8080"))


def test_a_rollout_restart_is_not_undone_and_slo_restarts_nothing(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    cluster.kubectl("rollout", "restart", "deployment/chat", "-n", namespace)
    patch(cluster, namespace, "infd", "chat", {"spec": {"slo": {"ttft": "3s"}, "tuning": {"paused": True}}})
    wait(lambda: "ttft: 3.0" in child(cluster, namespace, "configmap")["data"]["boot.yaml"])
    patch(cluster, namespace, "infd", "chat", {"spec": {"engine": {"prefillChunkTokens": 32}}})
    wait(lambda: "--prefill-chunk-size=32" in str(cluster.get("deployment", "chat", namespace)))
    template = cluster.get("deployment", "chat", namespace)["spec"]["template"]
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]

    def replica_sets() -> int:
        listed = cluster.kubectl("get", "rs", "-n", namespace, "-l", "weir.dev/name=chat", "-o", "name").stdout
        return len(listed.split())

    wait(lambda: replica_sets() == 3)


def test_what_the_api_server_refuses_becomes_a_condition_with_its_words(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    broken = {"spec": {"containers": [{"name": "server", "resources": {"limits": {"memory": "lots"}}}]}}
    cluster.apply(resource(template=broken), namespace)
    said = wait(lambda: (c := condition(cluster, namespace, "Ready")).get("reason") == "ApplyRefused" and c)
    assert "lots" in said["message"] or "quantities" in said["message"]
    patch(cluster, namespace, "infd", "chat", {"spec": {"template": None}})
    wait(lambda: child(cluster, namespace, "deployment"))
    wait(lambda: condition(cluster, namespace, "Ready").get("reason") != "ApplyRefused")
    events = json.loads(cluster.kubectl("get", "events", "-n", namespace, "-o", "json").stdout)["items"]
    assert len([e for e in events if e["reason"] == "ApplyRefused"]) == 1


def test_a_dead_webhook_does_not_freeze_the_status(cluster: Cluster, namespace: str, operator: Operator) -> None:
    cluster.apply(resource(), namespace)
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
    hook = {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": namespace},
        "webhooks": [{
            "name": "dead.weir.dev", "clientConfig": {"url": "https://127.0.0.1:9/"}, "sideEffects": "None",
            "admissionReviewVersions": ["v1"], "failurePolicy": "Fail",
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "rules": [{"operations": ["*"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}],
        }],
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(hook))
    try:
        dry = ("create", "configmap", "x", "-n", namespace, "--dry-run=server")
        wait(lambda: cluster.kubectl(*dry, check=False).returncode != 0, why="the webhook is in force")
        patch(cluster, namespace, "infd", "chat", {"spec": {"slo": {"ttft": "3s"}}})
        pod = child(cluster, namespace, "pod") or {}
        unready = {"conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}]}
        patch(cluster, namespace, "pod", pod["metadata"]["name"], {"status": unready}, "--subresource=status")
        wait(lambda: condition(cluster, namespace, "Ready").get("status") == "False", why="the status follows the pods")
        assert condition(cluster, namespace, "Progressing")["reason"] == "RollingOut"
    finally:
        cluster.kubectl("delete", "validatingwebhookconfiguration", namespace)
    wait(lambda: cluster.kubectl(*dry, check=False).returncode == 0, why="the webhook is gone")
    cluster.kubectl("annotate", "infd/chat", "-n", namespace, "note=again")  # an event spares us the growing delays
    wait(lambda: "ttft: 3.0" in (child(cluster, namespace, "configmap") or {})["data"]["boot.yaml"], 90)


@pytest.mark.parametrize("name", ["acme/Tiny Model:Q4", "yes", "1e3", "-dash"])
def test_odd_served_names_reach_the_status(cluster: Cluster, namespace: str, operator: Operator, name: str) -> None:
    cluster.apply(resource(model={"source": "file:///m", "servedName": name}), namespace)
    settled(cluster, operator, namespace)
    assert cluster.get("infd", "chat", namespace)["status"]["model"] == name


def test_the_token_follows_from_key_and_uid(cluster: Cluster, namespace: str, operator: Operator) -> None:
    from weir_operator.io.scrape import pod_token

    cluster.apply(resource(), namespace)
    settled(cluster, operator, namespace)
    key = decoded(cluster.get("secret", "weir-operator-key", operator.namespace), "key")
    uid = cluster.get("infd", "chat", namespace)["metadata"]["uid"]
    assert decoded(child(cluster, namespace, "secret") or {}, "token") == pod_token(key.encode(), uid)
