"""Rule 3: the batch and the queue depth with the highest predicted goodput.

Bound: one evaluation looks at ≤ 17 batch sizes in B/2 … 2B and at every depth up to 2Q, all inside the limits; a move must
be predicted to gain ≥ 4 %, so on a steady plant with an exact fit goodput never falls and no setting comes twice. Where nothing
in reach yields 5 % of what is offered, predictions there differ by noise only: the batch then takes one doubling or halving
towards a setting elsewhere that does, and where there is none only the depth moves. Ties within 1 % go to the least change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weir_operator.tuner.chain import Model, goodputs

GAIN = 1.04
NIL = 0.05  # of λ
HOPELESS = 0.001  # of λ
TIE = 0.99
MOST_CANDIDATES = 17
PREFILL_SHARE = 0.8
"""Most of a step's prefill tokens that the decoding rows' own demand may take; above, the first token waits without end."""


@dataclass(frozen=True)
class Reach:
    """What may be tried from the present setting. Limits are inclusive."""

    batch: int
    depth: int
    batch_limits: tuple[int, int]
    depth_limits: tuple[int, int]
    may_raise: bool = True  # slots are what the head of the queue waits for
    may_cut: bool = True
    one_step: bool = False

    def held(self) -> Reach:
        return Reach(self.batch, self.depth, self.batch_limits, self.depth_limits, may_raise=False, may_cut=False)


@dataclass(frozen=True)
class Choice:
    batch: int
    depth: int
    goodput: float
    present: float  # predicted goodput of the setting in force

    @property
    def gains(self) -> bool:
        return self.goodput >= GAIN * self.present


def choose(model: Model, ttft: float, tpot: float, reach: Reach) -> Choice:
    """The best setting within reach, the present one where nothing is better."""
    near = _best(model, ttft, tpot, reach, _batches(model, reach, *_near(reach)))
    if near.goodput >= NIL * model.mix.offered or not (reach.may_raise or reach.may_cut):
        return near
    far = _best(model, ttft, tpot, reach, _batches(model, reach, *reach.batch_limits))
    if far.goodput >= NIL * model.mix.offered and far.batch != reach.batch:
        low, high = _near(reach)
        return Choice(high if far.batch > reach.batch else low, far.depth, far.goodput, far.present)
    return _best(model, ttft, tpot, reach, [reach.batch])


def _near(reach: Reach) -> tuple[int, int]:
    b = reach.batch
    low, high = (b - 1, b + 1) if reach.one_step else (math.ceil(b / 2), 2 * b)
    return max(low, reach.batch_limits[0]), min(high, reach.batch_limits[1])


def _batches(model: Model, reach: Reach, low: int, high: int) -> list[int]:
    """Batch sizes from low to high, thinned evenly in logarithm, with the present one; prefill caps what may be raised to."""
    low = low if reach.may_cut else reach.batch
    high = high if reach.may_raise else reach.batch
    if high - low < MOST_CANDIDATES:
        sizes = set(range(low, high + 1))
    else:
        ratio = high / low
        sizes = {round(low * ratio ** (i / (MOST_CANDIDATES - 1))) for i in range(MOST_CANDIDATES)}
    room = PREFILL_SHARE * model.plant.prefill_tokens
    return sorted({n for n in sizes if n == low or model.mix.prefill * model.decoding(n) <= room} | {reach.batch})


def _best(model: Model, ttft: float, tpot: float, reach: Reach, batches: list[int]) -> Choice:
    shallow, deep = reach.depth_limits
    deepest = max(shallow, min(deep, 2 * max(1, reach.depth)))
    found: list[tuple[float, int, int]] = []
    present = 0.0
    for batch in batches:
        values = goodputs(model, ttft, tpot, batch, max(deepest, reach.depth))
        found += [(values[q], batch, q) for q in range(shallow, deepest + 1)]
        if batch == reach.batch:
            present = values[reach.depth]
    found.append((present, reach.batch, reach.depth))
    best = max(g for g, _, _ in found)
    if best < HOPELESS * model.mix.offered:
        return Choice(reach.batch, reach.depth, present, present)
    near = [f for f in found if f[0] >= TIE * best]
    goodput, batch, depth = min(near, key=lambda f: (_distance(f[1], reach.batch), _distance(f[2], reach.depth), -f[0]))
    return Choice(batch, depth, goodput, present)


def _distance(a: int, b: int) -> float:
    return abs(math.log((a + 1) / (b + 1)))
