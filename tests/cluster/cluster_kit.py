"""A cluster as these tests use it: kubectl, helm, ways to a Service and to a pod's control port, and load on one deployment."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from weir_bench.arrivals import Mix, schedule, to_json
from weir_bench.goodput import Objectives, share
from weir_bench.load import Client, Report, closed_loop, offered
from weir_bench.process import Child
from weir_bench.sizing import BATCH, OVERLOAD, Sizing, explain, size
from weir_server.contract import Plant

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "smollm2-cluster.yaml"
SERVER_IMAGE = os.environ.get("WEIR_SERVER_IMAGE_UNDER_TEST", "localhost/weir-server-demo:dev")
OPERATOR_IMAGE = os.environ.get("WEIR_OPERATOR_IMAGE_UNDER_TEST", "localhost/weir-operator:dev")
NAME, SYSTEM = "smollm2", "weir-system"
CONTROL_PORT, HTTP_PORT = 8081, 8080
MIX = Mix(prompt=48, output=64, cv=0.5)


def program(name: str) -> str | None:
    """A program of the PATH, else of KUBEBUILDER_ASSETS."""
    return shutil.which(name) or shutil.which(name, path=os.environ.get("KUBEBUILDER_ASSETS", ""))


def run(name: str, *args: str, text: str | None = None, seconds: float = 180) -> str:
    """Standard output of a program that must succeed."""
    done = subprocess.run([program(name) or name, *args], input=text, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{name} {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout


def kubectl(*args: str, text: str | None = None) -> str:
    return run("kubectl", *args, text=text)


def get(*args: str) -> Any:
    """`kubectl get … -o json`."""
    return json.loads(kubectl("get", *args, "-o", "json"))


def helm_values(**values: str) -> list[str]:
    """A tick of 10 s and leases of 15 s: the loop in a form that fits into a test."""
    repository, _, tag = OPERATOR_IMAGE.rpartition(":")
    settings = {
        "image.repository": repository, "image.tag": tag, "serverImage": SERVER_IMAGE, "test.serverImage": SERVER_IMAGE,
        "tuner.tickSeconds": "10", "tuner.pollSeconds": "2", "tuner.leaseSeconds": "15", **values,
    }
    return [f"--set={name}={value}" for name, value in settings.items()]


async def eventually(look: Callable[[], Any], what: str, seconds: float = 60.0, every: float = 0.5) -> Any:
    """Polls `look` (a coroutine function, perhaps) until it gives something true; a failed assertion inside is 'not yet'."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            last = look()
            if isinstance(last, Awaitable):
                last = await last
            if last:
                return last
        except (AssertionError, aiohttp.ClientError, TimeoutError, KeyError) as e:
            last = e
        await asyncio.sleep(every)
    raise AssertionError(f"not within {seconds:g} s: {what} (last seen: {last})")


def answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


class Deployment:
    """One InferenceDeployment on the cluster, its Service and its single pod. An async context manager; leaving deletes it."""

    def __init__(self, namespace: str, spec: dict[str, Any] | None = None) -> None:
        self.namespace, self.changes = namespace, spec or {}
        self.batches: set[int] = set()

    async def __aenter__(self) -> Deployment:
        self.stack = AsyncExitStack()
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        manifest = yaml.safe_load(EXAMPLE.read_text())
        manifest["metadata"]["namespace"] = self.namespace
        manifest["spec"] = merged(merged(manifest["spec"], {"image": SERVER_IMAGE}), self.changes)
        self.applied = time.monotonic()
        kubectl("apply", "-f", "-", text=yaml.safe_dump(manifest))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()
        kubectl("delete", "infd", NAME, "-n", self.namespace, "--ignore-not-found", "--timeout=60s")

    # ------------------------------------------------------------------ what the cluster says

    def resource(self) -> dict[str, Any]:
        return get("infd", NAME, "-n", self.namespace)

    def condition(self, kind: str) -> dict[str, Any]:
        return next((c for c in self.resource().get("status", {}).get("conditions", []) if c["type"] == kind), {})

    def history(self) -> list[dict[str, Any]]:
        """Decisions, newest first."""
        return self.resource().get("status", {}).get("tuning", {}).get("history", [])

    def pod(self) -> dict[str, Any]:
        pods = get("pods", "-n", self.namespace, "-l", f"weir.dev/name={NAME}")["items"]
        assert len(pods) == 1, f"{len(pods)} pods of {NAME}"
        return pods[0]

    def patch(self, spec: dict[str, Any]) -> None:
        kubectl("patch", "infd", NAME, "-n", self.namespace, "--type=merge", "-p", json.dumps({"spec": spec}))

    # ------------------------------------------------------------------ ways in

    async def ready(self, seconds: float = 180.0) -> None:
        """Ready, and that means: a completion comes back from the Service's address."""
        await eventually(lambda: self.condition("Ready").get("status") == "True", "Ready", seconds)
        service = get("service", NAME, "-n", self.namespace)
        self.url = await self.way(service["spec"]["clusterIP"], HTTP_PORT, f"service/{NAME}")
        await eventually(self.completion, "a completion through the Service")
        print(f"Ready and answering {time.monotonic() - self.applied:.1f} s after apply")
        pod = self.pod()
        self.control_url = await self.way(pod["status"]["podIP"], CONTROL_PORT, f"pod/{pod['metadata']['name']}")
        secret = next(v["secret"]["secretName"] for v in pod["spec"]["volumes"] if v["name"] == "token")
        self.token = base64.b64decode(get("secret", secret, "-n", self.namespace)["data"]["token"]).decode()

    async def way(self, host: str, port: int, target: str) -> str:
        """The address itself where this machine can reach it, else a kubectl port-forward."""
        if answers(host, port):
            return f"http://{f'[{host}]' if ':' in host else host}:{port}"
        command = [program("kubectl") or "kubectl", "port-forward", "-n", self.namespace, target, f":{port}"]
        forward = await self.stack.enter_async_context(Child(command))
        async with asyncio.timeout(30):
            async for line in forward.lines():
                if b"Forwarding from 127.0.0.1:" in line:
                    return f"http://127.0.0.1:{int(line.split(b'127.0.0.1:')[1].split()[0])}"
        raise AssertionError(f"kubectl port-forward to {target} gave no address")

    async def completion(self) -> dict[str, Any]:
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def control(self, path: str) -> dict[str, Any]:
        """GET from the pod itself: what it says of itself, not what a status says of it."""
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.session.get(f"{self.control_url}/control/{path}", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    # ------------------------------------------------------------------ load

    async def load(self, rate: float, seconds: float, mix: Mix, seed: int, drain: float, folder: Path) -> Report:
        """Open-loop arrivals, the same for the same seed. Meanwhile `batches` gathers what the pod says is in force."""
        arrivals = folder / f"arrivals-{seed}-{seconds:g}.json"
        arrivals.write_text(json.dumps(to_json(schedule(rate, seconds, mix, seed))))
        watching = asyncio.create_task(self._watch())
        try:
            report = await offered(self.url, arrivals, seed=seed, drain=drain)
        finally:
            watching.cancel()
        broken = [o.error for o in report.outcomes if o.broken]
        assert not broken, f"{len(broken)} requests had no proper answer, the first: {broken[0]}"
        return report


    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                self.batches.add((await self.control("window"))["effective"]["max_batch_size"])
            await asyncio.sleep(1)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top, mappings merged."""
    out = dict(base)
    for key, value in changes.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


async def plant_of(deployment: Deployment) -> Plant:
    """What the pod measured of itself at boot."""
    return Plant(**(await deployment.control("state"))["plant"])


async def measured(deployment: Deployment) -> Sizing:
    """Objectives from the pod's own boot measurement; load from what the boot batch, kept full for a while, really carries."""
    sizing = size(await plant_of(deployment), MIX)
    async with Client(deployment.url, seed=9) as client:
        report = await closed_loop(client, BATCH, schedule(1, 6 * BATCH, MIX, 9))
    capacity = len(report.outcomes) / report.seconds
    sizing = replace(sizing, capacity=capacity, rate=OVERLOAD * capacity)
    print(explain(sizing, MIX))
    return sizing


async def declare(deployment: Deployment, objectives: Objectives) -> None:
    """Objectives into the spec, and from there into the running pod."""
    deployment.patch({"slo": {"ttft": f"{objectives.ttft * 1000:.0f}ms", "tpot": f"{objectives.tpot * 1000:.0f}ms"}})

    async def known() -> bool:
        now = (await deployment.control("state"))["slo"]
        return abs(now["ttft"] - objectives.ttft) < 1e-3 and abs(now["tpot"] - objectives.tpot) < 1e-3

    await eventually(known, "the pod has the objectives")


async def phase(
    deployment: Deployment, mode: str, seconds: float, rate: float, objectives: Objectives, folder: Path, mix: Mix = MIX,
) -> Report:
    """Load under one mode. Every phase gets the same arrivals from the beginning of one schedule."""
    deployment.patch({"tuning": {"mode": mode}})
    drain = objectives.ttft + mix.most * mix.output * objectives.tpot
    report = await deployment.load(rate, seconds, mix, 1, drain, folder)
    print(f"{mode}: goodput {goodput(report, objectives):.0%} of {len(report.outcomes)}, "
          f"{sum(o.status == 503 for o in report.outcomes)} refused, generator's lag p99 {report.lag_p99 * 1000:.1f} ms")
    for entry in reversed(deployment.history()):
        print("  ", entry)
    return report


def batch_moves(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was really moved, newest first; moves back included."""
    return [h for h in history if h["outcome"] in ("Moved", "Reverted") and "max_batch_size" in h.get("changes", {})]


def goodput(report: Report, objectives: Objectives, since: float = 0.0) -> float:
    value = share(report.outcomes, objectives, since=since)
    assert value is not None, "nothing was offered"
    return value
