"""The traffic, smoothed: what is offered, how long rows are, what prefill and context they bring.

Lengths and ρ are means over rows, of which each tick keeps 0.9: a tick with few rows says little of them. λ is a mean over time
and keeps 0.8 a tick, plain means at first. What the means no longer describe is a shift: ρ or λ outside 0.6–1.6 times its mean,
on the same side, for two ticks, ρ also further from it than ticks of this workload scatter: then the means start again from the
last tick. An idle tick changes nothing.
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
SCATTER, SCATTER_TICKS = 2.0, 4  # standard deviations of single ticks; from so many ticks on they are known
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
    side = _side(seen.prefill, mix.prefill) if _beyond_scatter(seen, mix) else 0
    side = side or (_side(seen.offered, mix.offered) if rows >= MIN_RATE_ROWS else 0)
    odd = side * (abs(mix.odd_ticks) + 1 if side * mix.odd_ticks > 0 else 1) if side else 0
    if abs(odd) >= SHIFT_TICKS or (odd and _recognised(seen, mix, learned)):
        return replace(seen, rows=rows), True
    ticks, kept = mix.ticks + 1, KEEP * mix.rows
    new, late = rows / (kept + rows) if rows > 0 else 0.0, max(1.0 - KEEP_RATE, 1.0 / ticks)
    mean = {k: (1 - new) * getattr(mix, k) + new * getattr(seen, k) for k in ("output", "prefill", "context")}
    mean["offered"] = (1 - late) * mix.offered + late * seen.offered
    off = {k: (getattr(seen, k) - getattr(mix, k)) ** 2 for k in ("output", "prefill")}
    waiting, odd_square = mix.odd_square, 0.0
    if abs(odd) == 1:  # what may be another workload says nothing of how this one scatters, until it has turned out not to be
        off["prefill"], odd_square = 0.0, off["prefill"]
    off["prefill"] += waiting
    variances = {f"{k}_variance": (1 - new) * (getattr(mix, f"{k}_variance") + new * square) for k, square in off.items()}
    return replace(
        mix, ticks=ticks, rows=kept + rows, odd_ticks=odd, odd_square=odd_square, quantiles=(mean["offered"],),
        **mean, **variances,
    ), False


def _beyond_scatter(seen: Mix, mix: Mix) -> bool:
    """Prompts of very different lengths, a few in a tick, make ρ jump about without any shift."""
    return mix.ticks < SCATTER_TICKS or abs(seen.prefill - mix.prefill) > SCATTER * math.sqrt(mix.prefill_variance)


def _recognised(seen: Mix, mix: Mix, learned: Sequence[Learned]) -> bool:
    """Whether one tick looks so much like a workload that is known, and so little like the present means, that it is it."""
    known = min((distance(entry, seen) for entry in learned), default=math.inf)
    return known <= CLEARLY and distance(mix, seen) > SAME


def errors(mix: Mix) -> dict[str, float]:
    """Standard errors of the smoothed means, from how single ticks scatter about them."""
    share = max(1.0 - KEEP, 1.0 / mix.ticks)
    share /= 2.0 - share
    return {"output": math.sqrt(mix.output_variance * share), "prefill": math.sqrt(mix.prefill_variance * share)}


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
