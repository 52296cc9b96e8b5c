"""How soon the tuner acts: from the moment when there is evidence of an overload to the first move of each knob.

    PYTHONPATH=benchmarks python -m weir_bench.reaction

The demo's overload on a fresh server in local mode. Evidence is what the law asks for (15 intervals, 5 completions), counted
here from the server's own windows, not from what the tuner says of itself; moves are read back from the server; a batch move
is settled when a decision shows what was observed of it beside what was predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from weir_bench import results
from weir_bench.arrivals import schedule, to_json
from weir_bench.demo import MIX, ROOT, Options, measure, with_objectives
from weir_bench.load import offered
from weir_bench.local import Local, NotServing
from weir_server.contract import Window

INTERVALS, COMPLETIONS = 15, 5
EVERY = 0.25


def evident(first: Window, now: Window) -> bool:
    """Whether the law has what it asks for since `first`."""
    finished = sum(now.finished.values()) - sum(first.finished.values())
    intervals = max(now.histograms[h].count - first.histograms[h].count for h in ("tpot", "decode_interval"))
    return finished >= COMPLETIONS and intervals >= INTERVALS


async def watch(local: Local, seen: dict[str, float]) -> None:
    """Fill `seen` (name → loop time) until a settled batch move has been seen."""
    loop, first = asyncio.get_running_loop(), None
    while "batch_settled" not in seen:
        with suppress(TimeoutError, aiohttp.ClientError):
            window, at = Window.from_wire(await local.control("window")), loop.time()
            first = first or window
            boot = first.target
            if evident(first, window):
                seen.setdefault("evidence", at)
            if window.target.max_queue_depth != boot.max_queue_depth:
                seen.setdefault("queue_moved", at)
            if window.target.max_batch_size != boot.max_batch_size:
                seen.setdefault("batch_moved", at)
                history = local.status()["status"].get("tuning", {}).get("history", [])
                if any("observed" in entry for entry in history):
                    seen.setdefault("batch_settled", at)
        await asyncio.sleep(EVERY)


async def once(options: Options, console: Console, seed: int) -> dict[str, Any]:
    sizing = await measure(options, console)
    manifest = with_objectives(options.manifest, sizing.objectives, options.folder / options.manifest.name)
    arrivals = options.folder / "arrivals.json"
    seconds = options.seconds["Auto"]
    arrivals.write_text(json.dumps(to_json(schedule(sizing.rate, seconds, MIX, seed))))
    seen: dict[str, float] = {}
    async with Local(manifest, "Auto", options.folder, "auto", tick=options.tick) as local:
        load = asyncio.create_task(offered(local.server["url"], arrivals, seed=seed, drain=1.0, on_outcome=lambda _: None))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await watch(local, seen)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        history = local.status()["status"].get("tuning", {}).get("history", [])
    since = {name: round(at - seen["evidence"], 2) for name, at in seen.items()} if "evidence" in seen else {}
    return {"seed": seed, "seconds_since_evidence": since, "sizing": sizing.to_json(), "history": history}


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    console, runs = Console(stderr=True), []
    with tempfile.TemporaryDirectory(prefix="weir-reaction-") as folder:
        options = Options(args.manifest, Path(folder), {"Auto": args.seconds}, args.tick_seconds, 1)
        for seed in range(1, args.runs + 1):
            runs.append(await once(options, console, seed))
            console.print(f"run {seed}: {runs[-1]['seconds_since_evidence']}")
    return {"tick_seconds": args.tick_seconds, "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.reaction", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="each on a fresh server with other arrivals (default 3)")
    parser.add_argument("--seconds", type=float, default=240, help="most that one run takes (default 240)")
    parser.add_argument("--tick-seconds", type=float, default=30, help="time between two decisions (default 30)")
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "smollm2.yaml")
    try:
        outcome = asyncio.run(measured(parser.parse_args()))
    except NotServing as e:
        print(f"reaction: {e}", file=sys.stderr)
        return 1
    print(results.write("reaction", outcome), *(run["seconds_since_evidence"] for run in outcome["runs"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
