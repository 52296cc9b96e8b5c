"""Objectives and a load that fit the machine, from the server's own boot measurement: the same demo on a fast and a slow one.

In saturation every token that is generated brings ρ = prompt ÷ output prompt tokens with it, so with n rows in service the time
between a row's tokens is y(n) = a + (b + c·context + p·ρ)·n, and a batch of B carries B ÷ (output · y(B)) requests per second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weir_bench.arrivals import Mix
from weir_bench.goodput import Objectives
from weir_server.contract import Plant

SLACK, ROWS = 1.6, 8
OVERLOAD, BATCH = 1.5, 4
TTFT = 2.0
TTFT_TOKENS = 20
"""On a slow machine the time to the first token is allowed this many times the time per token."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Seconds and requests per second. `capacity`: of a batch of BATCH; `rate`: what is offered."""

    step_1: float
    step_8: float
    interval: float
    capacity: float
    rate: float
    objectives: Objectives

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def interval(plant: Plant, mix: Mix, rows: float) -> float:
    """y(rows): seconds between a row's tokens, prefill of its neighbours included."""
    context = mix.prompt + mix.output / 2
    return plant.a + (plant.b + plant.c * context + plant.p * mix.prompt / mix.output) * rows


def capacity(plant: Plant, mix: Mix, batch: int) -> float:
    """Requests per second that `batch` rows can carry."""
    return batch / (mix.output * interval(plant, mix, batch))


def size(plant: Plant, mix: Mix, *, slack: float = SLACK, overload: float = OVERLOAD, batch: int = BATCH) -> Sizing:
    """Time per token: `slack` × a step with 8 rows. Load: `overload` × what `batch` rows carry."""
    context = mix.prompt + mix.output / 2
    step_1, step_8 = (plant.step_seconds(rows, rows * context) for rows in (1, ROWS))
    carried, tpot = capacity(plant, mix, batch), round(slack * step_8, 3)
    objectives = Objectives(ttft=max(TTFT, round(TTFT_TOKENS * tpot, 1)), tpot=tpot)
    return Sizing(step_1, step_8, interval(plant, mix, batch), carried, overload * carried, objectives)


def explain(s: Sizing, mix: Mix) -> str:
    """What was measured and what follows, in sentences for the terminal."""
    return (
        f"Boot measurement: a step takes {s.step_1 * 1000:.0f} ms with 1 row, {s.step_8 * 1000:.0f} ms with {ROWS}.\n"
        f"Objectives: time per token ≤ {s.objectives.tpot * 1000:.0f} ms ({SLACK:g} × the step with {ROWS} rows), "
        f"time to the first token ≤ {s.objectives.ttft:g} s.\n"
        f"Requests of {mix.prompt:g} tokens in, {mix.output:g} out on average: {BATCH} rows give a token each "
        f"{s.interval * 1000:.0f} ms and so carry {s.capacity:.2f} requests/s; "
        f"offered are {OVERLOAD:g} × as many, {s.rate:.2f}/s."
    )
