"""A thousand resources under one operator: until all are Ready, standing still, a change, a killed leader; what churn leaves.

    KUBEBUILDER_ASSETS=… PYTHONPATH=benchmarks:tests/unit:tests/control_plane python -m weir_bench.scale [--churn]

A real etcd, API server, controller manager and scheduler, with pods and a node that kwok pretends (all of them from
KUBEBUILDER_ASSETS), control ports that answer at every pod's address (`fleet`), and `weir-operator run` as a process. With
--churn, instead: resources are made, changed and deleted in waves, and memory and what is left behind are looked at.

All of it runs in a network namespace of its own (Linux, `unshare` and `ip`), where the pods' whole range is this machine's:
pods at loopback addresses would do without, but no EndpointSlice may hold those, and their controller never gives up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from control_plane_kit import ADMIN, ASSETS, NEEDED, ROOT, WRITES, Cluster, free_port, start_control_plane
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config

from weir_bench import results
from weir_bench.fleet import CIDR
from weir_bench.process import Child
from weir_bench.scale_bare import bare
from weir_operator.api import names
from weir_operator.io.kube import MERGE, Kube, path
from weir_operator.loops.store import CHILD_KINDS
from weir_server.contract import CONTROL_PORT

NAMESPACE = "scale"
OTHERS = ("kubectl", "kube-", "kwok", "weir-bench")
KWOK = Path(__file__).with_name("kwok.yaml")
POLL_SECONDS = 5.0


async def until(
    what: Callable[[], Any], seconds: float, why: str, every: float = 0.05, seen: Callable[[], str] = str
) -> Any:
    """Poll until `what` gives something true. Ends the run with one line where it does not, and with what was `seen`."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds:.0f} s: {why}. {seen()}".rstrip())
        await asyncio.sleep(every)
    return found


async def _absent(session: aiohttp.ClientSession, target: str) -> bool:
    """A definition is established a moment before it is served."""
    async with session.get(target, params={"limit": "1"}, ssl=False) as answer:
        return answer.status == 404


async def follow(url: str, kind: str, objects: dict[str, dict[str, Any]], begun: asyncio.Event) -> None:
    """Keep `objects`, by name, as a watch of their kind shows them, and say when it has `begun`. Until cancelled."""
    headers = {"Authorization": f"Bearer {ADMIN}", "User-Agent": "weir-bench"}
    async with aiohttp.ClientSession(headers=headers, read_bufsize=2**22) as session:
        target, query = url + path(kind, NAMESPACE), {"watch": "true", "timeoutSeconds": "3600"}
        for _ in range(100):
            if not await _absent(session, target):
                break
            await asyncio.sleep(0.1)
        async with session.get(target, params=query, ssl=False, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            begun.set()
            async for line in answer.content:
                event = json.loads(line)
                name = event["object"]["metadata"]["name"]
                if event["type"] == "DELETED":
                    objects.pop(name, None)
                else:
                    objects[name] = event["object"]


class Plane:
    """The cluster, its watches, and operators on it. An async context manager."""

    async def __aenter__(self) -> Plane:
        async with AsyncExitStack() as stack:  # what was begun ends, too, where the rest cannot begin
            await self._begin(stack)
            self._stack = stack.pop_all()
        return self

    async def _begin(self, stack: AsyncExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.cluster = Cluster(folder, f"https://127.0.0.1:{(port := free_port())}")
        stack.callback(self._end)
        await asyncio.to_thread(start_control_plane, self.cluster, port)
        kubectl, config = self.cluster.kubectl, str(self.cluster.kubeconfig)
        kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        kubectl("wait", "--for=condition=Established", f"crd/{names.CRD_NAME}", "--timeout=30s")
        kubectl("create", "namespace", NAMESPACE)
        self.cluster.start(
            "scheduler", f"{ASSETS}/kube-scheduler", f"--kubeconfig={config}", "--leader-elect=false", "--kube-api-qps=200",
            "--kube-api-burst=400", f"--secure-port={free_port()}", f"--cert-dir={folder}/scheduler",
        )
        self.cluster.start("kwok", f"{ASSETS}/kwok", f"--kubeconfig={config}", f"--config={KWOK}")
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "pretended"}}
        kubectl("create", "-f", "-", stdin=json.dumps(node))
        os.environ["KUBECONFIG"] = config
        fleet = await stack.enter_async_context(Child([sys.executable, "-m", "weir_bench.fleet"]))
        async with asyncio.timeout(30):
            if await anext(fleet.lines(), b"") != b"listening\n":
                raise SystemExit(f"nobody can listen on port {CONTROL_PORT}")
        await load_kube_config(config, client_configuration=(settings := Configuration()))
        self.kube = await stack.enter_async_context(Kube(settings))

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _end(self) -> None:
        for process in reversed(self.cluster.processes):
            process.kill()
            process.wait(15)

    @contextlib.asynccontextmanager
    async def watch(self, kind: str) -> AsyncIterator[dict[str, dict[str, Any]]]:
        """The objects of a kind by name, kept up to date while this lasts."""
        objects: dict[str, dict[str, Any]] = {}
        begun = asyncio.Event()
        following = asyncio.create_task(follow(self.cluster.url, kind, objects, begun))
        try:
            async with asyncio.timeout(30):
                await begun.wait()
            yield objects
        finally:
            following.cancel()
            await asyncio.wait([following])

    def create(self, names_: Iterable[str]) -> None:
        spec = {"model": {"source": "file:///models/m.gguf"}, "slo": {"ttft": "2s", "tpot": "80ms"}}
        items = [{"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": n}, "spec": spec} for n in names_]
        listed = {"apiVersion": "v1", "kind": "List", "items": items}
        self.cluster.kubectl("create", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(listed))

    async def change(self, name: str, seconds: int) -> None:
        body = {"spec": {"slo": {"ttft": f"{seconds}s"}}}
        await self.kube.request("PATCH", path(names.KIND, NAMESPACE, name), body=body, content_type=MERGE)

    def writes(self, since: int) -> Counter[str]:
        """What the operator wrote since the audit log had so many bytes, Leases aside."""
        with self.cluster.audit.open() as file:
            file.seek(since)
            lines = [json.loads(line) for line in file]
        ours = [line for line in lines if line["verb"] in WRITES and not line["userAgent"].startswith(OTHERS)]
        return Counter(f"{w['verb']} {w['objectRef']['resource']}" for w in ours if w["objectRef"]["resource"] != "leases")

    @property
    def audited(self) -> int:
        return self.cluster.audit.stat().st_size


class Run:
    """One operator process. An async context manager."""

    def __init__(self, plane: Plane, name: str) -> None:
        self.port = free_port()
        self._child = Child(
            [sys.executable, "-m", "weir_operator", "run", f"--namespace={NAMESPACE}", f"--health-port={self.port}",
             f"--poll-seconds={POLL_SECONDS:g}"],
            log=plane.cluster.folder / f"{name}.log",
        )

    async def __aenter__(self) -> Run:
        self.began = time.monotonic()
        await self._child.__aenter__()
        self.process = psutil.Process(self._child.process.pid)
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._child.__aexit__()

    @property
    def cpu(self) -> float:
        return float(sum(self.process.cpu_times()[:2]))

    @property
    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    async def metrics(self) -> dict[str, float]:
        """Sums by name; of polls, API calls and passes also by name and label value."""
        try:
            async with self._session.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
                text = await answer.text()
        except aiohttp.ClientError:
            return {}
        found: Counter[str] = Counter()
        for name, labels, value in re.findall(r"^(\w+)(\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            found[name] += float(value)
            if name in ("weir_tuner_polls_total", "weir_operator_api_calls_total", "weir_operator_reconciles_total"):
                found[name + labels] += float(value)
        return dict(found)


def is_ready(obj: dict[str, Any]) -> bool:
    found = obj.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in found)


def waiting(resources: dict[str, dict[str, Any]]) -> str:
    """Who is not Ready, and what the first three say."""
    late = [(name, obj.get("status", {}).get("conditions", ())) for name, obj in resources.items() if not is_ready(obj)]
    said = [f"{name}: " + ", ".join(f"{c['type']}={c['status']} {c['reason']}" for c in found) for name, found in late[:3]]
    return f"{len(late)} of {len(resources)} are not: {'; '.join(said)}"


def at(values: list[float]) -> dict[str, float]:
    ordered, last = sorted(values), len(values) - 1
    return {"p50": statistics.median(ordered), "p95": ordered[min(last, int(0.95 * len(ordered)))], "most": ordered[last]}


async def answered(plane: Plane, boots: dict[str, Any], name: str, seconds: int, limit: float = 60.0) -> float:
    """Seconds from a change of a resource until its ConfigMap says so."""
    began = time.monotonic()
    await plane.change(name, seconds)
    said, nothing = f"ttft: {seconds}.0", {"data": {"boot.yaml": ""}}
    await until(lambda: said in boots.get(f"{name}-boot", nothing)["data"]["boot.yaml"], limit, f"{name} changes", 0.005)
    return time.monotonic() - began


async def many(count: int, seconds: float, changes: int, keep: Callable[[dict[str, Any]], object]) -> None:
    """The floor; all Ready; standing still; changes; a leader killed. After each, `keep` gets the figures that there are."""
    figures: dict[str, Any] = {"resources": count}
    every = [f"r-{i:04d}" for i in range(count)]
    async with Plane() as plane, plane.watch("Deployment") as deployments:
        plane.create(every)
        figures["bare_seconds"], requests = await bare(plane.kube, NAMESPACE, deployments)
        figures["bare_requests_a_resource"] = requests / count
        keep(figures)
    async with Plane() as plane:
        plane.create(every)
        async with plane.watch(names.KIND) as resources, plane.watch("ConfigMap") as boots:
            await until(lambda: len(resources) == count, 60, "the resources are listed")
            async with Run(plane, "first") as first:
                await until(
                    lambda: sum(map(is_ready, resources.values())) == count, 300, "all are Ready", 0.2,
                    lambda: waiting(resources),
                )
                figures["ready_seconds"] = time.monotonic() - first.began
                figures["cpu_seconds_until_ready"] = first.cpu
                calls = {k: n for k, n in (await first.metrics()).items() if k.startswith("weir_operator_api_calls_total{")}
                figures["requests_a_resource"] = sum(calls.values()) / count
                figures["requests"] = calls
                keep(figures)
                figures |= await _still(plane, first, count, seconds)
                keep(figures)
                took = [await answered(plane, boots, every[i * count // changes], 3) for i in range(changes)]
                figures["change_seconds"], figures["changes"] = at(took), changes
                keep(figures)
                async with Run(plane, "second") as second:
                    await _leads(second, 0)
                    await asyncio.sleep(5)
                    first.process.send_signal(signal.SIGKILL)
                    figures["takeover_seconds"] = await answered(plane, boots, every[1], 7)
                    figures["takeover_rss_bytes"] = second.rss
                    keep(figures)


async def _leads(run: Run, whether: int) -> None:
    deadline = time.monotonic() + 60
    while (await run.metrics()).get("weir_operator_leader") != whether:
        if time.monotonic() > deadline:
            raise SystemExit("an operator does not come to lead")
        await asyncio.sleep(0.2)


async def _still(plane: Plane, run: Run, count: int, seconds: float) -> dict[str, Any]:
    """CPU, memory and writes while nothing happens, once what had to be written is written."""
    for _ in range(4):
        since = plane.audited
        await asyncio.sleep(35)  # reports of the tuner are at least 30 s apart
        if not plane.writes(since):
            break
    before, cpu, since = await run.metrics(), run.cpu, plane.audited
    began = time.monotonic()
    await asyncio.sleep(seconds)
    share, after, wrote = (run.cpu - cpu) / (time.monotonic() - began), await run.metrics(), plane.writes(since)
    ok = 'weir_tuner_polls_total{result="ok"}'
    polls = after[ok] - before[ok]
    if polls < 0.8 * count * seconds / POLL_SECONDS:
        print(f"only {polls:.0f} of {count * seconds / POLL_SECONDS:.0f} polls were answered")
    return {
        "still_seconds": seconds, "still_cpu_share_of_a_core": share, "still_rss_bytes": run.rss,
        "still_polls_a_second": polls / seconds, "still_writes_but_leases": sum(wrote.values()), "still_writes": dict(wrote),
    }


async def churn(total: int, wave: int) -> dict[str, Any]:
    """Waves of resources that are made, become Ready, are changed, and go with all that is theirs."""
    kinds = ("Pod", "ReplicaSet", "Secret", *CHILD_KINDS)
    rss, began = [], time.monotonic()
    async with (
        Plane() as plane, plane.watch(names.KIND) as resources, plane.watch("ConfigMap") as boots,
        Run(plane, "operator") as run,
    ):
        await _leads(run, 1)
        for number in range(-(-total // wave)):
            every = [f"w{number}-{i}" for i in range(wave)]
            await asyncio.to_thread(plane.create, every)
            await until(
                lambda: sum(map(is_ready, resources.values())) == wave, 120, f"wave {number} is Ready", 0.1,
                lambda: waiting(resources),
            )
            await asyncio.gather(*(answered(plane, boots, name, 5, 120) for name in every))
            await asyncio.to_thread(plane.cluster.kubectl, "delete", "infd", "--all", "-n", NAMESPACE, "--wait=false")
            await until(lambda: not resources and list(boots) == ["kube-root-ca.crt"], 120, f"wave {number} is gone")
            rss.append(run.rss)
            print(number, f"{rss[-1] / 1e6:.1f} MB, {time.monotonic() - began:.0f} s", flush=True)
        left, after, took = {}, {}, time.monotonic() - began
        for _ in range(60):  # the collector has its own pace, and so has the tuner
            left = {kind: len(await plane.kube.list(kind, NAMESPACE, names.MANAGED_SELECTOR)) for kind in kinds}
            after = await run.metrics()
            if not any(left.values()) and not after.get("weir_tuner_knob", 0):
                break
            await asyncio.sleep(1)
    third = max(1, len(rss) // 3)
    early, late = statistics.median(rss[third : 2 * third] or rss), statistics.median(rss[-third:])
    return {
        "resources": len(rss) * wave, "operations": 3 * len(rss) * wave, "wave": wave, "seconds": took,
        "rss_bytes": rss, "rss_growth": late / early - 1, "left": left,
        "left_known": after.get("weir_operator_resources"), "left_series": after.get("weir_tuner_knob", 0),
        "passes_that_failed": after.get('weir_operator_reconciles_total{result="error"}', 0),
    }


def in_a_network_of_its_own() -> None:
    """Begin this command again in a namespace where every address of CIDR is local, or end with what is missing."""
    if os.environ.get("WEIR_BENCH_NETWORK") == CIDR:
        return
    own = "ip address add 192.0.2.1 dev lo && ip route add default dev lo"  # the API server looks for an address of its own
    script = f'ip link set lo up && {own} && ip route add local {CIDR} dev lo && exec "$@"'
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", script, "sh", sys.executable, "-m", "weir_bench.scale"]
    os.environ["WEIR_BENCH_NETWORK"] = CIDR
    try:
        os.execvp(command[0], [*command, *sys.argv[1:]])
    except OSError as e:
        raise SystemExit(f"{command[0]} cannot be run: {e.strerror}") from None


def main() -> None:
    parser = results.arguments("scale", __doc__, model=False)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=660, help="how long it stands still; in 660, all is listed once")
    parser.add_argument("--changes", type=int, default=40)
    parser.add_argument("--churn", type=int, metavar="RESOURCES", help="make, change and delete so many instead")
    parser.add_argument("--wave", type=int, default=100)
    args: argparse.Namespace = parser.parse_args()
    missing = [name for name in (*NEEDED, "kube-scheduler", "kwok") if not (ASSETS and Path(ASSETS, name).exists())]
    if missing:
        raise SystemExit(f"KUBEBUILDER_ASSETS must name a folder with {', '.join(missing)}")
    in_a_network_of_its_own()

    def keep(figures: dict[str, Any]) -> None:
        print(results.write("scale", {"figures": figures}, args.output), figures, flush=True)

    if args.churn:
        print(results.write("churn", {"figures": asyncio.run(churn(args.churn, args.wave))}, args.output))
    else:
        asyncio.run(many(args.count, args.seconds, args.changes, keep))


if __name__ == "__main__":
    main()
