"""What the engine itself costs: scheduler, cache and commit over a runner that computes nothing.

    PYTHONPATH=benchmarks python -m weir_bench.overhead

CPU seconds of this process (not wall time) for each generated token at 32 rows; the same for 1 to 64 rows; the cost of a
step with 10 and with 1,000 requests waiting, interleaved; and 100,000 requests in a row: what the last ones cost beside the
first, and what memory they leave behind. Report making is part of it, HTTP and the link are not.
"""

from __future__ import annotations

import gc
import random
import time
from itertools import pairwise
from typing import Any

from rich.progress import Progress

from weir_bench import results
from weir_bench.arrivals import prompt_ids
from weir_bench.inprocess import Bench, load, null_boot, quiet
from weir_server.engine.memory import memory_used

ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT, OUTPUT = 64, 128
WAITING = (10, 1000)
MICRO = 1e6


def bench(rows: int, **more: Any) -> Bench:
    values = null_boot(
        max_batch_size=rows, max_requests_per_batch=64, max_batch_tokens=4096, context_per_slot=512,
        num_blocks=64 * 32, max_queue_depth=2000, **more,
    )  # fmt: skip
    return Bench(values, load(values))


def full(rows: int, waiting: int = 0, output: int = 400) -> Bench:
    """An engine whose batch is full and decodes."""
    b, rng = bench(rows), random.Random(rows)
    for _ in range(rows + waiting):
        b.submit(prompt_ids(PROMPT, rng), output)
    while b.stats.prefilling or b.stats.running < rows:
        b.step()
    return b


def decode_cost(b: Bench, steps: int) -> float:
    """CPU seconds of a step in which every row decodes."""
    start = time.process_time()
    for _ in range(steps):
        b.step()
    return (time.process_time() - start) / steps


def by_rows(repeats: int, progress: Progress) -> dict[str, Any]:
    """CPU microseconds of a decode step against rows, rounds interleaved."""
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in progress.track(range(repeats), description="rows in the batch"):
        for rows in ROWS:
            b = full(rows)
            times[rows].append(decode_cost(b, 200) * MICRO)
            results.moved({"decoded rows": b.stats.step["decode_rows"]})
    steps = {str(rows): results.spread(values) for rows, values in times.items()}
    slopes = [(min(times[b]) - min(times[a])) / (b - a) for a, b in pairwise(ROWS)]
    return {"step_microseconds": steps, "marginal_microseconds_per_row": slopes[2:]}


def by_queue(repeats: int, progress: Progress) -> dict[str, Any]:
    """CPU microseconds of a step of 32 rows with few and with many waiting, both engines stepped in turn."""
    times: dict[int, list[float]] = {waiting: [] for waiting in WAITING}
    for _ in progress.track(range(repeats), description="requests waiting"):
        benches = {waiting: full(32, waiting) for waiting in WAITING}
        for _ in range(10):
            for waiting, b in benches.items():
                times[waiting].append(decode_cost(b, 20) * MICRO)
                results.moved({f"{waiting} waiting": b.stats.waiting == waiting})
    few, many = (results.spread(times[waiting]) for waiting in WAITING)
    return {"few": few, "many": many, "ratio": many["median"] / few["median"]}


def throughput(repeats: int, progress: Progress) -> dict[str, Any]:
    """Whole requests at 32 rows: admission, prefill, decode, end. CPU microseconds for each generated token, and tokens/s."""
    cpu, wall = [], []
    for _ in progress.track(range(repeats), description="whole requests"):
        b, rng = bench(32), random.Random(1)
        prompts = [prompt_ids(PROMPT, rng) for _ in range(256)]
        began, started = time.process_time(), time.perf_counter()
        for prompt in prompts:
            b.submit(prompt, OUTPUT)
        b.run()
        tokens = len(prompts) * OUTPUT
        cpu.append((time.process_time() - began) / tokens * MICRO)
        wall.append(tokens / (time.perf_counter() - started))
    return {"cpu_microseconds_per_token": results.spread(cpu), "tokens_per_second": results.spread(wall)}


def endurance(requests: int, progress: Progress) -> dict[str, Any]:
    """Many requests through one engine: CPU for each tenth of them, and memory after the first and after the last tenth."""
    b, rng = bench(32), random.Random(7)
    tenths, memory = [], []
    shared = prompt_ids(32, rng)
    for _ in progress.track(range(10), description=f"{requests:,} requests"):
        began, sent = time.process_time(), 0
        while sent < requests // 10 or b.engine.busy:
            while sent < requests // 10 and b.stats.waiting < 32:
                own = prompt_ids(rng.randrange(1, 64), rng)
                b.submit(shared + own if rng.random() < 0.5 else own, rng.randrange(1, 12))
                sent += 1
            b.step()
            if len(b.rows) > 1000:
                b.rows = {key: row for key, row in b.rows.items() if row.reason is None}
        b.rows.clear()
        tenths.append(time.process_time() - began)
        gc.collect()
        memory.append(memory_used())
    results.moved({"prefix hits": b.stats.prefix_hits, "evictions": b.stats.prefix_evictions})
    leaks = {"blocks used": b.stats.kv_blocks_used, "requests kept": len(b.engine.requests)}
    if any(leaks.values()):
        raise SystemExit(f"left behind: {leaks}")
    return {
        "requests": requests, "cpu_seconds_by_tenth": tenths, "last_against_second": tenths[-1] / tenths[1],
        "memory_bytes_by_tenth": memory, "memory_growth_bytes": memory[-1] - memory[1],
    }  # fmt: skip


def main() -> None:
    parser = results.arguments("overhead", __doc__, model=False)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    quiet()
    with Progress() as progress:
        whole = throughput(args.repeats, progress)
        rows, queue = by_rows(args.repeats, progress), by_queue(args.repeats, progress)
        long = endurance(args.requests, progress)
    figures = {
        "cpu_microseconds_per_token": whole["cpu_microseconds_per_token"]["median"],
        "tokens_per_second": whole["tokens_per_second"]["median"],
        "step_with_1000_waiting_against_10": queue["ratio"],
        "last_tenth_against_second": long["last_against_second"], "memory_growth_bytes": long["memory_growth_bytes"],
    }  # fmt: skip
    outcome = {"figures": figures, "whole": whole, "rows": rows, "queue": queue, "long": long}
    print(results.write("overhead", outcome, args.output))
    print(figures)


if __name__ == "__main__":
    main()
