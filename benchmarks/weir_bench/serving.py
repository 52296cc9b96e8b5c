"""Throughput and time to the first token over HTTP with 1, 4 and 8 clients, and beside llama-server on the same weights.

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
from weir_bench.servers import Running, llama, quantized, weir
from weir_server.model.files import resolve

PROMPT, OUTPUT = 128, 64
SLOTS = 8
ROUNDS = ((1, 4), (4, 12), (8, 24))
"""Clients, and the requests that they share."""


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


async def batch(server: Running) -> tuple[float, float]:
    """Row-seconds and seconds of decoding so far: their differences give the mean number of rows in the batch."""
    window = await server.get("/control/window", control=True)
    return window["running_seconds"], window["decoding_seconds"]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    servers: dict[str, Running] = {}
    rounds: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = [f"--parallel={SLOTS}", f"--max-requests-per-batch={SLOTS}", f"--ctx-size={2048 * SLOTS}"]
        servers["weir"] = await stack.enter_async_context(weir(*flags, model=args.model))
        if args.rival:
            model = quantized(args.rival, resolve(args.model), "F32", folder / "f32.gguf")
            servers["llama.cpp"] = await stack.enter_async_context(llama(args.rival, model, SLOTS))
        for server in servers.values():  # warm caches and clocks
            await round_of(server, 2, 2, seed=0)
        for n in range(args.rounds):
            for name, server in servers.items():
                for clients, requests in ROUNDS:
                    before = await batch(server) if name == "weir" else None
                    rounds.append({"server": name, "round": n, **await round_of(server, clients, requests, seed=n + 1)})
                    if before:
                        after = await batch(server)
                        rounds[-1]["mean_rows"] = (after[0] - before[0]) / (after[1] - before[1])
                        results.moved({f"the batch with {clients} clients": rounds[-1]["mean_rows"] > 0.6 * clients})
                    print(rounds[-1], flush=True)
        state = await servers["weir"].get("/control/state", control=True)

    def median(server: str, clients: int, name: str = "tokens_per_second") -> float:
        return statistics.median(r[name] for r in rounds if (r["server"], r["clients"]) == (server, clients))

    figures = {f"weir_{c}_against_1": median("weir", c) / median("weir", 1) for c in (4, 8)}
    figures["weir_ttft_8_against_1"] = median("weir", 8, "ttft_p50") / median("weir", 1, "ttft_p50")
    if args.rival:
        figures |= {f"weir_against_llama_cpp_{c}": median("weir", c) / median("llama.cpp", c) for c, _ in ROUNDS}
    return {
        "figures": figures, "prompt": PROMPT, "output": OUTPUT, "model": state["model"], "plant": state["plant"],
        "rounds": rounds,
    }


def main() -> None:
    parser = results.arguments("serving", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rival", type=Path, help="folder with llama-server and llama-quantize")
    args = parser.parse_args()
    outcome = asyncio.run(measure(args))
    print(results.write("serving", outcome, args.output), outcome["figures"])


if __name__ == "__main__":
    main()
