"""`make eval-tuner`: the law against defaults, the best static setting, and other laws, in virtual time.

Each run of each cell is one line of a JSON-lines file, so a stopped evaluation goes on where it was; cells are shared among
processes, and runs of a cell see the same arrivals and the same noise. `report` makes the JSON, the plots and the table of
docs/tuning.md from those lines alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from weir_bench import results
from weir_bench.eval_cases import DEFAULTS, SQUARE, Case, Cell, build, cells
from weir_bench.eval_fleet import HPA, fleet_cells, fleet_report, fleet_table, run_fleet_cell
from weir_bench.eval_oracles import best_single, best_static, following, for_all_seeds, oracle_table
from weir_operator.simulate.rivals import RIVALS, rival
from weir_operator.simulate.run import WARM_UP, Result, static, tuned
from weir_operator.tuner.types import TunerSpec

BIN = 30.0
SECONDS = {False: 1200.0, True: 480.0}
SET_POINT = "set-point"
DEPTHS = (1, 2, 4, 8, 16, 32)
FIRST_DEPTH = 2
Line = dict[str, Any]
Job = tuple[Callable[[Any], list[Line]], Any]


# ---------------------------------------------------------------- running

def run_cell(job: tuple[Cell, Path | None, float, bool, frozenset[str]]) -> list[Line]:
    """All runs of one cell that are not done yet."""
    cell, folder, seconds, short, done = job
    case = build(cell, folder, seconds)
    lines: list[Line] = []

    def keep(name: str, go: Callable[[], Result]) -> Result | None:
        if f"{cell.key}|{name}" in done:
            return None
        began = time.process_time()
        result = go()
        lines.append(_line(cell, case, name, result, time.process_time() - began))
        return result

    for name, (batch, depth) in DEFAULTS.items():
        keep(f"default {name}", lambda b=batch, q=depth: _static(case, b, q))
    if f"{cell.key}|best" not in done:
        _search(case, short, lambda name, go: keep(name, go))
        lines.append({"cell": cell.key, "run": "best"})
    spec = TunerSpec(case.setup.slo.ttft, case.setup.slo.tpot)
    keep(SET_POINT, lambda: tuned(case.setup, case.rows, case.end, spec))
    for name in RIVALS:
        keep(name, lambda n=name: tuned(case.setup, case.rows, case.end, spec, rival(n)))
    return lines


def _static(case: Case, batch: int, depth: int) -> Result:
    most = case.setup.batch_limits[1]
    boot = replace(case.setup.boot, max_batch_size=min(batch, most), max_queue_depth=depth)
    return static(replace(case.setup, boot=boot), case.rows, case.end)


def _search(case: Case, short: bool, keep: Callable[[str, Callable[[], Result]], Result | None]) -> None:
    """The best setting that stays: batches first, then depths and neighbours around the two best."""
    seen: dict[tuple[int, int], float] = {}

    def look(batch: int, depth: int) -> None:
        if (batch, depth) not in seen:
            result = keep(f"static {batch} {depth}", lambda: _static(case, batch, depth))
            seen[batch, depth] = result.goodput if result else 0.0

    most = case.setup.batch_limits[1]
    for i in range(math.ceil(math.log(most, 1.6 if short else 1.4)) + 1):
        look(min(most, round((1.6 if short else 1.4) ** i)), FIRST_DEPTH)
    for batch, _ in sorted(seen, key=lambda k: -seen[k])[: 1 if short else 2]:
        for depth in DEPTHS[:: 2 if short else 1]:
            look(batch, depth)
    batch, depth = max(seen, key=lambda k: seen[k])
    for near in (batch - 1, batch + 1) if batch < 20 else (round(batch * 0.9), round(batch * 1.1)):
        if 1 <= near <= most:
            look(near, depth)


def _line(cell: Cell, case: Case, name: str, result: Result, cpu: float) -> Line:
    return {
        "cell": cell.key, "run": name, "goodput": round(result.goodput, 5), "end": case.end, "shifts": case.shifts,
        "recorded": case.recorded, "bins": _bins(result.good, case.end),
        "offered": _bins([row.at for row in case.rows], case.end), "turns": [round(at) for at in result.turns],
        "moves": len(result.moves), "knobs": [result.knobs.max_batch_size, result.knobs.max_queue_depth], "cpu": round(cpu, 2),
    }


def _bins(times: Sequence[float], end: float) -> list[int]:
    found = [0] * math.ceil(end / BIN)
    for t in times:
        if t < end:
            found[int(t / BIN)] += 1
    return found


def run(out: Path, folder: Path | None, short: bool, jobs: int, limit: float, nice: int) -> None:
    """Until all is done or `limit` seconds are over; what is done stays."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = frozenset(f"{line['cell']}|{line['run']}" for line in read(out)) if out.exists() else frozenset()
    fleets = [cell for cell in fleet_cells(short) if f"{cell.key}|{HPA}" not in done]
    alone = [c for c in cells(short) if any(f"{c.key}|{n}" not in done for n in (SET_POINT, "best", *RIVALS))]
    todo: list[Job] = [(run_fleet_cell, (cell, folder, SECONDS[False], done)) for cell in fleets]
    todo += [(run_cell, (cell, folder, SECONDS[short], short, done)) for cell in alone]
    todo.sort(key=lambda job: job[1][0].seed)  # stable: a part of it is a fair sample of all
    began, count = time.monotonic(), 0
    with multiprocessing.Pool(jobs, initializer=os.nice, initargs=(nice,)) as pool, out.open("a") as file:
        for lines in pool.imap_unordered(_go, todo):
            for line in lines:
                file.write(json.dumps(line) + "\n")
            file.flush()
            count += 1
            spent = time.monotonic() - began
            left = spent / count * (len(todo) - count)
            print(f"{count}/{len(todo)} cells, {spent:.0f} s, about {left:.0f} s to go", file=sys.stderr, flush=True)
            if spent > limit:
                print(f"stopping after {limit:.0f} s; the same command goes on from here", file=sys.stderr)
                pool.terminate()
                break


def _go(job: Job) -> list[Line]:
    return job[0](job[1])


def read(path: Path) -> Iterator[Line]:
    """Whole lines only: the last one may be half written."""
    with path.open() as file:
        for text in file:
            if text.endswith("\n"):
                yield json.loads(text)


# ---------------------------------------------------------------- reporting

def report(lines: Sequence[Line]) -> dict[str, Any]:
    by_cell: dict[str, dict[str, Line]] = defaultdict(dict)
    for line in lines:
        if "goodput" in line:
            by_cell[line["cell"]][line["run"]] = line
    whole = {key: runs for key, runs in by_cell.items() if SET_POINT in runs and any(n.startswith("static") for n in runs)}
    rows = [_cell(key, runs) for key, runs in sorted(whole.items())]
    laws = {name: _summary([row["laws"][name] for row in rows if name in row["laws"]]) for name in (SET_POINT, *RIVALS)}
    groups: dict[str, Any] = {}
    for row in rows:
        groups.setdefault(f"{row['workload']} · {row['machine']} · {row['memory']}", []).append(row)
    return {
        "cells": len(rows), "recorded_traces": sum(r["recorded"] for r in rows), "laws": laws,
        "best_single_static": best_single(whole), "following": following(whole, SET_POINT, BIN, WARM_UP),
        "for_all_seeds": for_all_seeds(whole, (SET_POINT, *RIVALS)),
        "fleets": fleet_report(lines), "groups": {name: _group(found) for name, found in groups.items()}, "rows": rows,
    }


def _cell(key: str, runs: Mapping[str, Line]) -> dict[str, Any]:
    workload, machine, memory, load, seed = key.split("|")
    defaults = {name: line for name, line in runs.items() if name.startswith("default")}
    best = best_static(runs)
    ours = defaults[f"default {next(iter(DEFAULTS))}"]
    row: dict[str, Any] = {
        "workload": workload, "machine": machine, "memory": memory, "load": float(load), "seed": int(seed),
        "recorded": best["recorded"], "best": {"setting": best["run"], "goodput": best["goodput"]},
        "defaults": {name: line["goodput"] for name, line in defaults.items()}, "laws": {},
    }
    for name in (SET_POINT, *RIVALS):
        if line := runs.get(name):
            hours = line["end"] / 3600
            row["laws"][name] = {
                "goodput": line["goodput"], "of_best": _ratio(line["goodput"], best["goodput"]),
                "of_best_default": _ratio(line["goodput"], max(d["goodput"] for d in defaults.values())),
                "reversals_per_hour": len(line["turns"]) / hours, "moves_per_hour": line["moves"] / hours,
                "reversals_per_hour_warm": sum(at >= WARM_UP * line["end"] for at in line["turns"]) / ((1 - WARM_UP) * hours),
                "minutes_to_95": _settled(line, best), "worst_5_minutes": _worst(line), "worst_5_minutes_default": _worst(ours),
                "harm": _harm(line, ours), "steady": not line["shifts"] and not workload.startswith((SQUARE, "day", "code")),
                "overload": float(load) > 1, "shifts": bool(line["shifts"]),
            }
    return row


def _ratio(a: float, b: float) -> float | None:
    return round(a / b, 4) if b > 0 else None


def _settled(line: Line, best: Line) -> list[float | None]:
    """Minutes from the start, and from each shift, until what remains of that part is at 95 % of the best static setting."""
    edges = [0.0, *line["shifts"], line["end"]]
    found: list[float | None] = []
    for start, end in itertools.pairwise(edges):
        a, b = int(start / BIN), int(end / BIN)
        mine, its = line["bins"][a:b], best["bins"][a:b]
        at = next((i for i in range(len(mine) - 3) if sum(mine[i:]) >= 0.95 * sum(its[i:])), None)
        found.append(None if at is None else round(at * BIN / 60, 1))
    return found


def _windows(line: Line, minutes: float) -> list[tuple[int, int]]:
    """(good, offered) of every window of that length after the first fifth."""
    width, start = round(60 * minutes / BIN), round(0.2 * len(line["bins"]))
    ends = range(start, max(start + 1, len(line["bins"]) - width + 1))
    return [(sum(line["bins"][i:i + width]), sum(line["offered"][i:i + width])) for i in ends]


def _worst(line: Line) -> float:
    return round(min((g / n for g, n in _windows(line, 5) if n >= 20), default=1.0), 4)


def _harm(line: Line, default: Line) -> int:
    """O8: good rows that any 20 minutes lack against 0.98 of the untouched defaults, the start included."""
    width = round(1200 / BIN)
    n = max(1, len(line["bins"]) - width + 1)
    return max(0, *(math.ceil(0.98 * sum(default["bins"][i:i + width]) - sum(line["bins"][i:i + width])) for i in range(n)))


def _summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means with 95 % intervals over cells; None where there is no such cell."""
    def mean(values: Sequence[float]) -> list[float] | None:
        if not values:
            return None
        half = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return [round(statistics.fmean(values), 4), round(half, 4)]

    of_best = [f["of_best"] for f in found if f["of_best"] is not None]
    starts = [f["minutes_to_95"][0] for f in found]
    shifts = [t for f in found for t in f["minutes_to_95"][1:]]
    return {
        "cells": len(found), "of_best": mean(of_best), "worst_of_best": min(of_best, default=None),
        "of_best_where_it_shifts": mean([f["of_best"] for f in found if f["shifts"] and f["of_best"] is not None]),
        "of_best_default_under_overload": mean([
            f["of_best_default"] for f in found if f["overload"] and f["of_best_default"]
        ]),
        "reversals_per_hour_steady": mean([f["reversals_per_hour"] for f in found if f["steady"]]),
        "reversals_per_hour_steady_warm": mean([f["reversals_per_hour_warm"] for f in found if f["steady"]]),
        "most_reversals_per_hour_steady": max((f["reversals_per_hour"] for f in found if f["steady"]), default=None),
        "minutes_to_95": mean([t for t in starts if t is not None]), "never_at_95": sum(t is None for t in starts),
        "minutes_to_95_after_a_shift": mean([t for t in shifts if t is not None]),
        "never_at_95_after_a_shift": sum(t is None for t in shifts),
        "worse_5_minutes_than_default": sum(f["worst_5_minutes"] < f["worst_5_minutes_default"] for f in found),
        "cells_with_harm": sum(f["harm"] > 32 for f in found), "most_harm_rows": max((f["harm"] for f in found), default=0),
    }


def _group(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(values: Sequence[float | None]) -> float | None:
        kept = [v for v in values if v is not None]
        return round(statistics.fmean(kept), 3) if kept else None

    return {
        "cells": len(rows), "best": mean([r["best"]["goodput"] for r in rows]),
        "defaults": {n: mean([r["defaults"][n] for r in rows]) for n in rows[0]["defaults"]},
        "of_best": {n: mean([r["laws"][n]["of_best"] for r in rows if n in r["laws"]]) for n in rows[0]["laws"]},
        "worst": min((of for r in rows if (of := r["laws"][SET_POINT]["of_best"]) is not None), default=None),
    }


def table(document: Mapping[str, Any]) -> str:
    """Markdown for docs/tuning.md."""
    laws = document["laws"]
    lines = [
        "| law | of the best static setting, mean ± | worst | of the best defaults, overload | reversals/h, steady | "
        "min to 95 % | cells |", "|---|---|---|---|---|---|---|",
    ]
    for name, s in laws.items():
        def cell(key: str, percent: bool = True, s: Mapping[str, Any] = s) -> str:
            if not s[key]:
                return "–"
            mean, half = s[key]
            return f"{mean:.1%} ± {half:.1%}" if percent else f"{mean:.2f}"
        worst = f"{s['worst_of_best']:.0%}" if s["worst_of_best"] is not None else "–"
        lines.append(
            f"| {name} | {cell('of_best')} | {worst} | {cell('of_best_default_under_overload', False)}× | "
            f"{cell('reversals_per_hour_steady', False)} | {cell('minutes_to_95', False)} | {s['cells']} |"
        )
    parts = ["\n".join(lines) + "\n", oracle_table(document), fleet_table(document["fleets"])]
    return "\n".join(part for part in parts if part)


BEGIN, END = "<!-- eval-tuner: made by `make eval-tuner`, do not edit -->\n", "<!-- /eval-tuner -->\n"


def write_table(path: Path, document: Mapping[str, Any]) -> None:
    """Between the two marks; a page without them is left alone."""
    text = path.read_text()
    if BEGIN in text and END in text:
        head, rest = text.split(BEGIN, 1)
        path.write_text(head + BEGIN + table(document) + END + rest.split(END, 1)[1])


def plot(document: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    groups = document["groups"]
    figure = Figure(figsize=(10, 0.35 * len(groups) + 1.5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate((SET_POINT, *RIVALS)):
        values = [g["of_best"].get(name) for g in groups.values()]
        axes.plot([v if v is not None else math.nan for v in values], range(len(groups)), "o" if i == 0 else "x", label=name)
    axes.axvline(1.0, color="0.8")
    axes.set_yticks(range(len(groups)), list(groups), fontsize=7)
    axes.set_xlabel("goodput ÷ that of the best static setting")
    axes.legend(loc="lower left", fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="weir_bench.eval_tuner", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a small part, a few minutes")
    parser.add_argument("--traces", type=Path, help="folder with the recorded traces; without it drawn stand-ins")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which it stops, to go on another time")
    parser.add_argument("--lines", type=Path, help="the JSON-lines file of runs (default: build/eval-tuner[-short].jsonl)")
    parser.add_argument("--nice", type=int, default=15)
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    name = "tuner-short" if options.short else "tuner"
    out = options.lines or Path("build") / f"eval-{name}.jsonl"
    if not options.only_report:
        run(out, options.traces, options.short, options.jobs, options.limit, options.nice)
    document = report(list(read(out)))
    path = results.write(name, document)
    plot(document, path.with_suffix(".png"))
    write_table(Path("docs/tuning.md"), document)
    print(table(document))
    print(f"{path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
