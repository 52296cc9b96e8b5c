"""What a setting (B, Q) would yield: the pod as a birth–death chain.

Rows arrive at λ, B slots serve them, Q more may wait, the rest is refused. With n slots in use d(n) rows decode (the others
prefill), and y(d) = a + (b + c·context + p·ρ)·d is the time between a row's tokens, prefill included: in saturation ρ tokens
are prefilled for each generated one, so prefill acts as a slope on d. Goodput is λ times the share of arrivals that are
accepted, get their first token in time (a Gamma wait for the departures before them, then the prefill), and then each next one
in time (the spread z of real times per token about y). Rows may come in clumps: then more are refused than of a steady flow.

Cost: one pass over k = 0 … B+Q gives all depths up to Q at once, since what an arrival in state k meets does not depend on Q.
Known flaws: clumps of geometric size within a quantile, exponential service, a row sees the n of its arrival for its whole
life, KV only as a cap on rows, no preemption. Sources in docs/tuning-law.md: the chain is Erlang's, with arrivals in batches
(Mˣ/M/n/K); the plant Splitwise's and WVA's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from weir_operator.tuner.types import Mix
from weir_server.contract import HIST_FACTOR, Plant, hist_edge, hist_index

PREFILL_POINTS = 5
BUSIEST = 0.95  # share of a step's prefill tokens beyond which the wait for prefill is not extrapolated


@dataclass(frozen=True)
class Model:
    """A pod under its traffic. Weights by bucket: `spread` of z, `prefill` of f ÷ (y · stretch). `kv_rows`: what KV holds."""

    plant: Plant
    mix: Mix
    spread: Mapping[int, float]
    prefill: Mapping[int, float]
    kv_rows: float = math.inf
    _decoding: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    _met: dict[tuple[int, float, float], float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def slope(self) -> float:
        """Seconds that one more decoding row adds to y."""
        return self.plant.b + self.plant.c * self.mix.context + self.plant.p * self.mix.prefill

    def interval(self, decoding: float) -> float:
        """Mean seconds of a step with so many rows decoding, their prefill included."""
        return self.plant.a + self.slope * decoding

    def between(self, company: float) -> float:
        """y: seconds between a row's tokens in a batch of so many decoding rows, itself included: it meets the prefill of the
        others, its own was before."""
        return self.interval(company) - self.plant.p * self.mix.prefill * min(1.0, company)

    def company(self, slots: int) -> float:
        """Decoding rows as one of them meets them."""
        return 1.0 + (slots - 1) * self.decoding(slots) / slots

    def under(self, factor: float) -> Model:
        """The same pod with `factor` times as much offered."""
        mix = replace(self.mix, offered=factor * self.mix.offered, quantiles=tuple(factor * q for q in self.mix.quantiles))
        return replace(self, mix=mix)  # with what is known of its slots: none of that depends on what is offered

    def stretch(self, decoding: float) -> float:
        """How much longer a prefill takes for others being prefilled too (M/D/1 in prefill chunks)."""
        busy = min(BUSIEST, self.mix.prefill * decoding / self.plant.prefill_tokens)
        return 1.0 + busy / (2.0 * (1.0 - busy))

    @cached_property
    def mean_prefill(self) -> float:
        total = sum(self.prefill.values())
        return sum(w * _middle(i) for i, w in self.prefill.items()) / total if total else 0.0

    def decoding(self, slots: int) -> float:
        """d(n): decoding rows when n slots are in use; the root of d·(O + f(d)) = n·O, f in steps. Prefill caps it."""
        if slots not in self._decoding:
            low, high = 0.0, float(slots)
            if self.mean_prefill and self.mix.prefill:
                high = min(high, BUSIEST * self.plant.prefill_tokens / self.mix.prefill)
            for _ in range(30 if self.mean_prefill else 0):
                d = (low + high) / 2
                if d * (self.mix.output + self.mean_prefill * self.stretch(d)) < slots * self.mix.output:
                    low = d
                else:
                    high = d
            self._decoding[slots] = high
        return self._decoding[slots]

    def departures(self, slots: int) -> float:
        """Rows finished per second with n slots in use."""
        d = self.decoding(slots)
        return d / (self.mix.output * self.interval(d))

    def in_time(self, slots: int, tpot: float) -> float:
        """Share of rows whose time per output token meets the objective."""
        return share_below(self.spread, tpot / self.between(self.company(slots)))

    @cached_property
    def _prefill_points(self) -> list[float]:
        return [quantile(self.prefill, (i + 0.5) / PREFILL_POINTS) for i in range(PREFILL_POINTS)] if self.prefill else [0.0]

    def prefill_seconds(self, slots: int) -> list[float]:
        """Equally likely times from admission to the first token. Slots that do not decode are in prefill (Little)."""
        d = self.decoding(slots)
        stretch = (slots / d - 1.0) * self.mix.output / self.mean_prefill if self.mean_prefill else 0.0
        others = self.mean_prefill * (stretch - 1.0)  # first come, first prefilled: however long one's own prompt is
        return [(f + others) * self.interval(d) for f in self._prefill_points]

    def met(self, slots: int, ttft: float, tpot: float) -> float:
        """Share of rows that meet both objectives where each took the last of so many slots at once."""
        if (slots, ttft, tpot) not in self._met:
            first = self.prefill_seconds(slots)
            self._met[slots, ttft, tpot] = self.in_time(slots, tpot) * sum(f <= ttft for f in first) / len(first)
        return self._met[slots, ttft, tpot]


@dataclass(frozen=True)
class Prediction:
    goodput: float  # rows per second that meet both objectives
    interval: float  # mean time per output token of accepted rows, seconds
    rows: float  # mean slots in use
    accepted: float  # share of arrivals

    @property
    def shown(self) -> dict[str, float]:
        return asdict(self)


def goodputs(model: Model, ttft: float, tpot: float, batch: int, deepest: int) -> list[float]:
    """Predicted goodput for the depths 0 … deepest, the mean over λ's quantiles."""
    slots = _usable(model, batch)
    shares = _shares(model, ttft, tpot, slots, deepest)
    rates = [model.departures(k) for k in range(1, slots + 1)]
    rates += deepest * rates[-1:]
    flows = [list(_flow(offered, model.mix.clump, rates, shares, slots)) for offered in model.mix.quantiles]
    return [statistics.fmean(of_depth) for of_depth in zip(*flows, strict=True)]


def _flow(offered: float, clump: float, rates: Sequence[float], worth: Sequence[float], slots: int) -> Iterator[float]:
    """Σ worth per second of the rows that find a place, with 0, 1, … places behind the slots. `worth`: of a row that finds
    0, 1, … others; `rates`: of departures with 1, 2, … in the pod.

    Rows come in clumps of geometric size, r = 1 − 1 ÷ clump; of a clump, what does not fit is refused. For each k as many rows
    per second come to find k − 1 others as leave k, λ ÷ clump · Σ p(j) r^(k−1−j), whatever is behind.
    """
    r, clumps = 1.0 - 1.0 / clump, max(offered, 1e-9) / clump
    above, gained = 1.0, 0.0  # Σ p(j) r^(k−1−j), and the yield, of a pod with k places; both normalised: no length overflows
    for k, rate in enumerate(rates, start=1):
        up = clumps * above
        p = up / rate
        total = 1.0 + p
        gained = (gained + up * worth[k - 1]) / total
        above = (p + r * above) / total
        if k >= slots:
            yield gained


def _mean_flow(model: Model, batch: int, depth: int, worth: Callable[[int], float]) -> float:
    """The same for one setting, the mean over λ's quantiles. `worth`: of a row that finds k others."""
    slots = _usable(model, batch)
    rates = [model.departures(min(k, slots)) for k in range(1, slots + depth + 1)]
    values = [worth(k) for k in range(slots + depth)]
    return statistics.fmean([*_flow(q, model.mix.clump, rates, values, slots)][-1] for q in model.mix.quantiles)


def accepted(model: Model, batch: int, depth: int) -> float:
    """Share of the rows offered that find a place."""
    return _mean_flow(model, batch, depth, lambda _: 1.0) / max(1e-9, statistics.fmean(model.mix.quantiles))


def predict(model: Model, ttft: float, tpot: float, batch: int, depth: int) -> Prediction:
    """The same for one setting, with what a record shows beside it."""
    slots, bias = _usable(model, batch), _mean(model.spread)

    def between(k: int) -> float:
        return bias * model.between(model.company(min(k + 1, slots)))

    def seconds(k: int) -> float:  # for which k + 1 rows are in the pod, for each row that finds k, times the slots they use
        return min(k + 1, slots) / model.departures(min(k + 1, slots))

    found = _mean_flow(model, batch, depth, lambda _: 1.0)
    return Prediction(
        goodputs(model, ttft, tpot, batch, depth)[depth],
        _mean_flow(model, batch, depth, between) / found,
        _mean_flow(model, batch, depth, seconds),
        found / max(1e-9, statistics.fmean(model.mix.quantiles)),
    )


def _usable(model: Model, batch: int) -> int:
    return max(1, min(batch, math.floor(model.kv_rows))) if model.kv_rows < batch else batch


def _shares(model: Model, ttft: float, tpot: float, slots: int, deepest: int) -> list[float]:
    """Share of arrivals that meet both objectives, by the rows they find: 0 … slots + deepest − 1."""
    shares = [model.met(k + 1, ttft, tpot) for k in range(slots)]
    rate, in_time = model.departures(slots), model.in_time(slots, tpot)
    means = [rate * max(0.0, ttft - f) for f in model.prefill_seconds(slots)]
    terms = [math.exp(-m) for m in means]  # Poisson: j departures in the time that is left
    late = list(terms)  # P(fewer than j+1 departures)
    for j in range(1, deepest + 1):
        shares.append(in_time * sum(1.0 - p for p in late) / len(late))
        terms = [t * m / j for t, m in zip(terms, means, strict=True)]
        late = [min(1.0, p + t) for p, t in zip(late, terms, strict=True)]
    return shares


# ---------------------------------------------------------------- weighted histograms over the contract's buckets

def _middle(index: int) -> float:
    return hist_edge(index) / math.sqrt(HIST_FACTOR) if math.isfinite(hist_edge(index)) else hist_edge(index - 1)


def _mean(weights: Mapping[int, float]) -> float:
    total = sum(weights.values())
    return sum(w * _middle(i) for i, w in weights.items()) / total if total else 1.0


def share_below(weights: Mapping[int, float], value: float) -> float:
    """P(x ≤ value), even within a bucket; with nothing known x is 1."""
    total = sum(weights.values())
    if not total:
        return 1.0 if value >= 1.0 else 0.0
    at = hist_index(value)
    inside = math.log(value / hist_edge(at - 1)) / math.log(HIST_FACTOR) if at and value > 0 else 1.0
    below = sum(w for i, w in weights.items() if i < at) + weights.get(at, 0.0) * min(1.0, max(0.0, inside))
    return below / total


def quantile(weights: Mapping[int, float], share: float) -> float:
    left = share * sum(weights.values())
    for index in sorted(weights):
        left -= weights[index]
        if left <= 0:
            return _middle(index)
    return _middle(max(weights))


def scaled(counts: list[int], unit: float) -> dict[int, float]:
    """The histogram of x ÷ unit."""
    out: dict[int, float] = {}
    for index, count in enumerate(counts):
        if count:
            to = hist_index(_middle(index) / unit)
            out[to] = out.get(to, 0.0) + count
    return out


def blend(old: Mapping[int, float], new: Mapping[int, float], most: float) -> dict[int, float]:
    """Both together, older weights shrunk so that at most `most` remain: about the last so many samples."""
    fresh = sum(new.values())
    have = sum(old.values())
    keep = max(0.0, min(1.0, (most - fresh) / have)) if have else 0.0
    merged = {i: w * keep for i, w in old.items() if w * keep > 1e-3}
    for i, w in new.items():
        merged[i] = merged.get(i, 0.0) + w
    return merged
