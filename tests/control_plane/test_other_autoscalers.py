"""Autoscalers that nobody told the operator of: HorizontalPodAutoscalers on the Deployment or on the resource, of somebody's or
of KEDA's, under every mode. The number of pods has one owner, it never dips, and the condition names who it is."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from control_plane_kit import Cluster, Operator, condition, replicas, resource, settled, wait, watching_replicas

OWN = {"mode": "Internal", "minReplicas": 1, "maxReplicas": 9}


def autoscaler(kind: str, least: int, **meta: Any) -> dict[str, Any]:
    """Without a metric at hand, the controller still sees to the least number."""
    version = "apps/v1" if kind == "Deployment" else "weir.dev/v1alpha1"
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
    return {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "theirs", **meta},
        "spec": {
            "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": "chat"}, "minReplicas": least, "maxReplicas": 9,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }


def said(cluster: Cluster, namespace: str, reason: str) -> str:
    """The message, once the condition has this reason."""
    found = wait(lambda: (c := condition(cluster, namespace, "AutoscalerOwned")).get("reason") == reason and c, 30, reason)
    return str(found["message"])


def owners(cluster: Cluster, namespace: str) -> set[str]:
    entries = cluster.get("deployment", "chat", namespace)["metadata"]["managedFields"]
    return {entry["manager"] for entry in entries if "f:replicas" in entry["fieldsV1"].get("f:spec", {})}


@pytest.mark.parametrize("mode", [OWN, {"mode": "Disabled"}], ids=lambda mode: mode["mode"])
def test_an_autoscaler_on_the_deployment_is_named_and_left_its_number(
    cluster: Cluster, namespace: str, operator: Operator, mode: dict[str, Any],
) -> None:
    cluster.apply(resource(replicas=3, autoscaling=mode), namespace)
    settled(cluster, operator, namespace)
    wait(lambda: replicas(cluster, namespace) == 3)
    internal = mode["mode"] == "Internal"
    with watching_replicas(cluster, namespace) as seen:
        cluster.apply(autoscaler("Deployment", 5), namespace)
        message = said(cluster, namespace, "AnotherOnDeployment")
        assert "HorizontalPodAutoscaler theirs" in message and "External" in message
        wait(lambda: replicas(cluster, namespace) == 5, 60, "it sets the number")
        cluster.quiet(operator, namespace)
        assert "weir-operator" not in owners(cluster, namespace)
        before = len(cluster.writes(namespace))
        cluster.apply(autoscaler("Deployment", 6), namespace)
        wait(lambda: replicas(cluster, namespace) == 6, 60, "and another one")
        cluster.quiet(operator, namespace)
        written = {w["objectRef"]["resource"] for w in cluster.writes(namespace)[before:]}
        assert "deployments" not in written, "which nobody takes back"
        assert "AnotherOnDeployment" in cluster.kubectl("get", "events", "-n", namespace, "-o", "json").stdout

        cluster.kubectl("delete", "hpa", "theirs", "-n", namespace)
        said(cluster, namespace, "ByOperator" if internal else "BySpec")
        wait(lambda: "weir-operator" in owners(cluster, namespace), 30, "the number has its owner again")
        cluster.quiet(operator, namespace)
    numbers = [number for number, _ in itertools.groupby(seen)]
    assert numbers == ([3, 5, 6] if internal else [3, 5, 6, 3]), "taken over as it is; or the spec's own again"
    wanted = cluster.get("infd", "chat", namespace)["status"]["desiredReplicas"]
    assert wanted == replicas(cluster, namespace) == seen[-1]


def test_one_that_keda_made_is_named_with_its_scaled_object(cluster: Cluster, namespace: str, operator: Operator) -> None:
    """KEDA is not here: the object is as it makes them. Its owner has to exist, or the collector takes it away."""
    cluster.kubectl("create", "configmap", "chat", "-n", namespace)
    owner = cluster.get("configmap", "chat", namespace)["metadata"]
    ref = {"apiVersion": "v1", "kind": "ConfigMap", "name": "chat", "uid": owner["uid"], "controller": True}
    cluster.apply(autoscaler("Deployment", 2, name="keda-hpa-chat", ownerReferences=[ref]), namespace)
    cluster.apply(resource(autoscaling=OWN), namespace)
    message = said(cluster, namespace, "AnotherOnDeployment")  # it was there first
    assert message.startswith("HorizontalPodAutoscaler keda-hpa-chat of ConfigMap chat sets")
    wait(lambda: replicas(cluster, namespace) == 2, 60)


def test_an_autoscaler_on_the_resource_is_named_and_without_effect(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    cluster.apply(resource(replicas=3, autoscaling=OWN), namespace)
    settled(cluster, operator, namespace)
    wait(lambda: replicas(cluster, namespace) == 3)
    with watching_replicas(cluster, namespace) as seen:
        cluster.apply(autoscaler("InferenceDeployment", 5), namespace)
        message = said(cluster, namespace, "AnotherOnResource")
        assert "HorizontalPodAutoscaler theirs" in message and "Disabled" in message
        wait(lambda: cluster.get("infd", "chat", namespace)["spec"]["replicas"] == 5, 60, "it writes there")
        cluster.quiet(operator, namespace)
        assert set(seen) == {3}
        change = json.dumps({"spec": {"autoscaling": {"mode": "Disabled"}}})  # as the condition says
        cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", change)
        said(cluster, namespace, "BySpec")
        wait(lambda: replicas(cluster, namespace) == 5)
    assert min(seen) == 3
