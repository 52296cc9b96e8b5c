"""From the start of a process to its first token, weights from the cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from weir_bench.arrivals import Arrival
from weir_bench.load import closed_loop
from weir_bench.serving import figures, peers
from weir_bench.serving.rounds import Up, whole
from weir_bench.serving.run import Run, named

STARTS = 3
PROMPT = 16


async def start(run: Run) -> Path | None:
    """Seconds from the start of the process to readiness and to the first token of one request."""
    able = {c.name: c for c in run.contenders([*named("weir"), *named("llama.cpp", "float32")[:1]])}
    shape, servers = peers.shape_of(run.setting.path), {}
    cells: list[dict[str, Any]] = []
    for round, _, name in figures.turns(STARTS + 1, (0,), list(able)):
        contender, began = able[name], time.monotonic()
        async with contender.start(run.setting) as running:
            ready = time.monotonic() - began
            server = contender.server(running, shape, await contender.isa(running) or [], contender.version(run.setting), 0.0)
            up = servers[name] = Up(contender, running, server)
            async with up.client(seed=round) as client:
                report = await closed_loop(client, 1, [Arrival(0, PROMPT, 1)])
            await whole(up, report)
            first = ready + (report.outcomes[0].ttft or 0.0)
        if round:  # the first start fills the caches
            cells.append({"server": name, "round": round, "ready": ready, "first_token": first})
            run.say(f"{name:24} ready after {ready:.2f} s, first token after {first:.2f} s")
    of = {
        name: {n: figures.of(c[n] for c in cells if c["server"] == name) for n in ("ready", "first_token")} for name in servers
    }
    return run.write("start", of, {"prompt": PROMPT, "cells": cells}, [u.server for u in servers.values()])
