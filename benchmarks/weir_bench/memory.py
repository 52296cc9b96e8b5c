"""Memory of the engine process with its pool filled: anonymous RSS beside weights + pool + 400 MB.

    PYTHONPATH=benchmarks python -m weir_bench.memory
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from weir_bench import results
from weir_bench.arrivals import Arrival
from weir_bench.load import Client, closed_loop
from weir_bench.servers import weir

POOL = 512 << 20
ALLOWANCE = 400_000_000
PROMPT, OUTPUT = 900, 8


def anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with weir(f"--kv-cache-budget={POOL}", "--parallel=8", "--max-requests-per-batch=8", "--ctx-size=16384") as server:
        empty, peak, used = anonymous(server.engine().pid), 0, 0

        async def watch() -> None:
            nonlocal peak, used
            while True:
                window = await server.get("/control/window", control=True)
                peak, used = max(peak, anonymous(server.engine().pid)), max(used, window["kv_used_bytes"])
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        state = await server.get("/control/state", control=True)
        tokens = POOL // state["kv"]["chunk_bytes"] * state["kv"]["block_tokens"]
        requests = int(1.3 * tokens / (PROMPT + OUTPUT)) + 8  # every prompt is new: what has ended stays as a cached prefix
        async with Client(server.url, timeout=900) as client:
            report = await closed_loop(client, 8, [Arrival(0, PROMPT, OUTPUT)] * requests)
        watching.cancel()
        cache = await server.get("/v1/cache/stats")
        final = anonymous(server.engine().pid)
    failed = [o.error for o in report.outcomes if o.status != 200 or o.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    weights = state["model"]["weights_bytes"]
    bound = weights + POOL + ALLOWANCE
    return {
        "figures": {"anonymous_bytes": max(peak, final), "bound_bytes": bound, "within": max(peak, final) <= bound},
        "weights_bytes": weights, "pool_bytes": POOL, "empty_bytes": empty, "most_used_by_rows": used, "cache": cache,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.memory", description=__doc__.split("\n")[0])
    outcome = asyncio.run(measure(parser.parse_args()))
    print(results.write("memory", outcome), outcome["figures"])


if __name__ == "__main__":
    main()
