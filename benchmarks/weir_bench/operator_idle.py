"""An operator with one Ready resource and nothing to do: memory, CPU, and what it writes to the API.

    KUBECONFIG=… PYTHONPATH=benchmarks python -m weir_bench.operator_idle

Runs `weir-operator run` on this machine against the cluster (whose nodes hold the demo image, and on which no other operator
runs), applies examples/smollm2-cluster.yaml, waits until it is Ready and then watches. Pods must be reachable from here.
Everything but the CRD is deleted at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from weir_bench import results
from weir_bench.process import Child
from weir_bench.servers import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
NAME, SETTLE = "smollm2", 60.0
REQUESTS = re.compile(r"^apiserver_request_total\{([^}]*)\} (\S+)$", re.MULTILINE)
KINDS = {"inferencedeployments", "deployments", "services", "configmaps", "secrets", "serviceaccounts", "events"}
"""What the operator may write, but its Lease: those of the nodes' kubelets are counted under the same name."""


def kubectl(*args: str) -> str:
    """Its output. Ends the program with one line where kubectl is missing, or cannot do it."""
    try:
        return subprocess.run(["kubectl", *args], check=True, capture_output=True, text=True, timeout=180).stdout
    except FileNotFoundError:
        raise SystemExit("kubectl is not on the PATH") from None
    except subprocess.CalledProcessError as e:
        said = e.stderr.strip().splitlines()[-1:]
        raise SystemExit(f"kubectl {args[0]} failed; KUBECONFIG must name a cluster: {' '.join(said)}") from None


def writes() -> Counter[str]:
    """Write requests that the API server has answered, by verb and resource, whoever sent them."""
    total: Counter[str] = Counter()
    for text, count in REQUESTS.findall(kubectl("get", "--raw", "/metrics")):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        if labels["verb"] in ("POST", "PUT", "PATCH", "APPLY", "DELETE") and labels["resource"] in KINDS:
            total[f"{labels['verb']} {labels['resource']} {labels['subresource']}".strip()] += int(float(count))
    return total


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "operator.log"
        command = [sys.executable, "-m", "weir_operator", "run", f"--health-port={free_port()}"]
        async with Child(command, log=log) as operator:
            try:
                kubectl("apply", "-f", str(ROOT / "examples" / "smollm2-cluster.yaml"))
                await asyncio.to_thread(kubectl, "wait", "--for=condition=Ready", f"infd/{NAME}", "--timeout=170s")
                await asyncio.sleep(SETTLE)  # the status is written at most each 30 s
                process = psutil.Process(operator.process.pid)
                before, cpu = writes(), sum(process.cpu_times()[:2])
                await asyncio.sleep(args.seconds)
                share, after = (sum(process.cpu_times()[:2]) - cpu) / args.seconds, writes()
                rss = process.memory_info().rss
            finally:
                kubectl("delete", "infd", NAME, "--ignore-not-found", "--timeout=120s")
    return {
        "figures": {"rss_bytes": rss, "cpu_share_of_a_core": share, "writes_but_leases": sum((after - before).values())},
        "seconds": args.seconds, "writes": dict(after - before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.operator_idle", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    outcome = asyncio.run(measure(parser.parse_args()))
    print(results.write("operator_idle", outcome), outcome["figures"])


if __name__ == "__main__":
    main()
