"""Time between tokens under two kinds of traffic: waves with a client that hammers /metrics, and Poisson arrivals."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from weir_bench.arrivals import Arrival, Mix, schedule
from weir_bench.goodput import quantile
from weir_bench.load import Report
from weir_bench.serving import figures, picture, rounds
from weir_bench.serving.record import OUTPUT, PROMPT
from weir_bench.serving.run import Run, named

WAVE_CLIENTS = (8, 32)
LOAD = 0.7
"""Of the rate at which no client ever waits for work."""
SATURATING = 48
LEAST_GAP = 1e-6
"""Tokens that come in one read have no time between them."""
ADAPTIVE = "adaptive"
SIZES = (ADAPTIVE, "32", "64", "128", "256", "512", "2048")


async def waves(run: Run) -> Path | None:
    """All clients send at the same moment, again and again, while another one asks for /metrics without pause."""
    kinds = named("weir", "float32") + (named("llama.cpp", "float32") if run.form.name == "full" else [])
    able, cells = run.contenders(kinds), []
    async with rounds.all_up(able, run.setting) as up:
        for round, clients, name in figures.turns(run.form.rounds, WAVE_CLIENTS, list(up)):
            async with rounds.hammer(up[name].running.url) as count:
                report = await rounds.waves(up[name], clients, run.form.waves, seed=100 + round)
            cells.append({"server": name, "round": round, "clients": clients, "asked": count["answers"], **gaps(report)})
            run.say(f"{name:24} {clients:3} clients in waves: {told(cells[-1])}, /metrics {count['answers']} times")
        servers = rounds.by_name(up)
    of = {
        name: {str(n): summary([c for c in cells if (c["server"], c["clients"]) == (name, n)]) for n in WAVE_CLIENTS}
        for name in up
    }
    return run.write("waves", of, {"prompt": PROMPT, "output": OUTPUT, "waves": run.form.waves, "cells": cells}, servers)


async def poisson(run: Run) -> Path | None:
    """Poisson arrivals at 70 % load for each size of a prefill chunk: time between tokens against time to the first."""
    sizes = (ADAPTIVE,) if run.form.name == "short" else SIZES
    cells: list[dict[str, Any]] = []
    [ours] = named("weir", "float32")
    async with AsyncExitStack() as stack:
        up = {}
        for size in sizes:
            flags = () if size == ADAPTIVE else (f"--prefill-chunk-size={size}",)
            setting = replace(run.setting, flags=(*run.setting.flags, *flags))
            up[size] = (await stack.enter_async_context(rounds.all_up([ours], setting)))[ours.name]
        most = await rounds.saturation(up[ADAPTIVE], [Arrival(0, PROMPT, OUTPUT)] * SATURATING, run.setting.slots)
        mix = Mix(PROMPT, OUTPUT, cv=0)
        for round, _, size in figures.turns(run.form.rounds, (0,), sizes):
            arrivals = schedule(LOAD * most, run.form.seconds, mix, seed=round + 1)
            report = await rounds.offer(up[size], arrivals, seed=round)
            await rounds.whole(up[size], report)
            cells.append({"chunk": size, "round": round, "requests": len(arrivals), **gaps(report)})
            run.say(f"chunk {size:8}: {told(cells[-1])}, TTFT p50 {cells[-1]['ttft_p50']:.2f} s")
        servers = [up[ADAPTIVE].server]
    of = {size: summary([c for c in cells if c["chunk"] == size]) for size in sizes}
    work = {"prompt": PROMPT, "output": OUTPUT, "load": LOAD, "rate": LOAD * most, "seconds": run.form.seconds, "cells": cells}
    path = run.write("poisson", of, work, servers)
    picture.frontier(path)
    return path


def gaps(report: Report) -> dict[str, float]:
    """Seconds. Every request was whole, so there are gaps."""
    values = rounds.all_gaps(report.outcomes)
    ttft = [o.ttft for o in report.outcomes if o.ttft is not None]
    p50, p95 = quantile(values, 0.5) or 0.0, quantile(values, 0.95) or 0.0
    return {
        "itl_p50": p50, "itl_p95": p95, "ratio": p95 / max(p50, LEAST_GAP), "itl_max": max(values),
        "ttft_p50": quantile(ttft, 0.5) or 0.0, "ttft_p95": quantile(ttft, 0.95) or 0.0,
        "generator_lag_p99": report.lag_p99, "generator_cpu": report.cpu,
    }  # fmt: skip


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {n: figures.of(c[n] for c in cells) for n in ("itl_p50", "itl_p95", "ratio", "ttft_p50", "ttft_p95")}


def told(c: dict[str, Any]) -> str:
    return f"ITL {c['itl_p50'] * 1e3:.1f} / {c['itl_p95'] * 1e3:.1f} ms (p95/p50 {c['ratio']:.2f})"
