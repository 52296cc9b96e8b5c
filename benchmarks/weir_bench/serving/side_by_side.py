"""Throughput, first tokens and time between tokens against the number of clients: ours and rivals of one precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from weir_bench import roofs
from weir_bench.serving import figures, picture, rounds
from weir_bench.serving.peers import Contender
from weir_bench.serving.record import OUTPUT, PROMPT, Cell, Server, Share
from weir_bench.serving.run import Load, Run, named

PREFILL = Load(8, 8, 1)
"""Nothing but prompts: eight of them, a thousand tokens."""


async def float32(run: Run) -> Path | None:
    """float32 weights beside llama.cpp's F32."""
    return await measure(run, "float32", [*named("weir", "float32"), *named("llama.cpp", "float32")])


async def int8(run: Run) -> Path | None:
    """8-bit weights beside llama.cpp's Q8_0, and in the full form Q4_0."""
    kinds = ("int8",) if run.form.name == "short" else ("int8", "int4")
    return await measure(run, "int8", [*named("weir", "int8"), *named("llama.cpp", *kinds)])


async def peers(run: Run) -> Path | None:
    """Other engines on this machine, behind an HTTP adapter where they have no server: float32, fewer clients."""
    others = [c for system in ("transformers", "openvino-genai") for c in named(system)]
    return await measure(run, "peers", [*named("weir", "float32"), *others], clients=sorted(run.form.each)[:2])


async def measure(run: Run, name: str, wanted: Sequence[Contender], clients: Sequence[int] | None = None) -> Path | None:
    """None where ours is not among those that can run: there is nothing to compare."""
    able = run.contenders(wanted)
    if not any(c.system == "weir" for c in able):
        return None
    clients = clients or tuple(run.form.each)
    loads = [Load(n, n * run.form.each[n], OUTPUT) for n in clients] + [PREFILL]
    earlier = run.before(name)
    cells: list[Cell] = list(earlier.cells) if earlier else []
    first = 1 + max((c.round for c in cells), default=-1)
    async with rounds.all_up(able, run.setting) as up:
        before = await run.measure_roofs()
        for round, load, server in figures.turns(run.form.rounds, loads, list(up)):
            cell = await rounds.load(up[server], first + round, load.clients, load.requests, output=load.output)
            after = await run.measure_roofs()
            if before and after:
                beside = roofs.best([before, after])
                cell = msgspec.structs.replace(cell, read_roof=beside.read, fma_roof=beside.fma)
            cells.append(cell)
            run.say(line(cell))
            before = after
        servers = rounds.by_name(up)
        shape = rounds.peers.shape_of(run.setting.path)
    claims, shares = figures.claims(cells, servers, clients, OUTPUT), roof_shares(cells, servers, shape, run)
    told = {f"{c.figure} {c.clients} against {c.rival}": c.ratio.median for c in claims}
    work = {"prompt": PROMPT, "output": OUTPUT, "clients": list(clients), "prefill_clients": PREFILL.clients}
    path = run.write(name, {**told, **scaling(cells, servers)}, work, servers, cells, claims, shares)
    picture.against_clients(path)
    return path


def roof_shares(cells: Sequence[Cell], servers: Sequence[Server], shape: figures.Shape, run: Run) -> list[Share]:
    best, shares = run.best_roofs(), list[Share]()
    if best is None:
        return []
    for server in servers:
        own = [c for c in cells if c.server == server.name]
        for n in dict.fromkeys(c.clients for c in own if c.output > 1):
            shares += figures.median_shares([c for c in own if (c.clients, c.output) == (n, OUTPUT)], server, shape)
        if cell := figures.median_cell(cells, server.name, PREFILL.clients, PREFILL.output, "seconds"):
            share = figures.prefill_share(cell, server, shape, best)
            shares += [share] if share else []
    return shares


def scaling(cells: Sequence[Cell], servers: Sequence[Server]) -> dict[str, float]:
    """Throughput with 8 clients against 1, round by round; and prompt tokens a second."""
    told = {}
    for server in servers:
        one, eight = (figures.series(cells, server.name, n, "tokens_per_second", OUTPUT) for n in (1, 8))
        if ratios := figures.pairs(eight, one, less=False):
            told[f"{server.name}: 8 clients against 1"] = figures.of(ratios).median
        alone = [c.requests * c.prompt / c.seconds for c in cells if c.server == server.name and c.output == 1]
        if alone:
            told[f"{server.name}: prompt tokens a second"] = figures.of(alone).median
    return told


def line(c: Cell) -> str:
    itl = "" if c.itl_p50 is None or c.itl_p95 is None else f"ITL {c.itl_p50 * 1e3:6.1f} / {c.itl_p95 * 1e3:6.1f} ms, "
    rate = c.tokens_per_second if c.output > 1 else c.requests * c.prompt / c.seconds
    unit = "tok/s" if c.output > 1 else "prompt tok/s"
    return (
        f"{c.server:24} {c.clients:3} clients: {rate:6.1f} {unit}, TTFT {c.ttft_p50:6.2f} s, {itl}"
        f"{c.forward_rows:5.1f} rows a pass; generator lag {c.generator_lag_p99 * 1e3:.1f} ms, CPU {c.generator_cpu:.0%}"
    )
