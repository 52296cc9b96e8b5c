"""Memory of the engine: bounded while the pool fills, given back when the budget falls, flat over thousands of requests.

    PYTHONPATH=benchmarks python -m weir_bench.memory

One server. (1) The pool is filled with cached prefixes: anonymous memory beside weights + pool + 400 MB. (2) Eight requests
run while the KV budget is lowered to its least: ten seconds after they end, the memory of what is above the budget must be
back with the system. (3) Two thousand requests of random lengths: memory, descriptors, threads and blocks before and after.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from weir_bench import results
from weir_bench.arrivals import Arrival
from weir_bench.load import Client, Report, closed_loop
from weir_bench.servers import Running, weir

ALLOWANCE = 400_000_000
PROMPT, OUTPUT, CLIENTS = 900, 8, 8
WITHIN = 10.0
"""Seconds that memory may take to come back after the last sequence has ended."""
SHARE, DRIFT = 0.9, 0.02


def anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


async def serve(server: Running, arrivals: list[Arrival], seed: int) -> Report:
    """All of them, by CLIENTS at a time. Raises RuntimeError if one failed."""
    async with Client(server.url, seed=seed, timeout=900) as client:
        report = await closed_loop(client, CLIENTS, arrivals)
    if failed := [o.error for o in report.outcomes if o.status != 200 or o.error]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return report


async def fill(server: Running, pool: int, tokens: int) -> dict[str, Any]:
    """More new prompts than the pool holds: what has ended stays as a cached prefix."""
    empty, peak, used = anonymous(server.engine().pid), 0, 0

    async def watch() -> None:
        nonlocal peak, used
        while True:
            window = await server.get("/control/window", control=True)
            peak, used = max(peak, anonymous(server.engine().pid)), max(used, window["kv_used_bytes"])
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await serve(server, [Arrival(0, PROMPT, OUTPUT)] * (int(1.3 * tokens / (PROMPT + OUTPUT)) + CLIENTS), seed=1)
    watching.cancel()
    cache = await server.get("/v1/cache/stats")
    filled = (cache["used_bytes"] + cache["cached_bytes"]) / pool
    results.moved({f"{SHARE:.0%} of the pool": filled >= SHARE, "evictions": cache["evictions"]})
    return {
        "empty_bytes": empty, "peak_bytes": max(peak, anonymous(server.engine().pid)), "most_used_by_rows": used,
        "cache": cache, "filled": filled,
    }  # fmt: skip


async def give_back(server: Running, pool: int, state: dict[str, Any]) -> dict[str, Any]:
    """Lower the budget under eight running requests. `returned`: share of what is above the new budget that came back."""
    before, least = anonymous(server.engine().pid), state["envelope"]["kv_cache_budget"][0]
    running = asyncio.create_task(serve(server, [Arrival(0, 64, 96)] * CLIENTS, seed=2))
    await server.until(lambda window: window["running"] == CLIENTS)
    await server.put_knobs(kv_cache_budget=least)
    during = anonymous(server.engine().pid)
    await running
    await server.until(lambda window: not window["running"])
    ended, floor = time.monotonic(), before - SHARE * (pool - least)
    while (now := anonymous(server.engine().pid)) > floor and time.monotonic() < ended + WITHIN:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    seconds, cache = time.monotonic() - ended, await server.get("/v1/cache/stats")
    return {
        "before_bytes": before, "during_bytes": during, "after_bytes": now, "budget_bytes": least,
        "returned": (before - now) / (pool - least), "seconds_after_the_last_end": seconds, "cache": cache,
    }  # fmt: skip


async def endure(server: Running, requests: int, progress: Progress) -> dict[str, Any]:
    """Random lengths; the first tenth warms allocators up."""
    rng, part = random.Random(3), max(1, requests // 10)
    arrivals = [Arrival(0, rng.randrange(1, 64), rng.randrange(1, 9)) for _ in range(requests)]
    readings = []
    for n in progress.track(range(0, requests, part), description=f"{requests:,} requests of random lengths"):
        await serve(server, arrivals[n : n + part], seed=4 + n)
        await server.until(lambda window: not window["running"] and not window["waiting"])
        engine, window = server.engine(), await server.get("/control/window", control=True)
        readings.append({
            "engine_bytes": anonymous(engine.pid), "server_bytes": anonymous(server.process.pid),
            "descriptors": engine.num_fds(), "server_descriptors": server.process.num_fds(),
            "threads": engine.num_threads(), "kv_used_bytes": window["kv_used_bytes"],
        })  # fmt: skip
    first, last = readings[0], readings[-1]
    return {
        "requests": requests, "engine_growth": last["engine_bytes"] / first["engine_bytes"] - 1,
        "leaked": {
            **{k: max(0, last[k] - first[k]) for k in ("descriptors", "server_descriptors", "threads")},
            "kv": last["kv_used_bytes"],
        },
        "readings": readings,
    }  # fmt: skip


async def measure(model: str, pool: int, requests: int) -> dict[str, Any]:
    flags = [f"--kv-cache-budget={pool}", "--parallel=8", "--max-requests-per-batch=8", "--ctx-size=8192"]
    with Progress() as progress:
        async with weir(*flags, model=model) as server:
            state = await server.get("/control/state", control=True)
            task = progress.add_task("fill the pool, then lower the budget", total=2)
            filled = await fill(server, pool, pool // state["kv"]["chunk_bytes"] * state["kv"]["block_tokens"])
            progress.advance(task)
            back = await give_back(server, pool, state)
            progress.advance(task)
            long = await endure(server, requests, progress)
    bound = state["model"]["weights_bytes"] + pool + ALLOWANCE
    figures = {
        "anonymous_bytes": filled["peak_bytes"], "bound_bytes": bound, "within": filled["peak_bytes"] <= bound,
        "returned_share": back["returned"], "returned_within_seconds": back["seconds_after_the_last_end"],
        "growth_over_requests": long["engine_growth"], "leaked": long["leaked"],
    }  # fmt: skip
    return {"figures": figures, "weights_bytes": state["model"]["weights_bytes"], "pool_bytes": pool, "fill": filled,
            "give_back": back, "endurance": long}


def main() -> None:
    parser = results.arguments("memory", __doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pool", type=int, default=512 << 20, metavar="BYTES", help="of KV cache")
    args = parser.parse_args()
    outcome = asyncio.run(measure(args.model, args.pool, args.requests))
    figures = outcome["figures"]
    print(results.write("memory", outcome, args.output), figures)
    if not figures["within"] or figures["returned_share"] < SHARE or any(figures["leaked"].values()):
        raise SystemExit("memory was not given back, or something leaked")
    if abs(figures["growth_over_requests"]) > DRIFT:
        raise SystemExit(f"memory drifted by {figures['growth_over_requests']:.1%} over {args.requests} requests")


if __name__ == "__main__":
    main()
