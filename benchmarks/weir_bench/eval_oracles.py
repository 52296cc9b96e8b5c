"""What the law is measured against: settings that stay, each with more or less hindsight.

`best_static` of a cell is found by trying some forty settings on the very arrivals that count, so it also has the luck of the
draw; no user has it. `for_all_seeds` is one setting for a workload on a machine, whatever the draw: what a careful user could
find. `following` knows when the workload shifts and takes the best setting of each part: no law that holds a setting between
shifts can do better, so it says how much there is to be had over settings that stay.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
Cells = Mapping[str, Mapping[str, Line]]
"""Lines by cell and run."""
LEAST_TRIED = 0.8
"""Of a machine's cells, that must have tried a setting before it is called the best single one."""


def statics(runs: Mapping[str, Line]) -> list[Line]:
    """The settings that stay which a cell was tried with, the defaults among them."""
    return [line for name, line in runs.items() if name.startswith(("static", "default"))]


def best_static(runs: Mapping[str, Line]) -> Line:
    return max(statics(runs), key=lambda line: float(line["goodput"]))


def best_single(cells: Cells) -> dict[str, Any]:
    """By machine, the one setting with the highest mean share of each cell's best, over the cells that tried it."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    count: dict[str, int] = defaultdict(int)
    for key, runs in cells.items():
        tried = {name: line["goodput"] for name, line in runs.items() if name.startswith("static")}
        machine, best = key.split("|")[1], max(tried.values())
        count[machine] += 1
        for name, goodput in tried.items():
            if best > 0:
                found[machine][name].append(goodput / best)
    single = {}
    for machine, settings in found.items():
        common = {n: v for n, v in settings.items() if len(v) >= LEAST_TRIED * count[machine]}
        if common:
            name = max(common, key=lambda n: statistics.fmean(common[n]))
            shares = common[name]
            single[machine] = {"setting": name, "of_best": round(statistics.fmean(shares), 4), "cells": len(shares)}
    return single


def following(cells: Cells, law: str, bin_seconds: float, warm_up: float) -> dict[str, Any] | None:
    """Where the workload shifts: good rows of the best setting of each part, and of the law, over the best that stays."""
    reach, ours = [], []
    for runs in cells.values():
        line, best = runs[law], best_static(runs)
        if not line["shifts"] or not (its := sum(_counted(best, bin_seconds, warm_up))):
            continue
        edges = [0, *(round(shift / bin_seconds) for shift in line["shifts"]), len(line["bins"])]
        parts = [
            max(sum(_counted(s, bin_seconds, warm_up, *part)) for s in statics(runs)) for part in itertools.pairwise(edges)
        ]
        reach.append(sum(parts) / its)
        ours.append(sum(_counted(line, bin_seconds, warm_up)) / its)
    if not reach:
        return None
    return {
        "cells": len(reach), "of_best_static": round(statistics.fmean(reach), 4), "most": round(max(reach), 4),
        "law": round(statistics.fmean(ours), 4),
    }


def _counted(line: Line, bin_seconds: float, warm_up: float, first: int = 0, last: int | None = None) -> Sequence[int]:
    """Good rows by bin, from bin `first` to `last`, the warm-up left out."""
    return list(line["bins"][max(first, round(warm_up * line["end"] / bin_seconds)):last])


def for_all_seeds(cells: Cells, laws: Iterable[str]) -> dict[str, Any] | None:
    """Each law over the setting that does best on average over the seeds of a workload, machine, memory and load, among those
    that every seed tried: means over such groups, and the worst. None before a second seed."""
    groups: dict[str, list[Mapping[str, Line]]] = defaultdict(list)
    for key, runs in cells.items():
        groups[key.rsplit("|", 1)[0]].append(runs)
    shares: dict[str, list[float]] = defaultdict(list)
    own: list[float] = []
    for group in groups.values():
        common = set.intersection(*({n for n in runs if n.startswith(("static", "default"))} for runs in group))
        means = {n: statistics.fmean(runs[n]["goodput"] for runs in group) for n in common}
        if len(group) < 2 or not means or (best := max(means.values())) <= 0:
            continue
        own.append(best / statistics.fmean(best_static(runs)["goodput"] for runs in group))
        for law in laws:
            if all(law in runs for runs in group):
                shares[law].append(statistics.fmean(runs[law]["goodput"] for runs in group) / best)
    if not own:
        return None
    return {
        "groups": len(own), "of_each_seeds_own_best": round(statistics.fmean(own), 4),
        "laws": {law: {"of_best": round(statistics.fmean(v), 4), "worst": round(min(v), 4)} for law, v in shares.items()},
    }


def oracle_table(document: Mapping[str, Any], law: str = "set-point") -> str:
    """Markdown: each oracle with what it reaches itself of the first one, and what the law reaches of it."""
    own, shifts, single = document["for_all_seeds"], document["following"], document["best_single_static"]
    rows = [("the best that stays, found on the same arrivals", "100 %", document["laws"][law]["of_best"], "")]
    if own:
        said = f"worst {own['laws'][law]['worst']:.0%}, {own['groups']} workloads"
        itself = f"{own['of_each_seeds_own_best']:.1%}"
        rows.append(("one that stays for all seeds of a workload", itself, [own["laws"][law]["of_best"]], said))
    for machine, found in single.items():
        rows.append((f"one that stays for all of {machine}", f"{found['of_best']:.1%}", None, f"{found['setting']}"))
    if shifts:
        said = f"at most {shifts['most']:.0%}; {shifts['cells']} cells, where the law is at {shifts['law']:.1%} of the first"
        reached = [shifts["law"] / shifts["of_best_static"]]
        rows.append(("where it shifts, the best of each part", f"{shifts['of_best_static']:.1%}", reached, said))
    lines = ["| oracle, with hindsight | itself, of the first | the law, of it | |", "|---|---|---|---|"]
    lines += [f"| {name} | {itself} | {f'{law_[0]:.1%}' if law_ else '–'} | {said} |" for name, itself, law_, said in rows]
    return "\n".join(lines) + "\n"
