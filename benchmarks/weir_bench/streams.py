"""What the size of a prefill chunk trades: four streams decode while a long prompt is admitted.

    PYTHONPATH=benchmarks python -m weir_bench.streams [--prompt 4096] [--sizes adaptive 2048 512 128 64]

For each size, in turn: the 95th percentile of the time between a stream's tokens while the prompt is prefilled, and the new
request's time to the first token. `adaptive` is the default: large while nothing decodes, small while something does.
What single steps of each size cost is measured by weir_bench.chunks.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from rich.progress import Progress

from weir_bench import results
from weir_bench.arrivals import prompt_ids
from weir_bench.goodput import quantile
from weir_bench.inprocess import Bench, boot, load, quiet

STREAMS = 4
ADAPTIVE = "adaptive"


def admit(b: Bench, prompt: int, rng: random.Random) -> dict[str, float]:
    """Streams in full flow, then the long prompt. Seconds."""
    streams = [b.submit(prompt_ids(32, rng), 2000) for _ in range(STREAMS)]
    while any(len(b.rows[id, 0].times) < 8 for id in streams):
        b.step()
    alone = [gap for id in streams for gap in b.rows[id, 0].gaps[2:]]
    long = b.submit(prompt_ids(prompt, rng), 1)
    before = b.stats.step["prefill_tokens"]
    while b.rows[long, 0].reason is None:
        b.step()
    row = b.rows[long, 0]
    gaps = [y - x for id in streams for x, y in pairwise(b.rows[id, 0].times) if y > row.arrived]
    results.moved({"prefilled": b.stats.step["prefill_tokens"] - before == prompt, "gaps": len(gaps)})
    return {
        "itl_p95": quantile(gaps, 0.95) or 0.0, "itl_p50": quantile(gaps, 0.5) or 0.0, "ttft": row.ttft,
        "itl_alone_p50": quantile(alone, 0.5) or 0.0, "steps": len(gaps) / STREAMS,
    }  # fmt: skip


def measure(name: str, sizes: list[str], prompt: int, repeats: int, progress: Progress) -> list[dict[str, Any]]:
    def values(size: str) -> Any:
        chunk = None if size == ADAPTIVE else int(size)
        return boot(
            name, prefill_chunk=chunk, max_batch_size=STREAMS + 1, max_requests_per_batch=STREAMS + 1, context_per_slot=8192,
            max_batch_tokens=STREAMS + (chunk or 2048), num_blocks=(prompt + STREAMS * 2048) // 16 + 64, prefix_cache=False,
        )  # fmt: skip

    model, cells = load(values(sizes[0])), []
    for repeat in progress.track(range(repeats), description=f"{len(sizes)} chunk sizes, {prompt} tokens of prompt"):
        for size in sizes:
            b = Bench(values(size), model)
            cells.append({"chunk": size, "repeat": repeat, **admit(b, prompt, random.Random(repeat))})
            itl, ttft = cells[-1]["itl_p95"], cells[-1]["ttft"]
            progress.console.print(f"chunk {size}: ITL p95 {itl * 1000:.0f} ms, TTFT {ttft:.2f} s")
    return cells


def main() -> None:
    parser = results.arguments("streams", __doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--sizes", nargs="+", default=["2048", "512", "128", "64", ADAPTIVE], help="tokens, or adaptive")
    args = parser.parse_args()
    quiet()
    with Progress() as progress:
        cells = measure(args.model, args.sizes, args.prompt, args.repeats, progress)
    by_size = {
        size: {n: results.spread([c[n] for c in cells if c["chunk"] == size]) for n in ("itl_p95", "ttft", "itl_alone_p50")}
        for size in args.sizes
    }
    figures = {size: {"itl_p95": s["itl_p95"]["median"], "ttft": s["ttft"]["median"]} for size, s in by_size.items()}
    outcome = {"figures": figures, "prompt": args.prompt, "by_size": by_size, "cells": cells}
    print(results.write("streams", outcome, args.output))
    print(figures)


if __name__ == "__main__":
    main()
