"""Who gives way under memory pressure, and which cold prefix is evicted first: the alternatives on the same traffic.

    PYTHONPATH=benchmarks python -m weir_bench.policies

Conversations shaped like those of public traces: a few system prompts of very different popularity, one to six turns, lengths
log-normally spread, pauses between turns. The server's own engine serves them in virtual time: a step takes what the boot
measurement of this model on two AVX2 cores says, so hundreds of hours are minutes. Compared on the same traffic:

- pressure: `newest_stalled` (the fewest of the newest rows that were denied a block) and `least_progress` (the row with the
  fewest computed tokens). What counts is the preemption tax: the share of forward time that recomputes what was thrown away.
- eviction: least recently used first, and most recently freed first. What counts is the share of prompt tokens found.

The real model then runs the set of conversations that preempts most under each pressure policy, in real time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import Progress

from weir_bench import results
from weir_bench.arrivals import prompt_ids
from weir_bench.goodput import quantile
from weir_bench.inprocess import Bench, boot, load, null_boot, quiet
from weir_bench.watermark import converse, hardest, setup
from weir_server.contract import Geometry, Plant
from weir_server.exec.interface import RowResult, RowWork
from weir_server.exec.null import NullModel, NullRunner

PLANT = Plant(a=0.0262, b=0.0010, c=8.5e-7, p=0.00123, prefill_tokens=64)
PRESSURES, ORDERS = ("newest_stalled", "least_progress"), ("oldest first", "newest first")
PAGE, SLOTS, CONTEXT = 16, 8, 2048
BLOCKS = {"roomy": 420, "tight": 210}
"""Of KV cache: with the larger one prefixes compete for it, with the smaller one running rows do."""
SYSTEMS, PAUSE = 8, 12.0
LOOKED_AT = 20  # sets of conversations, for the one that presses most


@dataclass(slots=True)
class Session:
    """One conversation: what is said in each turn, and how long the answers are."""

    tokens: list[int]
    turns: list[tuple[int, int]]
    rng: random.Random


class VirtualTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PlantRunner(NullRunner):
    """A forward that takes the plant's time and nothing else."""

    def __init__(self, geometry: Geometry, time: VirtualTime) -> None:
        super().__init__(geometry)
        self.time = time

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        decode = [row for row in rows if len(row.tokens) == 1]
        prefill = sum(len(row.tokens) for row in rows) - len(decode)
        self.time.now += PLANT.step_seconds(len(decode), sum(row.start + 1 for row in decode), prefill)
        return super().execute(rows)


def sessions(seed: int, seconds: float, rate: float) -> list[tuple[float, Session]]:
    """Poisson starts; popularity of the system prompts falls as 1/rank."""
    rng, at, out = random.Random(seed), 0.0, []
    systems = [prompt_ids(rng.randrange(64, 384), rng) for _ in range(SYSTEMS)]
    while (at := at + rng.expovariate(rate)) < seconds:
        system = rng.choices(systems, [1 / (rank + 1) for rank in range(SYSTEMS)])[0]
        turns = [
            (min(300, round(rng.lognormvariate(3.6, 0.9)) + 1), min(300, round(rng.lognormvariate(4.2, 0.8)) + 1))
            for _ in range(rng.randrange(1, 7))
        ]
        out.append((at, Session(list(system), turns, random.Random(rng.random()))))
    return out


def serve(b: Bench, time: VirtualTime, traffic: list[tuple[float, Session]]) -> dict[str, Any]:
    """All sessions to their end; a turn follows the answer before it after a pause."""
    order = itertools.count()
    due = [(at, next(order), session) for at, session in traffic]
    heapq.heapify(due)
    speaking: dict[int, Session] = {}
    ttft = []
    while due or b.engine.busy:
        if not b.engine.busy:
            time.now = max(time.now, due[0][0])
        while due and due[0][0] <= time.now:
            _, _, session = heapq.heappop(due)
            said, answer = session.turns.pop(0)
            session.tokens += prompt_ids(said, session.rng)
            if len(session.tokens) + answer < CONTEXT:
                speaking[b.submit(list(session.tokens), answer)] = session
        for id, _ in b.step() if b.engine.busy else ():
            session, row = speaking.pop(id), b.rows.pop((id, 0))
            session.tokens += row.tokens
            ttft.append(row.ttft)
            if session.turns:
                heapq.heappush(due, (time.now + session.rng.expovariate(1 / PAUSE), next(order), session))
    s = b.stats
    return {
        "tax": s.recompute_seconds / s.step["step_seconds"], "preempted": s.preempted,
        "hit_share": s.prefix_hits / s.prefix_queries, "evictions": s.prefix_evictions, "seconds": time.now,
        "ttft_p50": quantile(ttft, 0.5), "ttft_p95": quantile(ttft, 0.95), "turns": len(ttft),
    }  # fmt: skip


def simulate(seeds: int, minutes: float, rate: float, progress: Progress) -> list[dict[str, Any]]:
    model, cells = NullModel(PAGE), []
    for seed in progress.track(range(seeds), description=f"{seeds} times {minutes:g} minutes of traffic"):
        for pool, pressure, order in itertools.product(BLOCKS, PRESSURES, ORDERS):
            values = null_boot(
                pressure_policy=pressure, max_batch_size=SLOTS, max_requests_per_batch=SLOTS, context_per_slot=CONTEXT,
                num_blocks=BLOCKS[pool], max_queue_depth=1000, page_size=PAGE,
            )  # fmt: skip
            time = VirtualTime()
            b = Bench(values, model, time, PlantRunner(model.geometry(PAGE), time), evict_newest=order == ORDERS[1])
            found = serve(b, time, sessions(seed, 60 * minutes, rate))
            cells.append({"pool": pool, "pressure": pressure, "eviction": order, "seed": seed, **found})
    return cells


def confirm(name: str, sets: int, progress: Progress) -> list[dict[str, Any]]:
    """The real model, in real time, under each pressure policy."""
    values = {**setup(), "admission_watermark": 0.0}
    counted = [
        {"set": seed, **converse(Bench(null_boot(**values, pressure_policy=pressure), load(null_boot(**values))), seed)}
        for seed in range(LOOKED_AT) for pressure in PRESSURES
    ]
    model, cells = load(boot(name, **values)), []
    for seed in progress.track(hardest(counted, sets), description="the real model"):
        for pressure in PRESSURES:
            b = Bench(boot(name, **values, pressure_policy=pressure), model)
            cell = converse(b, seed)
            tax = b.stats.recompute_seconds / b.stats.step["step_seconds"]
            cells.append({"pressure": pressure, "set": seed, "tax": tax, **cell})
            b.runner.release_chunks(range(2, b.sizing.num_chunks))
    return cells


def main() -> None:
    parser = results.arguments("policies", __doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic for each seed")
    parser.add_argument("--rate", type=float, default=0.3, help="conversations a second")
    parser.add_argument("--sets", type=int, default=1, help="of conversations on the real model")
    args = parser.parse_args()
    quiet()
    with Progress() as progress:
        cells = simulate(args.seeds, args.minutes, args.rate, progress)
        real = confirm(args.model, args.sets, progress) if args.sets else []
    figures: dict[str, Any] = {}
    for kind in itertools.product(BLOCKS, PRESSURES, ORDERS):
        runs = [c for c in cells if (c["pool"], c["pressure"], c["eviction"]) == kind]
        names = ("tax", "preempted", "hit_share", "ttft_p95")
        figures[", ".join(kind)] = {name: results.spread([c[name] for c in runs]) for name in names}
    for name, row in figures.items():
        tax, preempted, hits, ttft = (row[n]["median"] for n in ("tax", "preempted", "hit_share", "ttft_p95"))
        print(f"{name}: tax {tax:.2%}, {preempted:.0f} preemptions, {hits:.1%} of prompt tokens found, TTFT p95 {ttft:.1f} s")
    figures["real tax"] = {p: [c["tax"] for c in real if c["pressure"] == p] for p in PRESSURES}
    print(figures["real tax"])
    outcome = {"figures": figures, "plant": asdict(PLANT), "cells": cells, "real": real}
    print(results.write("policies", outcome, args.output))
    results.moved({name: sum(c[name] for c in cells) for name in ("preempted", "evictions", "hit_share")})
    if real:
        results.moved({"preemptions of the real model": sum(c["preemptions"] for c in real)})


if __name__ == "__main__":
    main()
