"""Refusing 2,000 requests in 5 s while 8 streams run: every refusal answered, how fast, and what it cost the streams.

    PYTHONPATH=benchmarks python -m weir_bench.refuse [--vegeta PROGRAM]

The refused load comes from a niced process (our generator, or vegeta, which is compiled). Void where the generator's own lag
exceeds 5 ms (vegeta does not tell its lag).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from weir_bench import results
from weir_bench.arrivals import Arrival, prompt_ids, to_json
from weir_bench.goodput import quantile
from weir_bench.load import NICE, Client, Outcome, offered
from weir_bench.servers import Running, weir

STREAMS, TOKENS = 8, 400
REQUESTS, SECONDS = 2000, 5.0
VOID_LAG = 0.005


async def streams(server: Running, client: Client) -> list[asyncio.Task[Outcome]]:
    """Eight streams, every one of them past its prefill when this returns."""
    tasks = [asyncio.create_task(client.send(Arrival(0, 64, TOKENS), client.now())) for _ in range(STREAMS)]
    await server.until(lambda window: window["running"] == STREAMS and not window["prefilling"])
    return tasks


def gaps_p95(outcomes: list[Outcome]) -> float:
    """The 95th percentile of the times between a stream's tokens. Raises RuntimeError if a stream broke."""
    broken = [o.error or o.finish for o in outcomes if o.status != 200 or o.error or o.tokens != TOKENS]
    if broken:
        raise RuntimeError(f"{len(broken)} of {STREAMS} streams broke: {broken[0]}")
    value = quantile([gap for o in outcomes for gap in o.gaps], 0.95)
    assert value is not None
    return value


async def flood(server: Running, folder: Path) -> dict[str, Any]:
    """From our generator: evenly spaced arrivals."""
    arrivals = folder / "arrivals.json"
    arrivals.write_text(json.dumps(to_json([Arrival(i * SECONDS / REQUESTS, 64, 16) for i in range(REQUESTS)])))
    report = await offered(server.url, arrivals, drain=20)
    waits = [o.ended - o.sent for o in report.outcomes]
    return {
        "answered": sum(o.status == 503 for o in report.outcomes), "p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99),
        "generator_lag_p99": report.lag_p99, "generator_cpu": report.cpu, "void": report.lag_p99 > VOID_LAG,
    }


async def vegeta(server: Running, program: Path) -> dict[str, Any]:
    """The same from vegeta."""
    body = json.dumps({"prompt": prompt_ids(64, random.Random(1)), "max_tokens": 16, "stream": True, "ignore_eos": True})
    target = {
        "method": "POST", "url": f"{server.url}/v1/completions", "header": {"Content-Type": ["application/json"]},
        "body": base64.b64encode(body.encode()).decode(),
    }
    pace = [f"-rate={REQUESTS / SECONDS:g}/s", f"-duration={SECONDS:g}s"]
    attack = ["nice", f"-n{NICE}", program, "attack", "-format=json", *pace]

    def run() -> dict[str, Any]:
        shots = subprocess.run(attack, input=f"{json.dumps(target)}\n".encode(), capture_output=True, check=True, timeout=120)
        report = [program, "report", "-type=json"]
        return json.loads(subprocess.run(report, input=shots.stdout, capture_output=True, check=True, timeout=60).stdout)

    report = await asyncio.to_thread(run)
    latencies = report["latencies"]
    return {"answered": report["status_codes"].get("503", 0), "p50": latencies["50th"] / 1e9, "p99": latencies["99th"] / 1e9,
            "generator_lag_p99": None, "void": False}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    flags = (f"--parallel={STREAMS}", f"--max-requests-per-batch={STREAMS}", "--ctx-size=16384", "--max-queue-depth=1")
    async with weir(*flags) as server:
        async with Client(server.url, timeout=300, keep_gaps=True) as client:
            undisturbed = gaps_p95(await asyncio.gather(*await streams(server, client)))
            running = await streams(server, client)
            waiting = asyncio.create_task(client.send(Arrival(0, 64, 4), 0.0))  # fills the queue: all that follow are refused
            await server.until(lambda window: window["waiting"] == 1)
            with tempfile.TemporaryDirectory() as folder:
                refused = await (vegeta(server, args.vegeta) if args.vegeta else flood(server, Path(folder)))
            still = sum(not task.done() for task in running)
            disturbed = gaps_p95(await asyncio.gather(*running))
            await waiting
        window = await server.get("/control/window", control=True)
    return {
        "figures": {
            "refused_of_2000": refused["answered"], "refusal_p99_seconds": refused["p99"],
            "itl_p95_ratio": disturbed / undisturbed, "void": refused["void"] or still < STREAMS,
        },
        "streams_still_running_at_the_end": still, "itl_p95_undisturbed": undisturbed, "itl_p95_disturbed": disturbed,
        "generator": "vegeta" if args.vegeta else "weir_bench.load", "refused": refused,
        "refused_by_the_server": window["refused"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.refuse", description=__doc__.split("\n")[0])
    parser.add_argument("--vegeta", type=Path, help="use this program in place of our own generator")
    outcome = asyncio.run(measure(parser.parse_args()))
    print(results.write("refuse", outcome), outcome["figures"])


if __name__ == "__main__":
    main()
