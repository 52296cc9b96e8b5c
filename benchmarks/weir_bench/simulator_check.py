"""Is the simulator true? The same rows through the real server and through the simulated pod with the plant regressed from it.

    PYTHONPATH=benchmarks python -m weir_bench.simulator_check [--trace FILE]

Both sides speak through their own window, so latencies are compared as the tuner sees them. Goal: within 15 % on TTFT and time
per token (p50, p95), and within 3 points on the share of refusals. Only a quiet machine makes the comparison worth anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weir_bench import results
from weir_bench.arrivals import Arrival, Mix, schedule, to_json
from weir_bench.load import offered
from weir_bench.servers import weir
from weir_operator.simulate import plants, traces
from weir_operator.simulate.load import Arrival as Row
from weir_operator.simulate.pod import Pod
from weir_operator.simulate.port import PodSetup
from weir_operator.simulate.rivals import percentile
from weir_server.contract import ControlState, Knobs, Plant, Window

WITHIN, POINTS = 0.15, 0.03
POLL = 5.0
CONTEXT = 2048


async def real(arrivals: Sequence[Arrival], batch: int, depth: int, folder: Path) -> tuple[ControlState, list[Window], float]:
    """The server's state, its windows from before the first row to the end, and the load generator's lag (p99, seconds)."""
    file = folder / "arrivals.json"
    file.write_text(json.dumps(to_json(list(arrivals))))
    flags = [f"--parallel={batch}", f"--max-queue-depth={depth}", f"--ctx-size={CONTEXT * batch}", "--no-prompt-cache"]
    async with weir(*flags) as server:
        state = ControlState.from_wire(await server.get("/control/state", control=True))
        windows = [Window.from_wire(await server.get("/control/window", control=True))]
        load = asyncio.create_task(offered(server.url, file, seed=1))
        while not load.done():
            await asyncio.wait([load], timeout=POLL)
            windows.append(Window.from_wire(await server.get("/control/window", control=True)))
        return state, windows, (await load).lag_p99


def simulated(state: ControlState, plant: Plant, arrivals: Sequence[Arrival], knobs: Knobs) -> Window:
    blocks = (state.envelope.kv_cache_budget or (0, 8192 * state.kv.chunk_bytes))[1] // state.kv.chunk_bytes
    setup = PodSetup(
        plant, state.slo, replace(knobs, kv_cache_budget=None), state.envelope.max_batch_size, state.envelope.max_queue_depth,
        kv_blocks=blocks, context=CONTEXT,
    )
    pod = Pod(setup)
    pod.inbox.extend(Row(a.at, a.prompt, min(a.output, CONTEXT - a.prompt - 1)) for a in arrivals)
    pod.run(arrivals[-1].at + 300.0)
    return pod.window()


def figures(window: Window, first: Window | None = None) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("ttft", "tpot"):
        counts = list(window.histograms[name].counts)
        if first is not None:
            counts = [b - a for a, b in zip(first.histograms[name].counts, counts, strict=True)]
        found |= {f"{name}_p50": percentile(counts, 0.5), f"{name}_p95": percentile(counts, 0.95)}
    refused = sum(window.refused["queue_full"].values())
    return {**found, "refused": refused / max(1, refused + window.queued)}


def compare(server: dict[str, float], simulator: dict[str, float]) -> dict[str, bool]:
    """Which of the goals are met."""
    within = {k: abs(simulator[k] / v - 1) <= WITHIN for k, v in server.items() if k != "refused" and v > 0}
    return {**within, "refused": abs(simulator["refused"] - server["refused"]) <= POINTS}


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    if args.trace is None:
        return schedule(args.rate, args.seconds, Mix(), args.seed)
    shape = traces.Shape(prompt_by=16, output_by=8, prompt_cap=512, output_cap=64, context=CONTEXT)
    rows = traces.with_rate(traces.read(args.trace, shape), args.rate, args.seconds)
    return [Arrival(row.at, row.prompt, row.output) for row in rows]


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    arrivals = _arrivals(args)
    with tempfile.TemporaryDirectory(prefix="weir-check-") as folder:
        state, windows, lag = await real(arrivals, args.batch, args.depth, Path(folder))
    plant = plants.regressed(windows, state.plant)
    server, simulator = figures(windows[-1], windows[0]), figures(simulated(state, plant, arrivals, state.boot))
    return {
        "rows": len(arrivals), "rate": args.rate, "batch": args.batch, "depth": args.depth, "trace": bool(args.trace),
        "plant": asdict(plant), "server": server, "simulator": simulator, "met": compare(server, simulator), "lag_p99": lag,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.simulator_check", description=__doc__.split("\n")[0])
    parser.add_argument("--trace", type=Path, help="recorded rows, scaled down; default: drawn ones, 128 in, 64 out")
    parser.add_argument("--rate", type=float, default=2.0, help="rows per second (default 2)")
    parser.add_argument("--seconds", type=float, default=180, help="of load (default 180)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    outcome = asyncio.run(measured(parser.parse_args()))
    print(results.write("simulator-check", outcome))
    for name, value in outcome["server"].items():
        said = "met" if outcome["met"].get(name) else "MISSED"
        print(f"{name:10} server {value:.4f}  simulator {outcome['simulator'][name]:.4f}  {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
