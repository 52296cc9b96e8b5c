"""What a step is decided from and what is decided: a few numbers for each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weir_server.kv.shape import Need, Room
from weir_server.policy.limits import Limits


class Running(NamedTuple):
    """A row in the batch. `frees` is filled in only where rows may have to give way."""

    left: int  # tokens to prefill; 0 = it decodes
    need: int  # full-attention blocks that its next token needs
    pages: int  # blocks that it reads
    computed: int  # tokens that a preemption would throw away
    generated: int = 0
    lane: int = 1
    frees: Room | None = None  # what a preemption would free


class Waiting(NamedTuple):
    """A row in the queue."""

    left: int  # tokens to prefill after what it adopts; 0 = it decodes, once its KV is back from the swap pool
    need: Need  # blocks that its admission takes from what is free
    lane: int = 1
    passed: int = 0  # rows that were admitted past it
    pages: int = 0  # blocks that it reads


@dataclass(frozen=True, slots=True)
class State:
    """All that a step is decided from."""

    running: Sequence[Running]  # in order of first admission
    waiting: Iterable[Waiting]  # in order of the queue; no more are taken from it than policy.admit looks at
    queued: int  # how many of them there are
    head_lane: int | None  # of the first of them
    rows: int  # the request cap
    room: Room  # what is free under the KV budget (less than nothing while a lowered one drains)
    growth: int  # full-attention blocks that running rows may grow by
    budget: int  # the KV budget, chunks
    watermark: float
    starved: int  # steps since the oldest prefill last got its share
    limits: Limits

    @property
    def short(self) -> bool:
        """Whether running rows need more than there is."""
        return sum(row.need for row in self.running) > self.growth

    @property
    def contested(self) -> bool:
        """Whether the head of the queue may drive out rows of lower lanes, should it not fit."""
        if self.head_lane is None or len(self.running) > self.rows:
            return False
        if len(self.running) == self.rows and self.limits.slot_victims is None:
            return False
        return any(row.lane > self.head_lane for row in self.running)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`take[i]` tokens of running row i (0 = it sits out); (place in the queue, tokens) of each row that joins the batch."""

    take: tuple[int, ...]
    admit: tuple[tuple[int, int], ...]
    preempt: tuple[int, ...]
    cause: str | None  # of the preemptions: `kv` for rows to grow, `priority` for a head's memory, `slots`
    bound: str | None  # what the head of the queue waits for
    starved: int
    granted: bool  # half of the step was reserved for a parked prefill

    @property
    def empty(self) -> bool:
        return not (any(self.take) or self.admit)
