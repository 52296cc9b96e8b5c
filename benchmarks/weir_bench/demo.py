"""The demo: a small model, more load than its defaults can carry, first with the tuner watching, then with it acting.

Both parts get the same arrivals, one after the other on a fresh server: two servers on one machine would spoil each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.live import Live

from weir_bench import results
from weir_bench.arrivals import Mix, schedule, to_json
from weir_bench.display import View, tuner_line
from weir_bench.goodput import Objectives, series, share
from weir_bench.load import Outcome, Report, offered
from weir_bench.local import Local, NotServing
from weir_bench.plot import Move, Part, Sample, picture
from weir_bench.sizing import Sizing, explain, size

ROOT = Path(__file__).resolve().parent.parent.parent
MIX = Mix(prompt=64, output=64, cv=0.5)
INTERVAL = 10.0
"""Seconds of one point in the series of goodput and latency."""
TOLERATED = 5
"""So many requests may end in neither an answer nor a 503, in each part, before the demo gives up."""
MOVED, ADVISED = ("Moved", "Reverted"), ("Advised",)


@dataclass(frozen=True, slots=True)
class Options:
    manifest: Path
    folder: Path
    seconds: dict[str, float]  # mode → length of its part
    tick: float
    seed: int


@dataclass(slots=True)
class Played:
    """A part that ended: what is drawn, what was measured, what the tuner said."""

    part: Part
    report: Report
    history: list[dict[str, Any]]


async def measure(options: Options, console: Console) -> Sizing:
    """Start the server with the manifest as it is, read what it measured of itself at boot, stop it."""
    with console.status("Loading the model and measuring a step (the first time it also unpacks the weights)"):
        async with Local(options.manifest, "Disabled", options.folder, "measure", tick=options.tick) as local:
            return size(await local.plant(), MIX)


def with_objectives(manifest: Path, objectives: Objectives, target: Path) -> Path:
    """The same manifest with other objectives."""
    document = yaml.safe_load(manifest.read_text())
    document["spec"]["slo"] = {"ttft": f"{objectives.ttft * 1000:.0f}ms", "tpot": f"{objectives.tpot * 1000:.0f}ms"}
    target.write_text(yaml.safe_dump(document, sort_keys=False))
    return target


async def play(mode: str, manifest: Path, sizing: Sizing, options: Options, console: Console) -> Played:
    """One part: a fresh server under `mode`, the arrivals from their beginning, shown as it goes."""
    seconds, objectives = options.seconds[mode], sizing.objectives
    arrivals = options.folder / f"{mode.lower()}.arrivals.json"
    arrivals.write_text(json.dumps(to_json(schedule(sizing.rate, seconds, MIX, options.seed))))
    part, outcomes, loop = Part(mode, seconds, None, []), [], asyncio.get_running_loop()
    async with Local(manifest, mode, options.folder, mode.lower(), tick=options.tick) as local:
        began, wall = loop.time(), datetime.now(UTC).timestamp()

        def view() -> View:
            return View(part, outcomes, objectives, loop.time() - began, tuner_line(local.status()))

        failed: asyncio.Future[None] = loop.create_future()

        def heard(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if sum(o.broken for o in outcomes) >= TOLERATED and not failed.done():
                failed.set_exception(NotServing(f"{TOLERATED} requests broke, the last: {outcome.status} {outcome.error}"))

        with _shown(console, view, options.tick) as sampled:
            # what has not ended when the last request could still have been in time is a miss, whatever becomes of it
            drain = objectives.ttft + MIX.most * MIX.output * objectives.tpot
            watching = asyncio.create_task(local.watch(began, lambda sample: sampled(part, sample)))
            load = offered(local.server["url"], arrivals, seed=options.seed, drain=drain, on_outcome=heard)
            loading = asyncio.create_task(load)
            try:
                done, _ = await asyncio.wait([watching, loading, failed], return_when=asyncio.FIRST_COMPLETED)
                for ended in done:
                    ended.result()  # raises what went wrong
                report = loading.result()
            finally:
                for task in (watching, loading, failed):
                    task.cancel()
                await asyncio.gather(watching, loading, failed, return_exceptions=True)
        history = local.status()["status"].get("tuning", {}).get("history", [])
    part.goodput = share(report.outcomes, objectives)
    part.intervals = series(report.outcomes, objectives, INTERVAL)
    part.moves = moves(history, wall, MOVED)
    return Played(part, report, history)


class _shown:
    """Shows a view: live on a terminal, else one line for each tick. Inside, call it with each sample."""

    def __init__(self, console: Console, view: Callable[[], View], tick: float) -> None:
        self.console, self.view, self.tick, self.next_line = console, view, tick, tick
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Callable[[Part, Sample], Awaitable[None]]:
        if self.live:
            self.live.start()
        return self._sampled

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    async def _sampled(self, part: Part, sample: Sample) -> None:
        part.samples.append(sample)
        if self.live:
            self.live.update(self.view().panel(), refresh=True)
        elif sample.at >= self.next_line:
            self.next_line += self.tick
            print(self.view().line(), flush=True)


def moves(history: list[dict[str, Any]], began: float, outcomes: tuple[str, ...]) -> list[Move]:
    """What `history` (newest first, as in the status) says was moved, or advised, oldest first."""
    return [
        Move(datetime.fromisoformat(entry["time"]).timestamp() - began, knob, before, after, entry["reason"])
        for entry in reversed(history) if entry["outcome"] in outcomes
        for knob, (before, after) in entry.get("changes", {}).items()
    ]


def summary(advise: Played, auto: Played, sizing: Sizing) -> str:
    """The end of the demo, in words."""
    lines = [explain(sizing, MIX), "", "Goodput, the share of what was offered that met both objectives:"]
    for played in (advise, auto):
        outcomes = played.report.outcomes
        refused, half = sum(o.status == 503 for o in outcomes), played.part.seconds / 2
        later = share(outcomes, sizing.objectives, since=half)
        lines.append(
            f"  {played.part.name:7} {played.part.goodput or 0:4.0%} of {len(outcomes)} requests "
            f"({later or 0:.0%} in its second half; {refused} were refused with 503)"
        )
    for title, played, kinds in (("Moves of the tuner:", auto, MOVED), ("What it would have done in Advise:", advise, ADVISED)):
        made = moves(played.history, 0.0, kinds)
        said = [f"  {m.knob} {m.before} → {m.after}: {m.reason}" for m in made] or ["  nothing"]
        lines += ["", title, *said]
    lag = max(advise.report.lag_p99, auto.report.lag_p99) * 1000
    lines += ["", f"The load generator's own lag: {lag:.1f} ms (99th percentile)."]
    return "\n".join(lines)


async def demo(options: Options, console: Console) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    sizing = await measure(options, console)
    print(explain(sizing, MIX), flush=True)
    manifest = with_objectives(options.manifest, sizing.objectives, options.folder / options.manifest.name)
    played = []
    for mode, seconds in options.seconds.items():
        print(f"\n{mode}: {seconds:.0f} s of load from a fresh server.", flush=True)
        played.append(await play(mode, manifest, sizing, options, console))
    title = f"{options.manifest.stem}: {sizing.rate:.2f} requests/s, {sizing.rate / sizing.capacity:g} × what batch 4 carries"
    png = picture([p.part for p in played], sizing.objectives, title, options.folder / "demo.png")
    raw = results.write("demo", {
        "options": {**asdict(options), "manifest": str(options.manifest), "folder": str(options.folder)},
        "mix": asdict(MIX), "sizing": sizing.to_json(),
        "parts": [{**asdict(p.part), "report": p.report.to_json(), "history": p.history} for p in played],
    }, options.folder)
    print(f"\n{summary(played[0], played[1], sizing)}\n\nPicture: {png}\nRaw data: {raw}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.demo", description=__doc__)
    parser.add_argument("--seconds-advise", type=float, default=90, help="length of the first part (default 90)")
    parser.add_argument("--seconds-auto", type=float, default=240, help="length of the second part (default 240)")
    parser.add_argument("--tick-seconds", type=float, default=30, help="time between two decisions of the tuner (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default 1)")
    parser.add_argument("--manifest", type=Path, default=ROOT / "examples" / "smollm2.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / ".demo", help="folder of the picture, the raw data and the logs")
    args = parser.parse_args()
    seconds = {"Advise": args.seconds_advise, "Auto": args.seconds_auto}
    options = Options(args.manifest, args.out, seconds, args.tick_seconds, args.seed)

    async def until_told() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await demo(options, Console())

    try:
        asyncio.run(until_told())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130
    except (NotServing, OSError) as e:
        print(f"demo: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
