"""Traffic of a simulation: rows with their times and lengths, drawn from phases or read from a trace (`traces`)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PART_TOKENS = 512
"""Tokens of one named part of a prompt: the block size of the traces that name theirs."""


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
    """One row. `parts` name the prompt's content, PART_TOKENS each: equal starts are equal content. `tries`: how often it was
    refused before; `first`: when it was offered for the first time."""

    at: float
    prompt: int
    output: int
    parts: tuple[int, ...] = ()
    tries: int = 0
    first: float | None = None

    @property
    def retry(self) -> bool:
        return self.tries > 0

    @property
    def born(self) -> float:
        return self.at if self.first is None else self.first

    def tokens(self) -> list[int]:
        """The prompt: content that nobody else has unless its parts are named."""
        if not self.parts:
            return [1] * self.prompt
        named = [part * PART_TOKENS + i for part in self.parts for i in range(PART_TOKENS)][: self.prompt]
        return named + [1] * (self.prompt - len(named))


def arrivals(phases: Sequence[Phase], seed: int, most: int) -> Iterator[Arrival]:
    """Poisson arrivals and lognormal lengths, in order of time; all follows from the seed. No row is longer than `most`
    tokens in all."""
    rng = random.Random(seed)
    at = 0.0
    for phase in phases:
        while phase.rate > 0:
            gap = rng.expovariate(phase.rate)
            if at + gap >= phase.end:
                break
            at += gap
            prompt, output = (length(rng, mean, phase.cv) for mean in (phase.prompt, phase.output))
            prompt = min(prompt, most - 2)
            yield Arrival(at, prompt, min(output, most - prompt - 1))
        at = phase.end


def length(rng: random.Random, mean: float, cv: float) -> int:
    """A lognormal number of tokens, at least one."""
    sigma = math.sqrt(math.log1p(cv * cv))
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
