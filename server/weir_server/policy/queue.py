"""The queue: three lanes, each in order of arrival; a row rises one lane for every 30 s that it has waited.

Rows are taken by (effective lane, arrival). Within a lane older rows have risen as far as younger ones or further, so three
sorted lists merged lazily give that order, and looking at the first few rows costs the same however many wait behind them.
A row's own lane never changes: whom it may preempt does not depend on how long it waited.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

LANES = 3
PROMOTE_AFTER = 30.0
"""Seconds of waiting that lift a row by one lane."""
_seq = attrgetter("seq")


class Queued(Protocol):
    """`seq`: order of arrival. `lane`: 0 high, 1 normal, 2 low. `arrived`: seconds, not falling as seq rises."""

    seq: int
    lane: int
    arrived: float


T = TypeVar("T", bound=Queued)


def effective_lane(row: Queued, now: float) -> int:
    return max(0, row.lane - int((now - row.arrived) / PROMOTE_AFTER))


class Lanes(Generic[T]):
    """Rows that wait. A preempted row comes back to its place in order of arrival."""

    def __init__(self) -> None:
        self._lanes: tuple[list[T], ...] = tuple([] for _ in range(LANES))

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __iter__(self) -> Iterator[T]:
        """All rows, a lane after the other."""
        for lane in self._lanes:
            yield from lane

    def push(self, row: T) -> None:
        insort(self._lanes[row.lane], row, key=_seq)

    def remove(self, row: T) -> None:
        lane = self._lanes[row.lane]
        del lane[bisect_left(lane, row.seq, key=_seq)]

    def in_order(self, now: float) -> Iterator[T]:
        """Rows as they are to be taken. Not to be used after a change."""
        lanes = [lane for lane in self._lanes if lane]
        if len(lanes) == 1:
            return iter(lanes[0])
        return heapq.merge(*lanes, key=lambda row: (effective_lane(row, now), row.seq))

    def head(self, now: float) -> T | None:
        return next(self.in_order(now), None)

    def oldest_arrival(self) -> float | None:
        return min((lane[0].arrived for lane in self._lanes if lane), default=None)
