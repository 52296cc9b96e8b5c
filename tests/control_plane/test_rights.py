"""The operator with exactly the rights that the chart gives it, on an API server that enforces them: it is denied nothing, it
leaves no right unused, and it reads no Secret but its own key. The audit log is the witness."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from control_plane_kit import (
    ADMIN,
    ASSETS,
    ROOT,
    Cluster,
    Operator,
    acted,
    child,
    condition,
    edit,
    make_ready,
    resource,
    token_of,
    wait,
)

from weir_operator.io.logs import KEYS

HELM = Path(ASSETS, "helm")
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


def rendered(own: str, *values: str) -> list[dict[str, Any]]:
    """The chart's roles, bindings and account for namespace `own`."""
    if not HELM.exists():
        pytest.skip("no helm in KUBEBUILDER_ASSETS")
    command = [str(HELM), "template", "weir", str(ROOT / "charts/weir"), "-n", own, "--kube-version=1.36.0", "--skip-tests"]
    settings = ["--set=rbac.aggregateRoles=false", *values]
    text = subprocess.run([*command, *settings], capture_output=True, text=True, check=True).stdout
    return [m for m in yaml.safe_load_all(text) if m and ("Role" in m["kind"] or m["kind"] == "ServiceAccount")]


def install(cluster: Cluster, own: str, *values: str) -> Path:
    """The chart's rights in namespace `own`; a kubeconfig with the operator's token."""
    cluster.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, rendered(own, *values))))
    return cluster.token_config(token_of(cluster, own, "weir"), own)


def granted(own: str, *values: str) -> set[Right]:
    rules = [rule for role in rendered(own, *values) for rule in role.get("rules", ())]
    return {right for r in rules for right in itertools.product(r["apiGroups"], r["resources"], r["verbs"])}


def asked(cluster: Cluster, own: str) -> list[dict[str, Any]]:
    """The operator's requests about objects, as the audit log has them."""
    user = f"system:serviceaccount:{own}:weir"
    lines = [json.loads(line) for line in cluster.audit.read_text().splitlines()]
    mine = [line for line in lines if line["user"]["username"] == user]
    assert mine, "the operator asked for nothing"
    return mine


def denied(cluster: Cluster, own: str) -> list[str]:
    """What the operator asked for and was not allowed."""
    lines = [line for line in asked(cluster, own) if line.get("responseStatus", {}).get("code") == 403]
    return [f"{line['verb']} {line['requestURI']}" for line in lines]


def used(cluster: Cluster, own: str) -> set[Right]:
    """A patch that made its object (server-side apply, 201) needed the right to create as well."""
    found: set[Right] = set()
    for line in asked(cluster, own):
        ref = line.get("objectRef")
        code = line.get("responseStatus", {}).get("code", 0)
        if ref and (code < 400 or code == 404):  # what is not there was asked for rightly
            name = "/".join(filter(None, [ref["resource"], ref.get("subresource")]))
            found.add((ref.get("apiGroup", ""), name, line["verb"]))
            if line["verb"] == "patch" and code == 201:
                found.add((ref.get("apiGroup", ""), name, "create"))
    return found


def another(cluster: Cluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    return name


def test_one_namespace_without_cluster_rights(cluster: Cluster, namespace: str) -> None:
    own, elsewhere = another(cluster), another(cluster)
    config = install(cluster, own, "--set=crds.install=false", f"--set=watch.namespaces={{{namespace}}}")
    operator = Operator(cluster, own, kubeconfig=config).start(f"--namespace={namespace}", scope=False)
    for place in (namespace, elsewhere):
        cluster.apply(resource(), place)
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True", 30)
    cluster.kubectl("delete", "service", "chat", "-n", namespace)
    wait(lambda: child(cluster, namespace, "service"))
    wait(lambda: operator.metric("weir_operator_watch_lag_seconds") == 0)
    assert condition(cluster, elsewhere, "Ready") == {}
    assert operator.stop() == 0
    assert denied(cluster, own) == []
    assert "forbidden" not in operator.log.lower()
    cluster.kubectl("delete", "infd", "chat", "-n", elsewhere)


def test_the_whole_cluster(cluster: Cluster, namespace: str) -> None:
    own = another(cluster)
    operator = Operator(cluster, own, kubeconfig=install(cluster, own)).start(scope=False)
    broken = {"spec": {"containers": [{"name": "server", "resources": {"limits": {"memory": "x"}}}]}}
    cluster.apply(resource(template=broken), namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("reason") == "ApplyRefused", 30)  # an Event is written too
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", '{"spec":{"template":null}}')
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True", 30)
    wait(lambda: operator.metric("weir_operator_watch_lag_seconds") == 0)
    assert operator.stop() == 0
    assert denied(cluster, own) == []
    assert "forbidden" not in operator.log.lower()
    cluster.kubectl("delete", "clusterrolebinding,clusterrole", f"{own}-weir")


EVERYTHING = {
    "model": {"source": "https://models.example/m.gguf", "cache": {"size": "1Gi", "reclaimPolicy": "Delete"}},
    "service": {"headless": True},
    "monitoring": {"podMonitor": True},
}


def scaled(by: str) -> dict[str, Any]:
    more = {"prometheus": "http://prometheus:9090"} if by == "ScaledObject" else {}
    return {"autoscaling": {"mode": "External", "scaler": by, "minReplicas": 1, "maxReplicas": 3, **more}}


CHANGED = {
    "service": {"headless": True, "annotations": {"a": "b"}},
    "monitoring": {"podMonitor": True, "interval": "30s"},
    "networkPolicy": {"clients": [{"podSelector": {}}]},
    "disruption": {"maxUnavailable": 2},
}
OPTIONAL_CHILDREN = ("pvc", "networkpolicy", "hpa", "podmonitor", "scaledobject")


def there(cluster: Cluster, namespace: str) -> set[str]:
    return {kind for kind in OPTIONAL_CHILDREN if child(cluster, namespace, kind)}


def pods(cluster: Cluster, namespace: str) -> list[str]:
    listed = cluster.kubectl("get", "pods", "-n", namespace, "-l", "weir.dev/name=chat", "-o", "json").stdout
    return sorted(p["metadata"]["name"] for p in json.loads(listed)["items"])


def refusal(cluster: Cluster, namespace: str) -> str:
    ready = condition(cluster, namespace, "Ready")
    return ready["message"] if ready.get("reason") == "ApplyRefused" else ""


def event_count(cluster: Cluster, namespace: str, reason: str) -> int:
    events = json.loads(cluster.kubectl("get", "events", "-n", namespace, "-o", "json").stdout)["items"]
    return sum(e["count"] for e in events if e["reason"] == reason)


def crowd(cluster: Cluster, namespace: str, operator: Operator) -> None:
    """Others write the resource faster than the operator, until one of its status writes comes too late: then it reads it."""
    target = f"{cluster.url}/apis/weir.dev/v1alpha1/namespaces/{namespace}/inferencedeployments/chat"
    headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/merge-patch+json"}

    def late() -> bool:
        for i in range(20):
            change = {"metadata": {"annotations": {"note": str(time.monotonic())}}, "spec": {"replicas": 1 + i % 3}}
            requests.patch(target, json=change, headers=headers, verify=False, timeout=10).raise_for_status()
        return operator.metric('weir_operator_api_calls_total{code="409",verb="patch"}') > 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the API server's certificate is its own
        wait(late, 60, "a conflict")


def somebody_elses() -> list[dict[str, Any]]:
    """An object of each kind that is listed, with a name that `chat` wants."""
    labels, port = {"app": "other"}, {"port": 80}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "other"}
    trigger = {"type": "cpu", "metadata": {"value": "50"}}
    found = [
        ("v1", "ServiceAccount", "chat", {}), ("v1", "ConfigMap", "chat-boot", {"data": {"a": "b"}}),
        ("v1", "Service", "chat", {"spec": {"selector": labels, "ports": [port]}}),
        ("v1", "PersistentVolumeClaim", "chat-models", {"spec": claim}),
        ("networking.k8s.io/v1", "NetworkPolicy", "chat", {"spec": {"podSelector": {"matchLabels": labels}}}),
        ("policy/v1", "PodDisruptionBudget", "chat", {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}}}),
        ("autoscaling/v2", "HorizontalPodAutoscaler", "chat", {"spec": {"maxReplicas": 1, "scaleTargetRef": target}}),
        ("apps/v1", "Deployment", "chat", {"spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}}),
        ("monitoring.coreos.com/v1", "PodMonitor", "chat", {"spec": {"selector": {}, "podMetricsEndpoints": []}}),
        ("keda.sh/v1alpha1", "ScaledObject", "chat", {"spec": {"scaleTargetRef": {"name": "other"}, "triggers": [trigger]}}),
    ]
    return [{"apiVersion": v, "kind": k, "metadata": {"name": n}, **content} for v, k, n, content in found]


@pytest.mark.parametrize("scope", ["cluster", "namespace"])
def test_no_right_is_missing_and_none_is_unused(cluster: Cluster, namespace: str, optional_kinds: None, scope: str) -> None:
    """A life in which every kind of child is made, changed, repaired and taken away again."""
    own = another(cluster)
    values = [f"--set=watch.namespaces={{{namespace}}}", "--set=crds.install=false"] if scope == "namespace" else []
    config = install(cluster, own, *values)
    where = [f"--namespace={namespace}"] if scope == "namespace" else []
    strangers = [cluster.apply(m, namespace) and m for m in somebody_elses()]
    operator = Operator(cluster, own, kubeconfig=config).start(*where, "--log-format=json", scope=False)

    cluster.apply(resource(**EVERYTHING, **scaled("HorizontalPodAutoscaler")), namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("reason") == "NameTaken", 60, "what has our names is asked for")
    wait(lambda: "PodDisruptionBudget" in condition(cluster, namespace, "IntegrationsReady").get("message", ""), 60)
    *strangers, scaler = strangers
    for stranger in strangers:
        cluster.kubectl("delete", stranger["kind"], stranger["metadata"]["name"], "-n", namespace)
    wait(lambda: there(cluster, namespace) == {"pvc", "networkpolicy", "hpa", "podmonitor"}, 60, "children of every kind")
    cluster.apply(resource(**{**EVERYTHING, **CHANGED}, **scaled("ScaledObject")), namespace)
    wait(lambda: "ScaledObject chat exists" in condition(cluster, namespace, "IntegrationsReady")["message"], 60)
    cluster.kubectl("delete", scaler["kind"], scaler["metadata"]["name"], "-n", namespace)
    wait(lambda: there(cluster, namespace) == {"pvc", "networkpolicy", "scaledobject", "podmonitor"}, 60, "the other scaler")
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True", 60)
    cluster.apply(resource(**EVERYTHING, replicas=2), namespace)
    two = wait(lambda: len(found := pods(cluster, namespace)) == 2 and found, 60, "two pods")
    cluster.apply(resource(**EVERYTHING, autoscaling={"mode": "Internal", "maxReplicas": 3}), namespace)
    wait(lambda: condition(cluster, namespace, "AutoscalerOwned")["reason"] == "ByOperator", 60, "the operator's own number")
    assert operator.stop() == 0
    decided = {"desiredReplicas": 1, "tuning": {"replicas": {"leaving": two[:1]}}}  # by a process that died then
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--subresource=status", "--type=merge", "-p",
                    json.dumps({"status": decided}))
    operator.start(*where, "--log-format=json", scope=False)
    wait(lambda: len(pods(cluster, namespace)) == 1, 60, "one of them ends")
    said = ""
    for wrong in ({"resources": {"limits": {"memory": "x"}}}, {"ports": [{"containerPort": 99999}]}):
        broken = {"spec": {"containers": [{"name": "server", **wrong}]}}
        cluster.apply(resource(template=broken, networkPolicy={"enabled": False}), namespace)
        said = wait(lambda: refusal(cluster, namespace) not in ("", said) and refusal(cluster, namespace), 60)  # noqa: B023
    wait(lambda: event_count(cluster, namespace, "ApplyRefused") == 2, 30, "the second refusal raises the first Event's count")
    crowd(cluster, namespace, operator)
    cluster.apply(resource(networkPolicy={"enabled": False}), namespace)
    wait(lambda: there(cluster, namespace) == set(), 60, "what is not asked for any more is gone")
    wait(lambda: operator.metric("weir_operator_watch_lag_seconds") == 0)
    assert operator.stop() == 0

    assert denied(cluster, own) == []
    assert "forbidden" not in operator.log.lower()
    lines = [json.loads(line) for line in operator.log.splitlines()]  # one JSON object each, whoever logged
    assert {"leading", "lease-released"} <= {line.get("event") for line in lines}
    assert set().union(*lines) <= {"time", "level", "logger", "message", *KEYS}
    assert granted(own, *values) - used(cluster, own) == set(), "rights that nothing uses"
    secrets = [line for line in asked(cluster, own) if (line.get("objectRef") or {}).get("resource") == "secrets"]
    read = {(line["verb"], line["objectRef"].get("name")) for line in secrets if line["verb"] in ("get", "list", "watch")}
    assert read == {("get", "weir-operator-key")}
    assert {line["verb"] for line in secrets} == {"get", "create", "patch"}
    cluster.kubectl("delete", "clusterrolebinding,clusterrole", f"{own}-weir", "--ignore-not-found")


def test_a_namespace_that_is_lost_does_not_take_the_others_with_it(cluster: Cluster, namespace: str) -> None:
    own, other = another(cluster), another(cluster)
    config = install(cluster, own, "--set=crds.install=false", f"--set=watch.namespaces={{{namespace},{other}}}")
    [binding] = json.loads(cluster.kubectl("get", "rolebinding", "-n", other, "-o", "json").stdout)["items"]
    for place in (namespace, other):
        cluster.apply(resource(), place)
    cluster.kubectl("delete", "rolebinding", binding["metadata"]["name"], "-n", other)
    operator = Operator(cluster, own, kubeconfig=config).start(f"--namespace={namespace}", f"--namespace={other}", scope=False)
    wait(lambda: child(cluster, namespace, "deployment"), 60, "an operator that begins without it serves the others")
    assert operator.metric("weir_operator_lost_namespaces") == 1 and condition(cluster, other, "Ready") == {}

    again = {k: binding[k] for k in ("apiVersion", "kind", "roleRef", "subjects")}
    cluster.apply({**again, "metadata": {"name": binding["metadata"]["name"]}}, other)
    wait(lambda: child(cluster, other, "deployment"), 90, "it is served once it can be")
    assert operator.metric("weir_operator_lost_namespaces") == 0
    edit(cluster, other, 7)
    wait(lambda: acted(cluster, other, 7), 60, "and watched")

    cluster.kubectl("delete", "namespace", other, "--wait=false")  # its rights go with it
    cluster.kubectl("delete", "rolebinding", binding["metadata"]["name"], "-n", other)
    edit(cluster, namespace, 9)
    wait(lambda: acted(cluster, namespace, 9), 60, "the others go on")
    wait(lambda: operator.metric("weir_operator_watch_lag_seconds") == 0, 60)
    assert operator.stop() == 0
