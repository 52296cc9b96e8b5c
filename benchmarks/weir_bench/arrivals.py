"""When requests arrive and how long they are: a pure function of a seed, so that two runs can be given the same traffic."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths in tokens: means of two independent lognormal distributions with one coefficient of variation.

    A length is clipped to [1, `most` × mean]; `cv` 0 makes every length the mean.
    """

    prompt: float = 128
    output: float = 64
    cv: float = 0.5
    most: float = 4.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the start, prompt tokens, tokens to generate."""

    at: float
    prompt: int
    output: int


def schedule(rate: float, seconds: float, mix: Mix, seed: int) -> list[Arrival]:
    """Poisson arrivals at `rate` per second for `seconds`, lengths from `mix`.

    A longer schedule with the same seed begins with the shorter one.
    """
    if rate <= 0:
        raise ValueError(f"rate must be positive, not {rate}")
    rng, at, arrivals = random.Random(seed), 0.0, []
    while True:
        at += rng.expovariate(rate)
        arrival = Arrival(at, _length(rng, mix.prompt, mix), _length(rng, mix.output, mix))
        if at >= seconds:
            return arrivals
        arrivals.append(arrival)


def _length(rng: random.Random, mean: float, mix: Mix) -> int:
    variance = math.log1p(mix.cv**2)
    length = rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))
    return max(1, round(min(length, mix.most * mean)))


def prompt_ids(length: int, rng: random.Random, low: int = 1000, high: int = 30000) -> list[int]:
    """`length` token ids without a common prefix with another draw (but by chance); ids stay clear of special tokens."""
    return [rng.randrange(low, high) for _ in range(length)]


def to_json(arrivals: list[Arrival]) -> list[dict[str, Any]]:
    return [asdict(a) for a in arrivals]
