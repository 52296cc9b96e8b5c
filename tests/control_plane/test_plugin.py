"""`kubectl infd` against a real API server, with a status as the operator writes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from control_plane_kit import Cluster, resource

HISTORY = [{
    "time": "2026-01-01T00:00:00Z", "pod": "chat-1", "rule": "set-point", "outcome": "Moved", "reason": "more rows fit",
    "changes": {"max_batch_size": [4, 9]}, "predicted": {"goodput": 1.5},
}]
TUNING = {
    "mode": "Auto", "slo": "97%", "history": HISTORY,
    "pods": [{"name": "chat-1", "knobs": {"maxBatchSize": 9, "maxQueueDepth": 12}, "outcome": "Settling"}],
}
READY = {
    "type": "Ready", "status": "True", "reason": "Serving", "message": "1 of 1 pods serve",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


@pytest.fixture
def infd(cluster: Cluster, namespace: str) -> Any:
    cluster.apply(resource(), namespace)
    status = {"readyReplicas": 1, "url": "http://chat", "model": "m", "conditions": [READY], "tuning": TUNING}
    patch = json.dumps({"status": status})
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from weir_operator.cli.plugin import main; main()", *args, "-n", namespace]
        env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)

    return run


def test_status_explain_and_history_say_what_the_status_holds(infd: Any) -> None:
    text = infd("status").stdout
    assert "1/1 ready" in text
    assert "● Ready: Serving" in text
    assert "chat-1: maxBatchSize 9, maxQueueDepth 12; Settling" in text
    explained = infd("explain", "chat").stdout
    assert "97%" in explained
    assert "Moved (set-point) at 2026-01-01T00:00:00Z: more rows fit" in explained
    assert "predicted: goodput 1.5" in explained
    assert "max_batch_size 4 → 9" in infd("history", "chat").stdout
    assert json.loads(infd("history", "chat", "-o", "json").stdout) == HISTORY


def test_pause_and_resume_write_one_field(infd: Any, cluster: Cluster, namespace: str) -> None:
    assert infd("pause", "chat").returncode == 0
    assert cluster.get("infd", "chat", namespace)["spec"]["tuning"] == {"mode": "Auto", "paused": True}
    assert infd("resume", "chat").returncode == 0
    assert cluster.get("infd", "chat", namespace)["spec"]["tuning"]["paused"] is False


def test_a_name_that_is_not_there_is_one_line(infd: Any) -> None:
    done = infd("explain", "nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("kubectl-infd: no InferenceDeployment 'nothing'")
    assert "Traceback" not in done.stderr
