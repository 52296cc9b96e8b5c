"""Throughput over HTTP at fixed concurrency: 8 clients against 1, and against llama-server on the same weights in the same run.

    PYTHONPATH=benchmarks python -m weir_bench.serving [--rival FOLDER_OF_LLAMA_SERVER]

Random prompts of 128 tokens, 64 generated, greedy, no shared prefixes. Rounds are interleaved; the figure is the median.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from weir_bench import results
from weir_bench.arrivals import Arrival
from weir_bench.goodput import quantile
from weir_bench.load import Client, closed_loop
from weir_bench.servers import MODEL, Running, llama, quantized, weir
from weir_server.model.files import resolve

PROMPT, OUTPUT = 128, 64
SLOTS = 8


async def round_of(server: Running, clients: int, requests: int, seed: int) -> dict[str, Any]:
    """One round: tokens generated per second of wall time, prefill included; latencies in seconds."""
    async with Client(server.url, seed=seed) as client:
        report = await closed_loop(client, clients, [Arrival(0, PROMPT, OUTPUT)] * requests)
    failed = [o.error for o in report.outcomes if o.status != 200 or o.error]
    if failed or any(o.tokens != OUTPUT for o in report.outcomes):
        raise RuntimeError(f"{len(failed)} requests failed or were short: {failed[:1]}")
    ttft, tpot = [o.ttft for o in report.outcomes], [o.tpot for o in report.outcomes]
    return {
        "clients": clients, "tokens_per_second": requests * OUTPUT / report.seconds, "ttft_p50": quantile(ttft, 0.5),
        "tpot_p50": quantile(tpot, 0.5), "generator_lag_p99": report.lag_p99, "generator_cpu": report.cpu,
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    servers: dict[str, Running] = {}
    rounds: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = [f"--parallel={SLOTS}", f"--max-requests-per-batch={SLOTS}", f"--ctx-size={2048 * SLOTS}"]
        servers["weir"] = await stack.enter_async_context(weir(*flags))
        if args.rival:
            model = quantized(args.rival, resolve(MODEL), "F32", folder / "f32.gguf")
            servers["llama.cpp"] = await stack.enter_async_context(llama(args.rival, model, SLOTS))
        for server in servers.values():  # warm caches and clocks
            await round_of(server, 2, 2, seed=0)
        for n in range(args.rounds):
            for name, server in servers.items():
                for clients, requests in ((1, 4), (8, 24)):
                    rounds.append({"server": name, "round": n, **await round_of(server, clients, requests, seed=n + 1)})
                    print(rounds[-1], flush=True)
        state = await servers["weir"].get("/control/state", control=True)

    def median(server: str, clients: int) -> float:
        return statistics.median(r["tokens_per_second"] for r in rounds if (r["server"], r["clients"]) == (server, clients))

    figures = {"weir_8_against_1": median("weir", 8) / median("weir", 1)}
    if args.rival:
        figures |= {f"weir_against_llama_cpp_{c}": median("weir", c) / median("llama.cpp", c) for c in (1, 8)}
    return {
        "figures": figures, "prompt": PROMPT, "output": OUTPUT, "model": state["model"], "plant": state["plant"],
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.serving", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rival", type=Path, help="folder with llama-server and llama-quantize")
    outcome = asyncio.run(measure(parser.parse_args()))
    print(results.write("serving", outcome), outcome["figures"])


if __name__ == "__main__":
    main()
