"""The cells of the tuner's evaluation: workload × plant × memory × load × seed, and what each runs on.

Recorded traces are read from a folder that is named (`--traces`); without one, drawn stand-ins of the same character take
their place and the results say so. Loads are multiples of what the plant can do at its best within the objectives.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weir_operator.simulate import traces
from weir_operator.simulate.load import Arrival, Phase, arrivals
from weir_operator.simulate.port import PodSetup
from weir_operator.tuner.chain import BUSIEST
from weir_server.contract import Knobs, Plant, Slo
from weir_server.policy.limits import CHUNK_DECODING

DEFAULTS = {"weir, mlxcel": (4, 32), "vllm, hf": (256, 1000)}
"""Batch and queue of servers as they come; an unbounded queue is a deep one here, and a batch ends at the envelope."""


@dataclass(frozen=True)
class Machine:
    """A plant with its envelope. `prompt_by`, `output_by`: what a trace's lengths are divided by on it."""

    plant: Plant
    most: int
    chunk: int | None
    context: int
    small: bool
    objective: float  # time per token, as a multiple of a


MACHINES = {
    "cpu": Machine(Plant(0.042, 0.0032, 1e-7, 0.002, CHUNK_DECODING), 64, None, 2048, True, 2.6),
    # fitted to Splitwise's measurements (MIT, Patel et al., ISCA'24) and SageServe's (MIT), see simulate/plants.py
    "llama2-70b h100x8": Machine(Plant(0.0298, 2.08e-4, 1.73e-7, 9.1e-5, 512), 256, 512, 16384, False, 2.7),
    "bloom-176b a100x8": Machine(Plant(0.0478, 4.65e-4, 4.36e-7, 3.52e-4, 512), 256, 512, 16384, False, 2.7),
    "llama3-8b a100x2": Machine(Plant(0.0081, 0.0, 5.20e-7, 1.11e-5, 512), 256, 512, 16384, False, 3.7),
}


@dataclass(frozen=True)
class Kind:
    """A workload: its file, mean lengths for stand-ins (prompt, output, cv), what a small machine divides by, TTFT."""

    file: str
    prompt: float
    output: float
    cv: float
    small: tuple[float, float]
    ttft: tuple[float, float]  # large machines, small ones
    bursts: bool = False


KINDS = {
    "chat": Kind("azure_2023_conv.csv", 1155, 211, 1.1, (16, 8), (2.0, 2.0)),
    "code": Kind("azure_2023_code.csv", 2048, 28, 1.0, (16, 2), (2.0, 2.0), bursts=True),
    "documents": Kind("mooncake_conversation_trace.jsonl", 9000, 343, 0.8, (24, 8), (10.0, 6.0)),
}
SHIFTING = "chat-documents-chat"
DAY = "day"
SQUARE = "square"
PERIODS = (0.5, 1, 2, 5, 20)
SEEDS = 5
FIRST_DAY = 2  # the clients at hand begin one after the other
POOL = "servegen/*m-small*-trace.csv"
"""The clients of a ServeGen pool that are at hand: their rates together are a day's curve."""
HOURS_OF_NOON = tuple(1 - 0.65 * math.cos(2 * math.pi * i / 24) for i in range(24))
TICK = 30.0


@dataclass(frozen=True, order=True)
class Cell:
    workload: str
    machine: str
    memory: str  # roomy | tight
    load: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.workload}|{self.machine}|{self.memory}|{self.load:g}|{self.seed}"


@dataclass(frozen=True)
class Case:
    setup: PodSetup
    rows: Sequence[Arrival]
    end: float
    shifts: tuple[float, ...]  # when the workload changed
    recorded: bool


def cells(short: bool) -> list[Cell]:
    if short:
        two = ("cpu", "llama2-70b h100x8")
        some = [Cell(w, m, "roomy", load, 0) for w in (*KINDS, SHIFTING) for m in two for load in (0.5, 1.5)]
        return [*some, Cell("chat", "cpu", "tight", 1.5, 0), Cell(f"{SQUARE} 2", "cpu", "roomy", 1.0, 0)]
    return [cell for seed in range(SEEDS) for cell in _of_seed(seed)]


def _of_seed(seed: int) -> list[Cell]:
    """All cells of one seed, in an order that makes any part of them, from the first on, a fair sample of all."""
    two = ("cpu", "llama2-70b h100x8")
    found = [
        Cell(w, m, "roomy", load, seed) for w in (*KINDS, SHIFTING, DAY) for m in MACHINES for load in (0.3, 0.7, 1.0, 1.5)
    ]
    found += [Cell(w, m, "tight", 1.5, seed) for w in ("chat", "documents") for m in two]
    found += [Cell(f"{SQUARE} {p:g}", m, "roomy", 1.0, seed) for p in PERIODS for m in two]
    random.Random(seed).shuffle(found)
    return found


def build(cell: Cell, folder: Path | None, seconds: float) -> Case:
    """`seconds`: of one phase; a shifting workload has three."""
    machine, names = MACHINES[cell.machine], _phases(cell.workload)
    if cell.memory == "tight":  # a pool must hold the longest row, so that must not be a model's whole context
        machine = replace(machine, context=min(machine.context, round(4 * sum(lengths(KINDS[names[0]], machine)))))
    ttft = max(KINDS[name].ttft[machine.small] for name in names)
    slo = Slo(ttft, machine.objective * machine.plant.a)
    setup = PodSetup(
        machine.plant, slo, default_knobs(4, 32, machine), (1, machine.most), (1, 1024),
        kv_blocks=_blocks(cell, machine, slo, names[0]), context=machine.context, chunk=machine.chunk, seed=cell.seed,
    )
    rows: list[Arrival] = []
    shifts: list[float] = []
    recorded, at = True, 0.0
    for name in names:
        rate = cell.load * capacity(machine, KINDS[name], slo)
        part, real, length = _rows(KINDS[name], machine, folder, rate, seconds, cell)
        rows += [replace(row, at=row.at + at) for row in part]
        recorded, at = recorded and real, at + length
        shifts.append(at)
    return Case(setup, rows, at, tuple(shifts[:-1]), recorded)


def _phases(workload: str) -> list[str]:
    if workload == SHIFTING:
        return workload.split("-")
    return [workload if workload in KINDS else "chat"]


def default_knobs(batch: int, depth: int, machine: Machine) -> Knobs:
    return Knobs(min(batch, machine.most), None, 0.01, depth)


def lengths(kind: Kind, machine: Machine) -> tuple[float, float]:
    """Mean prompt and output tokens on this machine."""
    by_prompt, by_output = kind.small if machine.small else (1.0, 1.0)
    return kind.prompt / by_prompt, max(4.0, kind.output / by_output)


def capacity(machine: Machine, kind: Kind, slo: Slo) -> float:
    """Rows per second of one pod at its best batch, every row on time, by arithmetic alone: what the law believes of a pod must
    not move the load that it is tried under."""
    (prompt, output), plant = lengths(kind, machine), machine.plant
    prefill = prompt / output
    slope = plant.b + plant.c * (prompt + output / 2) + plant.p * prefill
    in_time = math.floor((slo.tpot - plant.a) / slope) if slope else machine.most
    rows = min(max(1, in_time), machine.most, BUSIEST * plant.prefill_tokens / prefill)
    return rows / (output * (plant.a + slope * rows))


def _blocks(cell: Cell, machine: Machine, slo: Slo, name: str) -> int:
    """Roomy: every batch of the envelope fits. Tight: two thirds of the rows that the objectives would allow."""
    prompt, output = lengths(KINDS[name], machine)
    each = math.ceil((prompt + output) / 16)
    least = machine.context // 16 + 2
    if cell.memory == "roomy":
        return max(least, 4 * machine.most * each)
    slope = machine.plant.b + machine.plant.c * (prompt + output / 2) + machine.plant.p * prompt / output
    return max(least, round(each * max(2.0, (slo.tpot - machine.plant.a) / slope) * 2 / 3))


def _rows(
    kind: Kind, machine: Machine, folder: Path | None, rate: float, seconds: float, cell: Cell
) -> tuple[list[Arrival], bool, float]:
    """The rows, whether they were recorded, and for how long they last: no longer than a recorded trace does."""
    prompt, output = lengths(kind, machine)
    if cell.workload.startswith(SQUARE):
        half = float(cell.workload.split()[1]) * TICK / 2
        waves = [
            Phase(min(seconds, (i + 1) * half), rate * (0.3, 1.7)[i % 2], prompt, output, 0.6)
            for i in range(math.ceil(seconds / half))
        ]
        return list(arrivals(waves, cell.seed, machine.context)), False, seconds
    if cell.workload == DAY:
        curve, real = day(folder, cell.seed)
        hours = [
            Phase((i + 1) * seconds / len(curve), rate * share, prompt, output, kind.cv) for i, share in enumerate(curve)
        ]
        return list(arrivals(hours, cell.seed, machine.context)), real, seconds
    file = folder / kind.file if folder else None
    if file is None or not file.is_file():
        drawn = arrivals(list(_standing_in(kind, rate, seconds, prompt, output)), cell.seed, machine.context)
        return list(drawn), False, seconds
    by = kind.small if machine.small else (1.0, 1.0)
    shape = traces.Shape(start=300.0 * cell.seed, prompt_by=by[0], output_by=by[1], context=machine.context)
    rows = [replace(row, parts=()) for row in traces.read(file, shape, cell.seed)]
    used = traces.with_rate(rows, rate, seconds)
    return used, True, seconds if len(used) < len(rows) else math.ceil(used[-1].at)


def day(folder: Path | None, seed: int) -> tuple[Sequence[float], bool]:
    """The rate through one day, its mean 1: of a recorded pool (each seed another day), else a cosine with its top at noon."""
    files = sorted(folder.glob(POOL)) if folder else []
    if not files:
        return HOURS_OF_NOON, False
    windows = round(86400 / traces.WINDOW_SECONDS)
    first = (FIRST_DAY + seed) * windows
    curve = traces.rates(files)[first:first + windows]
    mean = sum(curve) / len(curve)
    return [rate / mean for rate in curve], True


def _standing_in(kind: Kind, rate: float, seconds: float, prompt: float, output: float) -> list[Phase]:
    """Steady, or bursts: ten seconds at seven times the rate of the fifty between them."""
    if not kind.bursts:
        return [Phase(seconds, rate, prompt, output, kind.cv)]
    quiet = rate * 60 / (50 + 70)
    return [
        Phase(min(seconds, 60.0 * minute + end), quiet * factor, prompt, output, kind.cv)
        for minute in range(math.ceil(seconds / 60)) for end, factor in ((50.0, 1.0), (60.0, 7.0))
    ]
