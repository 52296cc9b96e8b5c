"""Is the tuner worth it on a real server? One load that does not change, while the tuner watches, acts, watches, acts.

    PYTHONPATH=benchmarks python -m weir_bench.live [--trace FILE] [--minutes 20]

Local mode with a small model; the rows of a recorded trace, their lengths and rate scaled to the machine. The mode is changed
in the running deployment, so all parts share one process and one stream of arrivals. Afterwards settings that stay, around the
one that the tuner chose, get a part each of the same arrivals: the best of them is the oracle. Each part is counted as a whole
and without its first third, in which the part before still runs. On a cluster: tests/cluster/test_live_scenario.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from weir_bench import results
from weir_bench.arrivals import Arrival, Mix, schedule, to_json
from weir_bench.demo import ROOT, Options, measure, with_objectives
from weir_bench.goodput import Objectives, share
from weir_bench.load import Outcome, Report, offered
from weir_bench.local import Local, NotServing
from weir_bench.sizing import BATCH, OVERLOAD, capacity
from weir_operator.api import names
from weir_operator.cli.local.api import FOLDER_VARIABLE
from weir_operator.cli.plugin.api import LocalSocket, sockets
from weir_operator.io.kube import path
from weir_operator.simulate import traces

MODES = ("Advise", "Auto", "Advise", "Auto")
SETTLING = 1 / 3
"""Of a part: what it begins with is still the part's before it."""
LONGEST_PROMPT, LONGEST_OUTPUT = 512, 64
AROUND = (0.7, 1.0, 1.4)
"""× the tuner's batch, and for each of these its queue depth once and twice: the settings that stay."""
Patch = Callable[[dict[str, Any]], Awaitable[object]]
"""Merges into the spec of the running deployment."""
State = Callable[[], Awaitable[Mapping[str, Any]]]
"""The knobs in force, as the server itself says."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A part of a run: `seconds` under a change of the spec."""

    name: str
    seconds: float
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Goodput of a part, whole and without its first third; knobs in force at its end; rows offered and refused."""

    name: str
    seconds: float
    goodput: float | None
    settled: float | None
    offered: int
    refused: int
    knobs: Mapping[str, Any]


def trace_rows(file: Path, rate: float, seconds: float) -> list[Arrival]:
    """Of a recorded trace: its rows at another mean rate, prompts ÷ 16 and answers ÷ 8, none longer than the model takes."""
    shape = traces.Shape(prompt_by=16, output_by=8, prompt_cap=LONGEST_PROMPT, output_cap=LONGEST_OUTPUT)
    return [Arrival(row.at, row.prompt, row.output) for row in traces.with_rate(traces.read(file, shape), rate, seconds)]


def in_last(rows: Sequence[Arrival], turns: Sequence[Turn], seconds: float) -> list[Arrival]:
    """The rows of the last turn's first `seconds`, from 0 on: settings that stay are tried under what the tuner had."""
    begin = sum(turn.seconds for turn in turns[:-1])
    return [replace(row, at=row.at - begin) for row in rows if begin <= row.at < begin + seconds]


def mix_of(rows: Sequence[Arrival]) -> Mix:
    """The mean lengths of rows."""
    return Mix(sum(row.prompt for row in rows) / len(rows), sum(row.output for row in rows) / len(rows))


async def play(
    url: str, patch: Patch, state: State, turns: Sequence[Turn], rows: Sequence[Arrival], objectives: Objectives, folder: Path,
    tell: Callable[[str], object] = print,
) -> tuple[list[Found], Report]:
    """All turns under one stream of `rows`. Raises what `patch`, `state` or the load generator raises."""
    file = folder / "live.arrivals.json"
    file.write_text(json.dumps(to_json(list(rows))))
    outcomes: list[Outcome] = []
    await patch(dict(turns[0].spec))
    load = asyncio.create_task(offered(url, file, seed=1, on_outcome=outcomes.append))
    began, at, knobs = asyncio.get_running_loop().time(), 0.0, list[Mapping[str, Any]]()
    try:
        for number, turn in enumerate(turns):
            if number:
                await patch(dict(turn.spec))
            at += turn.seconds
            await asyncio.wait([load], timeout=began + at - asyncio.get_running_loop().time())
            if load.done() and number + 1 < len(turns):
                break
            knobs.append(await state())
            good = share(outcomes, objectives, at - (1 - SETTLING) * turn.seconds, at)
            tell(f"{turn.name}: {good or 0:.0%} so far, {knobs[-1]}")
        report = await load
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    return list(counted(turns, report.outcomes, objectives, knobs)), report


def counted(
    turns: Sequence[Turn], outcomes: Sequence[Outcome], objectives: Objectives, knobs: Sequence[Mapping[str, Any]],
) -> Iterable[Found]:
    """Each turn by the rows that were offered in it."""
    begin = 0.0
    for turn, in_force in zip(turns, knobs, strict=False):
        end = begin + turn.seconds
        inside = [o for o in outcomes if begin <= o.offered < end]
        yield Found(
            turn.name, turn.seconds, share(inside, objectives), share(inside, objectives, begin + SETTLING * turn.seconds),
            len(inside), sum(o.status == 503 for o in inside), in_force,
        )
        begin = end


def by_mode(minutes: float) -> list[Turn]:
    """Watching and acting in turns, `minutes` in all."""
    each = 60 * minutes / len(MODES)
    return [Turn(mode, each, {"tuning": {"mode": mode}}) for mode in MODES]


def staying(knobs: Mapping[str, Any], seconds: float) -> list[Turn]:
    """Settings around `knobs` that stay, `seconds` each."""
    batch, depth = knobs["max_batch_size"], knobs["max_queue_depth"]
    return [
        Turn(f"{b} rows, queue {q}", seconds, {"tuning": {"mode": "Advise", "knobs": {
            "maxBatchSize": {"initial": b}, "maxQueueDepth": {"initial": q},
        }}})
        for b in dict.fromkeys(max(1, round(factor * batch)) for factor in AROUND) for q in (depth, 2 * max(1, depth))
    ]


def verdict(turns: Sequence[Found], oracle: Sequence[Found]) -> dict[str, Any]:
    """Watching against acting, and acting against the best of what stays: of settled parts."""
    def of(name: str) -> list[float]:
        return [t.settled or 0.0 for t in turns if t.name == name]

    best = max(oracle, key=lambda f: f.settled or 0.0) if oracle else None
    acting = sum(of("Auto")) / max(1, len(of("Auto")))
    return {
        "advise": of("Advise"), "auto": of("Auto"), "best_static": best and asdict(best),
        "of_best_static": acting / best.settled if best and best.settled else None,
    }


async def local(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole of it in local mode."""
    os.environ[FOLDER_VARIABLE] = str(folder / "sockets")
    sizing = await measure(Options(args.manifest, folder, {}, args.tick_seconds, 1), Console(stderr=True))
    manifest = with_objectives(args.manifest, sizing.objectives, folder / args.manifest.name)
    async with Local(manifest, "Advise", folder, "live", tick=args.tick_seconds) as server:
        def rows(rate: float, seconds: float) -> list[Arrival]:
            return trace_rows(args.trace, rate, seconds) if args.trace else schedule(rate, seconds, Mix(), 1)

        rate = OVERLOAD * capacity(await server.plant(), mix_of(rows(1.0, 600.0)), BATCH)

        async def state() -> Mapping[str, Any]:
            return dict((await server.control("state"))["effective"])

        socket, *_ = await sockets()
        patch = _patch(socket, args.manifest.stem)
        try:
            plan, whole = by_mode(args.minutes), rows(rate, 60 * args.minutes)
            turns, report = await play(server.server["url"], patch, state, plan, whole, sizing.objectives, folder)
            history = server.status()["status"].get("tuning", {}).get("history", [])
            oracle, same = [], in_last(whole, plan, args.grid_seconds)
            for one in staying(turns[-1].knobs, args.grid_seconds):
                found, _ = await play(server.server["url"], patch, state, [one], same, sizing.objectives, folder)
                oracle += found
        finally:
            await socket.close()
    return {
        "trace": args.trace.name if args.trace else None, "rate": rate, "objectives": asdict(sizing.objectives),
        "turns": [asdict(t) for t in turns], "static": [asdict(f) for f in oracle], "verdict": verdict(turns, oracle),
        "generator": {k: v for k, v in replace(report, outcomes=[]).to_json().items() if k != "outcomes"}, "history": history,
    }


def _patch(socket: LocalSocket, name: str) -> Patch:
    async def patch(spec: dict[str, Any]) -> None:
        await socket.request("PATCH", path(names.KIND, "default", name), body={"spec": spec})

    return patch


def main() -> int:
    parser = results.arguments("live", __doc__, model=False)
    parser.add_argument("--trace", type=Path, help="a recorded trace (Azure, Mooncake); without it, drawn arrivals")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the four turns together (default 20)")
    parser.add_argument("--grid-seconds", type=float, default=90.0, help="of each setting that stays (default 90)")
    parser.add_argument("--tick-seconds", type=float, default=30.0)
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "smollm2.yaml")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            figures = asyncio.run(local(args, Path(folder)))
    except KeyboardInterrupt:
        print("stopped; nothing is left running", file=sys.stderr)
        return 130
    except (NotServing, OSError, traces.TraceError) as e:
        print(f"live: {e}", file=sys.stderr)
        return 1
    print(f"{json.dumps(figures['verdict'], indent=1)}\n{results.write('live', figures, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
