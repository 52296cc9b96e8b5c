"""Goodput: of what was offered, the share that met both objectives. A refusal, a miss, a break all count zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Served(Protocol):
    """What accounting needs to know of a request's end."""

    offered: float
    status: int
    ttft: float | None
    tpot: float | None
    tokens: int
    output: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds to the first token, and seconds per token after it."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Requests offered in [at, at + length): counts, and quantiles of those that were served (None where none was)."""

    at: float
    length: float
    offered: int
    good: int
    refused: int
    broken: int
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None

    @property
    def goodput(self) -> float | None:
        """Share of what was offered; None where nothing was."""
        return self.good / self.offered if self.offered else None


def is_good(outcome: Served, objectives: Objectives) -> bool:
    """Whole, in time to the first token and per token. A one-token answer has no time per token and can't miss it."""
    if outcome.status != 200 or outcome.error is not None or outcome.ttft is None or outcome.tokens < outcome.output:
        return False
    return outcome.ttft <= objectives.ttft and (outcome.tpot is None or outcome.tpot <= objectives.tpot)


def share(outcomes: Iterable[Served], objectives: Objectives, since: float = 0.0, until: float = float("inf")) -> float | None:
    """Good requests ÷ requests offered in [since, until); None where nothing was offered."""
    counted = [is_good(o, objectives) for o in outcomes if since <= o.offered < until]
    return sum(counted) / len(counted) if counted else None


def series(outcomes: Iterable[Served], objectives: Objectives, length: float) -> list[Interval]:
    """Consecutive intervals of `length` seconds by time of offer, from 0 to the last offer."""
    buckets: dict[int, list[Served]] = {}
    for outcome in outcomes:
        buckets.setdefault(int(outcome.offered // length), []).append(outcome)
    return [_interval(i * length, length, buckets.get(i, []), objectives) for i in range(max(buckets, default=-1) + 1)]


def _interval(at: float, length: float, outcomes: Sequence[Served], objectives: Objectives) -> Interval:
    ttft = [o.ttft for o in outcomes if o.ttft is not None]
    tpot = [o.tpot for o in outcomes if o.tpot is not None]
    return Interval(
        at, length, len(outcomes), sum(is_good(o, objectives) for o in outcomes), sum(o.status == 503 for o in outcomes),
        sum(o.status not in (200, 503) or (o.status == 200 and o.error is not None) for o in outcomes),
        quantile(ttft, 0.5), quantile(ttft, 0.95), quantile(tpot, 0.5), quantile(tpot, 0.95),
    )


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value with at least a share `q` at or below it; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1))]
