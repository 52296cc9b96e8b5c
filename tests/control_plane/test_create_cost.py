"""What one resource costs the API server. A file of its own: no other operator may run beside it."""

from __future__ import annotations

import json

from control_plane_kit import Cluster, Operator, condition, make_ready, resource, wait


def test_a_create_costs_few_requests(cluster: Cluster, namespace: str) -> None:
    """Reads and writes of the operator from apply to Ready, status and Events included; before the tuner asks the pod, which
    here nobody answers for."""
    operator = Operator(cluster, namespace).start("--poll-seconds=30")
    wait(lambda: operator.metric("weir_operator_leader") == 1)
    cluster.apply(resource(), namespace)
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
    wait(lambda: "Serving" in cluster.kubectl("get", "events", "-n", namespace).stdout)
    lines = [json.loads(line) for line in cluster.audit.read_text().splitlines()]
    ours = [
        f"{line['verb']} {line['objectRef']['resource']}/{line['objectRef'].get('subresource', '')}" for line in lines
        if (line.get("objectRef") or {}).get("namespace") == namespace
        and not line["userAgent"].startswith(("kubectl", "kube-")) and line["objectRef"]["resource"] != "leases"
        and line["objectRef"].get("name") != "weir-operator-key" and line["verb"] not in ("list", "watch")
    ]
    assert operator.stop() == 0
    print(len(ours), ours)
    assert 10 < len(ours) <= 16, ours
