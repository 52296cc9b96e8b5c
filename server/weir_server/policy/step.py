"""What goes into the next step: first come, first served, decoding before prefilling before waiting.

decide() is a pure function of a few numbers per row. Its rules, each with its bound:

- Every decoding row feeds one token. Prompts share what is left, up to the prefill chunk, in the same forward.
- A prefill that decodes have kept from its share, min(chunk, half the token budget), for `grant` steps gets it in the next
  one, so a prompt of C shares is through within C·(grant + 1) steps of its admission.
- The head of the queue is admitted when a slot is free, and the *whole* prompt fits: free − watermark·budget ≥ need, the
  watermark only while something decodes (it is room for those to grow) and nothing at all asked of a row that runs alone,
  or a row that fits exactly would wait for ever. Nobody overtakes the head.
- Decodes reserve their blocks before the forward. If they do not fit, rows are preempted: the fewest computed tokens first
  (what it costs to compute them again), then the newest; never the oldest, so it finishes, and then the next does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weir_server.policy.limits import Limits


class Running(NamedTuple):
    """A row in the batch. `frees` is filled in only when the rows' needs exceed the room."""

    left: int  # tokens to prefill; 0 = it decodes
    need: int  # blocks that its next token needs
    pages: int  # blocks that it reads
    computed: int  # tokens that a preemption would throw away
    frees: int = 0  # blocks that a preemption would free


class Waiting(NamedTuple):
    """A row in the queue."""

    left: int  # tokens to prefill after what it adopts
    need: int  # blocks that its admission takes from what is free
    blocked: bool = False  # its prompt is just being prefilled by another row of its request


@dataclass(frozen=True, slots=True)
class State:
    """All that a step is decided from."""

    running: Sequence[Running]  # oldest first
    waiting: Iterable[Waiting]  # oldest first; no more are taken from it than are admitted, plus one
    queued: int  # how many wait
    rows: int  # the request cap
    free: int  # blocks under the KV budget that no row holds (negative while a lowered budget drains)
    room: int  # blocks that running rows may grow by
    budget: int  # the KV budget, blocks
    watermark: float
    starved: int  # steps since the oldest prefill last got its share
    limits: Limits


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`take[i]` tokens of running row i (0 = it sits out), `admit[j]` of the j-th waiting row, which joins the batch."""

    take: tuple[int, ...]
    admit: tuple[int, ...]
    preempt: tuple[int, ...]
    bound: str | None  # what the head of the queue waits for
    starved: int

    @property
    def empty(self) -> bool:
        return not (any(self.take) or self.admit)


def decide(state: State) -> StepPlan:
    limits = state.limits
    preempt = victims(state.running, state.room)
    rows = [(i, row) for i, row in enumerate(state.running) if i not in preempt]
    decoding = any(not row.left for _, row in rows)
    parked = next((row.left for _, row in rows if row.left), 0)
    chunk = limits.prefill_tokens(decoding)
    share = min(parked, chunk, max(1, limits.tokens // 2))
    reserved = share if 0 < limits.grant <= state.starved else 0

    take = [0] * len(state.running)
    tokens, pages, first = limits.tokens - reserved, limits.pages, True
    for i, row in rows:
        if not row.left and tokens and (first or row.pages <= pages):
            take[i] = 1
            tokens, pages, first = tokens - 1, pages - row.pages, False
    prompt = _PromptTokens(min(chunk, tokens + reserved), whole=limits.chunk == 0)
    for i, row in rows:
        if row.left and (first or row.pages <= pages):
            take[i] = prompt.take(row.left)
            pages, first = pages - row.pages, False

    admit, bound = ((), "kv" if state.queued else None) if preempt else _admit(state, decoding, prompt)
    starved = state.starved + 1 if prompt.taken < share else 0
    return StepPlan(tuple(take), admit, preempt, bound, starved)


def victims(running: Sequence[Running], room: int) -> tuple[int, ...]:
    """Rows to preempt so that the others can grow into `room` blocks. The oldest may grow past it when it is left alone."""
    short = sum(row.need for row in running) - room
    chosen: list[int] = []
    if short > 0:
        for i in sorted(range(1, len(running)), key=lambda i: (running[i].computed, -i)):
            if gain := running[i].need + running[i].frees:
                chosen.append(i)
                short -= gain
            if short <= 0:
                break
    return tuple(chosen)


def _admit(state: State, decoding: bool, prompt: _PromptTokens) -> tuple[tuple[int, ...], str | None]:
    """Prompt tokens for each row that leaves the queue, and what the next one waits for."""
    admit: list[int] = []
    free = state.free - sum(row.need for row in state.running)
    if decoding:
        free -= math.ceil(state.watermark * state.budget)
    slots = state.rows - len(state.running)
    waiting = iter(state.waiting)
    while len(admit) < state.queued:
        if len(admit) >= slots:
            return tuple(admit), "drain" if slots < 0 else "slots"
        row = next(waiting)
        alone = not state.running and not admit
        if row.blocked:
            return tuple(admit), "prefill"
        if row.need > free and not alone:
            return tuple(admit), "kv"
        if not (tokens := prompt.take(row.left)):
            return tuple(admit), "prefill"
        admit.append(tokens)
        free -= row.need
    return tuple(admit), None


class _PromptTokens:
    """Prompt tokens that a step still has. With `whole`, a prompt is split only if it comes first and is longer than that."""

    def __init__(self, left: int, whole: bool) -> None:
        self.left = left
        self.whole = whole
        self.taken = 0

    def take(self, wanted: int) -> int:
        tokens = min(wanted, self.left)
        if self.whole and tokens < wanted and self.taken:
            return 0
        self.left -= tokens
        self.taken += tokens
        return tokens
