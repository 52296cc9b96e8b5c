"""The operator with exactly the rights that the chart gives it, on an API server that enforces them."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path

import pytest
import yaml
from control_plane_kit import ASSETS, ROOT, Cluster, Operator, child, condition, make_ready, resource, token_of, wait

HELM = Path(ASSETS, "helm")


def install(cluster: Cluster, own: str, *values: str) -> Path:
    """The chart's rights in namespace `own`; a kubeconfig with the operator's token."""
    if not HELM.exists():
        pytest.skip("no helm in KUBEBUILDER_ASSETS")
    command = [str(HELM), "template", "weir", str(ROOT / "charts/weir"), "-n", own, "--kube-version=1.36.0", *values]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rights = [m for m in yaml.safe_load_all(rendered) if m and ("Role" in m["kind"] or m["kind"] == "ServiceAccount")]
    cluster.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, rights)))
    return cluster.token_config(token_of(cluster, own, "weir"), own)


def denied(cluster: Cluster, own: str) -> list[str]:
    """What the operator asked for and was not allowed, as the audit log has it."""
    user = f"system:serviceaccount:{own}:weir"
    lines = [json.loads(line) for line in cluster.audit.read_text().splitlines()]
    mine = [line for line in lines if line["user"]["username"] == user]
    assert mine, "the operator wrote nothing"
    return [f"{line['verb']} {line['requestURI']}" for line in mine if line.get("responseStatus", {}).get("code") == 403]


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
