"""The traffic, smoothed: what is offered, how long rows are, what prefill and context they bring.

Lengths and ρ are means over rows, of which each tick keeps 0.9: a tick with few rows says little of them. λ is a mean over time
and keeps 0.8 a tick, plain means at first. What the means no longer describe is a shift: outside 0.6–1.6 times the mean, on the
same side, for two ticks, and further from it than single ticks scatter. After one of ρ all means start again from the last
tick: it is another workload. After one of λ only λ's does, unless the lengths are others too. An idle tick changes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from weir_operator.tuner.memory import CLEARLY, SAME, distance
from weir_operator.tuner.types import Learned, Mix
from weir_operator.tuner.window import Span, begun
from weir_server.contract import Window

KEEP, KEEP_RATE = 0.9, 0.8
LOW, HIGH = 0.6, 1.6
SHIFT_TICKS = 2
MIN_RATE_ROWS = 20  # a tick with fewer rows says too little of λ to call it a shift
LEFT_LATELY = 3.0  # a shift of λ leaves its square ÷ this as scatter: the way back is another shift after three ticks or so
OTHER = math.log(2.0)  # in output or context, beside another rate: another workload, however ρ scatters
SCATTER, SCATTER_TICKS = 2.0, 4  # standard deviations of single ticks; from so many ticks on they are known
ROWS_SCATTER = 0.5  # standard deviation ÷ mean of single rows' lengths, at least: recorded traffic has 0.8 to 1.3
OVERDISPERSED = 1.6  # variance ÷ mean of arrivals per poll; Poisson has 1
MIN_BINS = 12
QUANTILES = 6


def observe(span: Span) -> Mix | None:
    """The traffic of one span, or None where it shows none."""
    generated, rows = span.total("generated_tokens"), span.completed + 0.5 * (span.new.running - span.old.running)
    decoded = span.sums["decode_rows"]
    if span.seconds <= 0 or generated <= 0 or rows < 1 or decoded <= 0 or span.offered <= 0:
        return None
    rate = span.offered / span.seconds
    return Mix(
        offered=rate,
        quantiles=(rate,),
        output=max(1.0, generated / rows),
        prefill=span.sums["prefill_tokens"] / generated,
        context=span.sums["context_tokens"] / decoded,
    )


def smooth(mix: Mix | None, seen: Mix | None, rows: float, learned: Sequence[Learned] = ()) -> tuple[Mix | None, bool]:
    """The mix after one more tick that brought `rows`, and whether it shifted: one odd tick is enough where it looks like a
    workload that is known."""
    if seen is None or mix is None:
        return (replace(seen, rows=rows) if seen else mix), False
    odd = _in_a_row(mix.odd_ticks, _side(seen.prefill, mix.prefill) if _beyond_scatter(seen, mix) else 0)
    odd_rate = _odd_rate(mix, seen, rows)
    other = abs(odd_rate) >= SHIFT_TICKS and _other_rows(seen, mix)
    if other or abs(odd) >= SHIFT_TICKS or (odd and _recognised(seen, mix, learned)):
        return replace(seen, rows=rows), True
    ticks, kept = mix.ticks + 1, KEEP * mix.rows
    new = rows / (kept + rows) if rows > 0 else 0.0
    mean = {k: (1 - new) * getattr(mix, k) + new * getattr(seen, k) for k in ("output", "prefill", "context")}
    off = {k: (getattr(seen, k) - getattr(mix, k)) ** 2 for k in ("output", "prefill")}
    waiting, odd_square = mix.odd_square, 0.0
    if abs(odd) == 1:  # what may be another workload says nothing of how this one scatters, until it has turned out not to be
        off["prefill"], odd_square = 0.0, off["prefill"]
    off["prefill"] += waiting
    variances = {f"{k}_variance": (1 - new) * (getattr(mix, f"{k}_variance") + new * square) for k, square in off.items()}
    mix = replace(mix, ticks=ticks, rows=kept + rows, odd_ticks=odd, odd_square=odd_square, **mean, **variances)
    return _smooth_rate(mix, seen, odd_rate), False


def _other_rows(seen: Mix, mix: Mix) -> bool:
    """Whether rows are twice or half as long, which means over a tick's rows hardly are by chance; ρ, a ratio, is."""
    pairs = ((seen.output, mix.output), (seen.context, mix.context))
    return any(abs(math.log((a + 1.0) / (b + 1.0))) > OTHER for a, b in pairs)


def _odd_rate(mix: Mix, seen: Mix, rows: float) -> int:
    beyond = rows >= MIN_RATE_ROWS and abs(seen.offered - mix.offered) > SCATTER * math.sqrt(mix.offered_variance)
    return _in_a_row(mix.odd_rate, _side(seen.offered, mix.offered) if beyond else 0)


def _smooth_rate(mix: Mix, seen: Mix, odd: int) -> Mix:
    """λ for itself: another rate is no other workload. One that comes in bursts, or to and fro within a few ticks, is left to
    the quantiles: a level that was left lately is within the scatter."""
    off = abs(seen.offered - mix.offered)
    if abs(odd) >= SHIFT_TICKS:
        known = max(mix.offered_variance, off**2 / LEFT_LATELY)
        return replace(mix, offered=seen.offered, quantiles=(seen.offered,), offered_variance=known, odd_rate=0, rate_ticks=1)
    ticks = mix.rate_ticks + 1
    late = max(1.0 - KEEP_RATE, 1.0 / ticks)
    mean = (1 - late) * mix.offered + late * seen.offered
    variance = mix.offered_variance if odd else KEEP * mix.offered_variance + (1 - KEEP) * off**2
    return replace(mix, offered=mean, quantiles=(mean,), offered_variance=variance, odd_rate=odd, rate_ticks=ticks)


def _in_a_row(before: int, side: int) -> int:
    """Ticks in a row on one side, signed by it."""
    return side * (abs(before) + 1 if side * before > 0 else 1)


def _beyond_scatter(seen: Mix, mix: Mix) -> bool:
    """Prompts of very different lengths, a few in a tick, make ρ jump about without any shift."""
    return mix.ticks < SCATTER_TICKS or abs(seen.prefill - mix.prefill) > SCATTER * math.sqrt(mix.prefill_variance)


def _recognised(seen: Mix, mix: Mix, learned: Sequence[Learned]) -> bool:
    """Whether one tick looks so much like a workload that is known, and so little like the present means, that it is it."""
    known = min((distance(entry, seen) for entry in learned), default=math.inf)
    return known <= CLEARLY and distance(mix, seen) > SAME


def errors(mix: Mix) -> dict[str, float]:
    """Standard errors of the smoothed means, from how single ticks scatter about them; in the first ticks that is not known
    yet, and no mean over n rows is surer than their own scatter ÷ √n."""
    share = max(1.0 - KEEP, 1.0 / mix.ticks)
    share /= 2.0 - share
    least = ROWS_SCATTER / math.sqrt(mix.rows) if mix.rows else 0.0
    scatter = {"output": mix.output_variance, "prefill": mix.prefill_variance}
    return {name: max(math.sqrt(square * share), least * getattr(mix, name)) for name, square in scatter.items()}


def _side(value: float, mean: float) -> int:
    return 1 if value > HIGH * mean else -1 if value < LOW * mean else 0


def spread(mix: Mix, windows: Sequence[Window]) -> Mix:
    """With λ's quantiles over the polls where arrivals spread more than Poisson, scaled to the smoothed mean."""
    spans = [Span(a, b) for a, b in pairwise(begun(windows)) if b.monotonic > a.monotonic]
    counts = [s.offered for s in spans]
    mean = statistics.fmean(counts) if counts else 0.0
    if len(counts) < MIN_BINS or mean <= 0 or statistics.variance(counts) < OVERDISPERSED * mean:
        return replace(mix, quantiles=(mix.offered,))
    rates = sorted(s.offered / s.seconds for s in spans)
    cuts = [len(rates) * i // QUANTILES for i in range(QUANTILES + 1)]
    means = [statistics.fmean(rates[a:b]) for a, b in pairwise(cuts)]
    scale = mix.offered / statistics.fmean(means)
    return replace(mix, quantiles=tuple(scale * m for m in means))
