"""Traffic of a simulation: Poisson arrivals at a rate that may change, lognormal lengths. Everything follows from the seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """`rate` rows per second until `end`; mean prompt and output tokens, `cv` their coefficient of variation."""

    end: float
    rate: float
    prompt: float
    output: float
    cv: float = 0.5


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: int
    output: int


def arrivals(phases: Sequence[Phase], seed: int, most: int) -> Iterator[Arrival]:
    """In order of time. No row is longer than `most` tokens in all."""
    rng = random.Random(seed)
    at = 0.0
    for phase in phases:
        while phase.rate > 0:
            gap = rng.expovariate(phase.rate)
            if at + gap >= phase.end:
                break
            at += gap
            prompt, output = (_length(rng, mean, phase.cv) for mean in (phase.prompt, phase.output))
            prompt = min(prompt, most - 2)
            yield Arrival(at, prompt, min(output, most - prompt - 1))
        at = phase.end


def _length(rng: random.Random, mean: float, cv: float) -> int:
    sigma = math.sqrt(math.log1p(cv * cv))
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
