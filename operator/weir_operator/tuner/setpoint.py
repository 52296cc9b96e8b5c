"""Rule 3: the batch and the queue depth with the highest predicted goodput.

Bound: one evaluation looks at ≤ 17 batch sizes in B/2 … 4B, at all sizes about the best of these, and at every useful depth of
each, all inside the limits; a move must be predicted to gain ≥ 2 % and to beat the error of its own prediction (`certain`), so
on a steady plant with an exact fit goodput never falls by more than a tie and no setting comes twice. Where nothing in reach
gains so much, the whole range is looked at, and a better setting beyond is walked towards, a leap or a halving at a time, or
small gains on the way would be taken for the top. Where that finds nothing either, a depth that is as good now (within 1 %)
and gains ≥ 10 % under a surge is taken before it comes. Where nothing anywhere yields 5 % of what is offered, predictions
differ by noise only: the depth alone may move. Ties go to the present setting, else to the one that stands more load, else to
the least change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weir_operator.tuner.chain import Model, goodputs
from weir_operator.tuner.mix import errors

GAIN = 1.02
SMALL_GAIN = 1.04
"""Under this, or where the batch turns round, a gain must be twice the standard error of its own prediction; else as large."""
NIL = 0.05  # of λ
HOPELESS = 0.001  # of λ
TIE = 0.99
SURGE = 3.0
"""× λ: where settings are as good now, what the next minutes may bring decides. Recorded rates triple within two ticks."""
READY = 1.1
"""What a depth that is as good now must gain under a surge."""
LEAP = 4  # × B: how far a raise may go at once
MOST_CANDIDATES = 17
AROUND = 1.3  # ÷ and × the best of them, at least as far as the next candidate: an envelope of 64 is thinned to steps of 1.3


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
    goodput: float  # predicted of this setting, or of the one that it is a step towards
    present: float  # predicted of the setting in force
    surge: bool = False  # both of SURGE × what is offered: now the two are as good

    @property
    def gains(self) -> bool:
        return self.goodput >= GAIN * self.present

    def stays(self, reach: Reach) -> bool:
        return (self.batch, self.depth) == (reach.batch, reach.depth)


def certain(model: Model, ttft: float, tpot: float, reach: Reach, choice: Choice, turns: bool = False) -> bool:
    """Whether the predicted gain is more than the error of its prediction. The error comes from ρ and O, whose ticks scatter
    about their means, and from the finite number of times per token in z. Cost: eight evaluations, only before a move of B."""
    old, new = (reach.batch, reach.depth), (choice.batch, choice.depth)

    def gain(m: Model) -> float:
        return goodputs(m, ttft, tpot, *new)[new[1]] - goodputs(m, ttft, tpot, *old)[old[1]]

    variance = 0.0
    for name, error in errors(model.mix).items():
        if error > 0:
            mean = getattr(model.mix, name)
            ends = [replace(model.mix, **{name: max(1e-3, mean + sign * error)}) for sign in (1, -1)]
            up, down = (gain(Model(model.plant, m, model.spread, model.prefill, model.kv_rows)) for m in ends)
            variance += ((up - down) / 2) ** 2
    apart = abs(model.in_time(new[0], tpot) - model.in_time(old[0], tpot))
    served = choice.goodput / max(model.in_time(new[0], tpot), 1e-9)  # rows/s whose first token is in time
    variance += served**2 * apart * (1 - apart) / max(1.0, sum(model.spread.values()))
    needed = 2.0 if turns or choice.goodput < SMALL_GAIN * choice.present else 1.0
    return choice.goodput - choice.present >= needed * math.sqrt(variance)


def choose(model: Model, ttft: float, tpot: float, reach: Reach) -> Choice:
    """The best setting within reach, else one step towards a better one beyond it, else one that stands more load, else the
    present one."""
    present = goodputs(model, ttft, tpot, reach.batch, reach.depth)[reach.depth]
    stay = Choice(reach.batch, reach.depth, present, present)
    if GAIN * present >= model.mix.offered:  # goodput cannot exceed what is offered: nothing can gain enough now
        return _prepared(model, ttft, tpot, reach, stay)
    near = _best(model, ttft, tpot, reach, stay, *_near(reach))
    real = near.goodput >= NIL * model.mix.offered
    if real and near.gains and not near.stays(reach):
        return near
    far = _best(model, ttft, tpot, reach, stay, *reach.batch_limits)
    if far.goodput >= NIL * model.mix.offered and far.gains and not far.stays(reach):
        return _step_towards(far, model, ttft, tpot, reach, stay)
    if real:
        return _prepared(model, ttft, tpot, reach, stay)
    return _best(model, ttft, tpot, reach, stay, reach.batch, reach.batch)


def _prepared(model: Model, ttft: float, tpot: float, reach: Reach, stay: Choice) -> Choice:
    """A depth that is as good now and clearly better if more were offered: rates rise faster than ticks follow. The batch
    stays: one that no traffic has used is no better known for being predicted."""
    surge = model.under(SURGE)
    then = goodputs(surge, ttft, tpot, reach.batch, reach.depth)[reach.depth]
    if READY * then >= surge.mix.offered:
        return stay
    found = _weighed(model, ttft, tpot, reach.held(), reach.batch, reach.batch)
    later = goodputs(surge, ttft, tpot, reach.batch, max(depth for _, _, depth in found))
    as_good = [depth for now, _, depth in found if now >= TIE * max(stay.present, max(found)[0])]
    best = max((later[depth] for depth in as_good), default=then)
    if best < READY * then or best <= then:
        return stay
    depth = max(depth for depth in as_good if READY * later[depth] >= best)  # no shallower than it takes
    return Choice(reach.batch, depth, later[depth], then, surge=True)


def _step_towards(far: Choice, model: Model, ttft: float, tpot: float, reach: Reach, stay: Choice) -> Choice:
    """One leap or halving of the batch, with the depth as it will be. Where that step itself would lose, a cut goes all the
    way at once (a valley lies between: a large batch is good while few slots are used), and a raise does not start."""
    low, high = _near(reach)
    step = min(max(far.batch, low), high)
    for batch in dict.fromkeys((step, min(far.batch, step))):
        if goodputs(model, ttft, tpot, batch, far.depth)[far.depth] >= stay.present:
            return replace(far, batch=batch)
    return stay


def _near(reach: Reach) -> tuple[int, int]:
    b = reach.batch
    low, high = (b - 1, b + 1) if reach.one_step else (math.ceil(b / 2), LEAP * b)
    return max(low, reach.batch_limits[0]), min(high, reach.batch_limits[1])


def _sizes(reach: Reach, low: int, high: int) -> list[int]:
    """Batch sizes from low to high, thinned evenly in logarithm, with the present one."""
    low = low if reach.may_cut else reach.batch
    high = high if reach.may_raise else reach.batch
    if high - low < MOST_CANDIDATES:
        return sorted({*range(low, high + 1), reach.batch})
    ratio = high / low
    return sorted({round(low * ratio ** (i / (MOST_CANDIDATES - 1))) for i in range(MOST_CANDIDATES)} | {reach.batch})


def _weighed(model: Model, ttft: float, tpot: float, reach: Reach, low: int, high: int) -> list[tuple[float, int, int]]:
    """(goodput, batch, depth) of every useful depth of batches from low to high: of thinned ones first, then of all about the
    best of these."""
    sizes = _sizes(reach, low, high)
    found = _of_sizes(model, ttft, tpot, reach, sizes)
    top = max(found)[1]
    around = _sizes(reach, max(low, math.floor(top / AROUND)), min(high, math.ceil(top * AROUND)))
    return found + _of_sizes(model, ttft, tpot, reach, [n for n in around if n not in sizes])


def _of_sizes(model: Model, ttft: float, tpot: float, reach: Reach, sizes: list[int]) -> list[tuple[float, int, int]]:
    shallow, deep = reach.depth_limits
    found: list[tuple[float, int, int]] = []
    for batch in sizes:
        useful = max(shallow, min(deep, _useful(model, ttft, batch)))
        kept = min(max(reach.depth, shallow), deep)
        values = goodputs(model, ttft, tpot, batch, max(useful, kept))
        found += [(values[q], batch, q) for q in {*range(shallow, useful + 1), kept}]
    return found


def _best(model: Model, ttft: float, tpot: float, reach: Reach, stay: Choice, low: int, high: int) -> Choice:
    """Of batches from low to high; `stay` on a tie with the present setting, and where nothing serves anybody."""
    present = stay.present
    found = [*_weighed(model, ttft, tpot, reach, low, high), (present, reach.batch, reach.depth)]
    best = max(g for g, _, _ in found)
    enough = GAIN * present if best >= GAIN * present else 0.0  # a tie must not make of a gain none
    near = [f for f in found if f[0] >= max(TIE * best, min(best, enough))]
    if best < HOPELESS * model.mix.offered or (present, reach.batch, reach.depth) in near:
        return stay
    goodput, batch, depth = _readiest(model, ttft, tpot, reach, near)
    return Choice(batch, depth, goodput, present)


def _readiest(
    model: Model, ttft: float, tpot: float, reach: Reach, near: list[tuple[float, int, int]]
) -> tuple[float, int, int]:
    """Of settings that are as good, the one that does best when more is offered; of those, the least change."""
    surge = model.under(SURGE)
    deepest = {batch: max(q for _, b, q in near if b == batch) for _, batch, _ in near}
    then = {batch: goodputs(surge, ttft, tpot, batch, depth) for batch, depth in deepest.items()}
    ready = max(then[b][q] for _, b, q in near)
    return min(
        (f for f in near if then[f[1]][f[2]] >= TIE * ready),
        key=lambda f: (_distance(f[1], reach.batch), _distance(f[2], reach.depth), -f[0]),
    )


def _useful(model: Model, ttft: float, batch: int) -> int:
    """A depth beyond which nearly nobody would still get a first token in time: the departures in that time and four sigma."""
    expected = model.departures(batch) * ttft
    return math.ceil(expected + 4 * math.sqrt(expected) + 4)


def _distance(a: int, b: int) -> float:
    return abs(math.log((a + 1) / (b + 1)))
