"""Fleets in the tuner's evaluation: knobs and replicas together against an autoscaler on queue depth.

Each cell is run three times on the same arrivals: the operator's law of the knobs with its own of the replicas; an autoscaler
on mean queue depth over pods with untouched defaults, which is what people deploy; and the same autoscaler over tuned pods.
Pods take a minute to start. What counts is the replica-seconds that one good row costs, over the whole run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weir_bench.eval_cases import KINDS, MACHINES, capacity, day, default_knobs, lengths
from weir_operator.simulate.fleet import FleetResult, Retries, fleet
from weir_operator.simulate.load import Arrival, Phase, arrivals
from weir_operator.simulate.port import PodSetup
from weir_operator.simulate.rivals import CapacityScaler, QueueDepthScaler
from weir_operator.tuner.replicas import ReplicaSpec
from weir_operator.tuner.types import TunerSpec
from weir_server.contract import Slo

FLEET = "fleet"
SHAPES = ("step", "day")
STARTS_AFTER = 60.0
RANGE = (1, 8)
STEP = (0.6, 2.4, 0.6)
"""Loads of the three thirds, in pods that work at what they can do."""
DAY_MEAN = 1.8
OURS, HPA, BOTH = "knobs + replicas", "queue depth", "knobs, replicas on queue depth"


@dataclass(frozen=True, order=True)
class FleetCell:
    shape: str
    machine: str
    retries: bool  # clients come back twice after a refusal
    seed: int

    @property
    def key(self) -> str:
        return f"{FLEET} {self.shape}|{self.machine}|{'retries' if self.retries else 'once'}|{self.seed}"


def fleet_cells(short: bool) -> list[FleetCell]:
    machines = ("cpu",) if short else ("cpu", "llama2-70b h100x8")
    return [
        FleetCell(shape, machine, retries, seed)
        for seed in range(1 if short else 3) for shape in SHAPES for machine in machines for retries in (False, True)
    ]


def run_fleet_cell(job: tuple[FleetCell, Path | None, float, frozenset[str]]) -> list[dict[str, Any]]:
    """The runs of one cell that are not done yet, a line each."""
    cell, folder, seconds, done = job
    setup, rows = _build(cell, folder, seconds)
    spec, replicas = TunerSpec(setup.slo.ttft, setup.slo.tpot), ReplicaSpec(*RANGE)
    first, retries = replace(setup, starts_after=0.0), Retries() if cell.retries else None
    scalers = {OURS: lambda: CapacityScaler(spec, replicas), HPA: lambda: QueueDepthScaler(*RANGE)}
    scalers[BOTH] = scalers[HPA]
    return [
        _line(cell, name, fleet(
            [first, setup], rows, seconds, retries=retries, spec=None if name == HPA else spec, scaler=scaler, seed=cell.seed,
        ))
        for name, scaler in scalers.items() if f"{cell.key}|{name}" not in done
    ]


def _build(cell: FleetCell, folder: Path | None, seconds: float) -> tuple[PodSetup, list[Arrival]]:
    machine, kind = MACHINES[cell.machine], KINDS["chat"]
    slo = Slo(kind.ttft[machine.small], machine.objective * machine.plant.a)
    prompt, output = lengths(kind, machine)
    blocks = 4 * machine.most * (round(prompt + output) // 16 + 1) + machine.context // 16
    setup = PodSetup(
        machine.plant, slo, default_knobs(4, 32, machine), (1, machine.most), (1, 1024), kv_blocks=blocks,
        context=machine.context, chunk=machine.chunk, seed=cell.seed, starts_after=STARTS_AFTER,
    )
    shares = STEP if cell.shape == "step" else [DAY_MEAN * share for share in day(folder, cell.seed)[0]]
    rate, each = capacity(machine, kind, slo), seconds / len(shares)
    phases = [Phase((i + 1) * each, rate * share, prompt, output, kind.cv) for i, share in enumerate(shares)]
    return setup, list(arrivals(phases, cell.seed, machine.context))


def _line(cell: FleetCell, name: str, result: FleetResult) -> dict[str, Any]:
    return {
        "cell": cell.key, "run": name, "replica_seconds": round(result.replica_seconds), "good": len(result.good),
        "offered": result.offered, "attempts": result.attempts, "most_pods": max((n for _, n in result.replicas), default=1),
        "changes": max(0, len(result.replicas) - 1),
    }


def fleet_report(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By run: replica-seconds per good row over all cells together, the share of rows that were good, and per cell the cost
    as a share of the autoscaler's on queue depth."""
    cells: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for line in lines:
        if "replica_seconds" in line:
            cells[line["cell"]][line["run"]] = line
    whole = {key: runs for key, runs in sorted(cells.items()) if {OURS, HPA, BOTH} <= runs.keys()}
    costs = {name: _cost([runs[name] for runs in whole.values()]) for name in (OURS, BOTH, HPA)}
    found = {}
    for name, cost in costs.items():
        mine = [runs[name] for runs in whole.values()]
        shares = [_cost([runs[name]]) / _cost([runs[HPA]]) for runs in whole.values()]
        found[name] = {
            "replica_seconds_per_good": round(cost, 3), "of_queue_depth": round(cost / costs[HPA], 3) if whole else None,
            "worst_cell": round(max(shares, default=0.0), 3),
            "good": round(sum(line["good"] for line in mine) / max(1, sum(line["offered"] for line in mine)), 4),
            "changes_per_cell": round(sum(line["changes"] for line in mine) / max(1, len(mine)), 1),
        }
    return {"cells": len(whole), "runs": found, "rows": [{"cell": key, **runs} for key, runs in whole.items()]}


def _cost(lines: Sequence[Mapping[str, Any]]) -> float:
    """Of no good row at all, what one would have cost at least."""
    return sum(line["replica_seconds"] for line in lines) / max(1, sum(line["good"] for line in lines))


def fleet_table(found: Mapping[str, Any]) -> str:
    """Markdown for docs/tuning.md; empty without a whole cell."""
    if not found["cells"]:
        return ""
    lines = [
        "| fleet | replica-seconds per good row | of the autoscaler's on queue depth | worst cell | good rows | cells |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in found["runs"].items():
        lines.append(
            f"| {name} | {run['replica_seconds_per_good']:.2f} | {run['of_queue_depth']:.2f}× | {run['worst_cell']:.2f}× | "
            f"{run['good']:.0%} | {found['cells']} |"
        )
    return "\n".join(lines) + "\n"
