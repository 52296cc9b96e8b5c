"""The documented recipes at work: Prometheus reads our pods, an adapter serves what it knows, and a HorizontalPodAutoscaler on
weir_tuner_load_ratio scales out, settles and scales in, with the tuner on. KEDA's queries get answers from the same Prometheus.

Needs a `prometheus` and WEIR_METRICS_API: a command that takes a Prometheus' address and a file of prometheus-adapter's rules,
and serves external.metrics.k8s.io to the cluster from it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from cluster_kit import (
    HTTP_PORT,
    MIX,
    NAME,
    ROOT,
    SYSTEM,
    Deployment,
    answers,
    declare,
    eventually,
    get,
    kubectl,
    measured,
    merged,
    program,
    run,
)
from test_operator_scenarios import SMALL

from weir_bench.process import Child

sys.path.insert(0, str(ROOT / "tests" / "unit"))
from test_recipes import blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MOST = 2
LOADED = 210.0
"""Seconds of load: the tuner's evidence, the adapter's and the autoscaler's periods (15 s), and a while in which it stays."""


def recipe(kind: str, namespace: str) -> dict[str, Any]:
    """A recipe of docs/autoscaling.md, for our resource and at most MOST pods."""
    [found] = [block for block in blocks() if block.get("kind") == kind]
    text = json.dumps(found).replace('"chat"', f'"{NAME}"').replace("chat-", f"{NAME}-")
    return json.loads(text.replace('name=\\"chat\\"', f'name=\\"{NAME}\\"').replace('\\"team\\"', f'\\"{namespace}\\"'))


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    async def value(self, query: str) -> float | None:
        """Of an instant query with one answer; None: it has none."""
        where = f"{self.url}/api/v1/query"
        async with aiohttp.ClientSession() as session, session.get(where, params={"query": query}) as answer:
            assert answer.status == 200, await answer.text()
            found = (await answer.json())["data"]["result"]
            return float(found[0]["value"][1]) if found else None


async def find_pods(namespace: str, targets: Path) -> None:
    """What a Prometheus that knows Kubernetes (Debian's does not) finds by itself: every pod's HTTP port, with its labels."""
    while True:
        listed = (await asyncio.to_thread(get, "pods", "-n", namespace, "-l", f"weir.dev/name={NAME}"))["items"]
        addresses = {p["metadata"]["name"]: p["status"]["podIP"] for p in listed if p["status"].get("podIP")}
        found = [
            {"targets": [f"{address}:{HTTP_PORT}"], "labels": {"namespace": namespace, "pod": name}}
            for name, address in addresses.items()
        ]
        part = targets.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(targets)
        await asyncio.sleep(3)


@pytest.fixture
async def prometheus(release: str, namespace: str, tmp_path: Path) -> AsyncIterator[Prometheus]:
    binary, serve = program("prometheus"), os.environ.get("WEIR_METRICS_API", "")
    if not binary or not serve:
        pytest.skip("needs a prometheus, and WEIR_METRICS_API: a command that serves external metrics from it")
    selector = ("-l", "app.kubernetes.io/component=operator")
    [operator] = [p for p in get("pods", "-n", SYSTEM, *selector)["items"] if p["status"].get("podIP")]
    [port] = [p["containerPort"] for p in operator["spec"]["containers"][0]["ports"] if p["name"] == "health"]
    if not answers(operator["status"]["podIP"], port):
        pytest.skip("a pod's address cannot be reached from this machine")
    targets = tmp_path / "pods.json"
    pods = {"job_name": "pods", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "5s"}]}
    ours = {
        "job_name": "operator", "honor_labels": True,
        "static_configs": [{"targets": [f"{operator['status']['podIP']}:{port}"]}],
    }
    config, rules = tmp_path / "prometheus.yml", tmp_path / "rules.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "5s"}, "scrape_configs": [ours, pods]}))
    [block] = [b for b in blocks() if "externalRules" in b]
    rules.write_text(yaml.safe_dump(block))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"]
    async with Child(command, log=tmp_path / "prometheus.log"):
        found = Prometheus(f"http://{address}")
        await eventually(lambda: found.value("up"), "Prometheus has scraped the operator")
        run(*shlex.split(serve), found.url, str(rules))
        finding = asyncio.create_task(find_pods(namespace, targets))
        yield found
        finding.cancel()


async def test_an_autoscaler_on_the_load_scales_out_settles_and_scales_in(
    prometheus: Prometheus, namespace: str, tmp_path: Path,
) -> None:
    """Two pods share two cores here, so what one of them can do is less than what one alone could: the load stays above the
    target and both are kept; when it ends, one goes."""
    small = {"spec": {"containers": [{"name": "server", "resources": SMALL}]}}
    async with Deployment(namespace, {"autoscaling": {"mode": "External"}, "template": small}) as deployment:
        await deployment.ready()
        sizing = await measured(deployment)
        await declare(deployment, sizing.objectives)
        scaler = merged(recipe("HorizontalPodAutoscaler", namespace), {"metadata": {"namespace": namespace}})
        scaler["spec"] |= {"maxReplicas": MOST, "behavior": {
            "scaleUp": {"stabilizationWindowSeconds": 15}, "scaleDown": {"stabilizationWindowSeconds": 30},
        }}
        kubectl("apply", "-f", "-", text=json.dumps(scaler))

        def wanted() -> int:
            return int(get("deployment", NAME, "-n", namespace)["spec"]["replicas"])

        load = asyncio.create_task(deployment.load(sizing.rate, LOADED, MIX, 1, 60, tmp_path))
        await eventually(lambda: wanted() == MOST, "it scales out", 150)
        owned = deployment.condition("AutoscalerOwned")
        assert (owned["status"], owned["reason"]) == ("True", "OnDeployment"), owned
        triggers = [t["metadata"] for t in recipe("ScaledObject", namespace)["spec"]["triggers"]]
        values = [await prometheus.value(t["query"]) for t in triggers]
        assert values[0] is not None and values[0] > float(triggers[0]["threshold"]), values
        assert values[1] is not None, "refusals, none perhaps, of pods that are there"
        seen = set()
        while not load.done():
            seen.add(wanted())
            await asyncio.sleep(5)
        await load
        assert seen == {MOST}, f"it settles while the load lasts: {seen}"
        moved = [h for h in deployment.history() if h["outcome"] in ("Moved", "Settling", "Holding")]
        assert moved, "the tuner was on"
        await eventually(lambda: wanted() == 1, "it scales in", 240)
