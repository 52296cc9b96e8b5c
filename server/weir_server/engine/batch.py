"""The rows that wait and the rows that run, and the KV blocks that they hold: the policy's view, and its plan carried out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from weir_server.contract import Geometry, Knobs
from weir_server.engine.rows import Row, RowState
from weir_server.kv.blocks import BlockAllocator
from weir_server.kv.pool import ChunkPool
from weir_server.kv.prefix import PrefixCache
from weir_server.policy.limits import Limits
from weir_server.policy.step import Running, State, StepPlan, Waiting

_seq = attrgetter("seq")


class Adoption(NamedTuple):
    """KV that a row need not compute: blocks to share, a partial block to copy, and how many tokens that makes."""

    shared: list[int]
    copy: int | None
    tokens: int


class Offer(NamedTuple):
    """A waiting row as the policy was shown it."""

    row: Row
    adoption: Adoption
    ask: Waiting


class Work(NamedTuple):
    """What one step feeds: rows with the number of their tokens, and what the meter counts of it."""

    rows: list[tuple[Row, int]]
    copies: list[tuple[int, int]]  # tails to copy before the forward
    admitted: list[Row]  # for the first time
    decode_rows: int
    context: int  # tokens that the decoding rows read
    prefill: int
    recomputed: int  # of the prefill tokens, how many had been computed before


class Batch:
    """`waiting` and `running` are in order of arrival, which is also the order of first admission."""

    def __init__(self, num_chunks: int, geometry: Geometry, budget: int | None) -> None:
        self.pool = ChunkPool(num_chunks, geometry.chunk_bytes)
        self.blocks = BlockAllocator(self.pool, PrefixCache(), geometry.block_tokens)
        self.pool.set_budget(budget, 0)
        self.waiting: list[Row] = []
        self.running: list[Row] = []

    # ------------------------------------------------------------------------------------------------ the policy's view

    def view(self, knobs: Knobs, limits: Limits, starved: int) -> tuple[State, list[Offer]]:
        """What the policy decides from, and the list that fills with each waiting row that it looks at."""
        room = self.pool.ceiling - self.blocks.used
        needs = [self._growth(row) for row in self.running]
        pressed = sum(needs) > room
        running = [
            Running(
                left=0 if row.state is RowState.DECODING else row.left,
                need=need,
                pages=len(row.blocks),
                computed=row.computed,
                frees=self.blocks.alone(row.blocks) if pressed else 0,
            )
            for row, need in zip(self.running, needs, strict=True)
        ]
        offers: list[Offer] = []
        state = State(
            running=running,
            waiting=self._offers(offers),
            queued=len(self.waiting),
            rows=knobs.max_batch_size,
            free=self.pool.limit - self.blocks.used,
            room=room,
            budget=self.pool.limit,
            watermark=knobs.admission_watermark,
            starved=starved,
            limits=limits,
        )
        return state, offers

    def fits_budget(self, row: Row) -> bool:
        """Whether the live KV budget could ever hold the row's prompt and its next token."""
        return self.blocks.blocks_for(row.reach) <= self.pool.limit

    def _growth(self, row: Row) -> int:
        """Blocks that the row's next token needs beyond its table. A prefilling row has all of its own since admission."""
        return 1 if len(row.tokens) > len(row.blocks) * self.blocks.block_tokens else 0

    def _offers(self, offers: list[Offer]) -> Iterator[Waiting]:
        """Waiting rows in order, looked up in the cache only when the policy asks for the next."""
        for row in self.waiting:
            adoption = self._adoption(row)
            started = [r.state for r in row.siblings if r.state is not RowState.QUEUED]
            first_now = bool(offers) and offers[-1].row.siblings is row.siblings
            blocked = RowState.DECODING not in started and (bool(started) or first_now)
            reach = row.reach if row.credits else row.final - 1
            need = self.blocks.blocks_for(reach) - len(adoption.shared) + self.blocks.cold_of(adoption.shared)
            offers.append(Offer(row, adoption, Waiting(left=row.left - adoption.tokens, need=need, blocked=blocked)))
            yield offers[-1].ask

    def _adoption(self, row: Row) -> Adoption:
        """The longest known start of the row: from the prefix cache, or from another row of its request that has it whole.

        At least one token is left to compute, since its logits are needed.
        """
        size = self.blocks.block_tokens
        shared = self.blocks.prefix.match(row.chain, row.tokens, (len(row.tokens) - 1) // size) if row.chain else []
        donor = next((r for r in row.siblings if r.state is RowState.DECODING), None)
        prompt = row.prompt_len - 1
        if donor is None or prompt <= len(shared) * size:
            return Adoption(shared, None, len(shared) * size)
        full = prompt // size
        return Adoption(donor.blocks[:full], donor.blocks[full] if prompt % size else None, prompt)

    # ------------------------------------------------------------------------------------------------ the plan carried out

    def apply(self, plan: StepPlan, offers: list[Offer]) -> Work:
        """Preempt, admit, grow. References are taken first, so that no allocation evicts what another row is to share."""
        fed = [(row, n) for row, n in zip(self.running, plan.take, strict=True) if n]
        for row in [self.running[i] for i in plan.preempt]:
            self._preempt(row)
        joining = [(offer.row, offer.adoption, n) for offer, n in zip(offers, plan.admit, strict=False)]
        for row, adoption, _ in joining:
            self._join(row, adoption)
        for row, _ in fed:
            if self._growth(row):
                row.blocks.append(self.blocks.allocate())
        copies, admitted = [], []
        for row, adoption, n in joining:
            while len(row.blocks) < self.blocks.blocks_for(row.reach):
                row.blocks.append(self.blocks.allocate())
            if adoption.copy is not None:
                copies.append((adoption.copy, row.blocks[len(adoption.shared)]))
            if not row.admitted:
                row.admitted = True
                admitted.append(row)
            fed.append((row, n))
        decode_rows = context = prefill = recomputed = 0
        for row, n in fed:
            if row.state is RowState.DECODING:
                decode_rows += 1
                context += row.computed + 1
            else:
                prefill += n
                recomputed += max(0, min(row.computed + n, row.high_water) - row.computed)
        return Work(fed, copies, admitted, decode_rows, context, prefill, recomputed)

    def _join(self, row: Row, adoption: Adoption) -> None:
        """Move a row from the queue into the batch, holding what it shares."""
        _remove(self.waiting, row)
        insort(self.running, row, key=_seq)
        row.state = RowState.PREFILLING
        row.blocks = list(adoption.shared)
        for block in row.blocks:
            self.blocks.share(block)
        row.computed = adoption.tokens
        row.published = len(row.blocks)

    def _preempt(self, row: Row) -> None:
        """Back to its place in the queue with the tokens that it has; their KV is computed again."""
        self.drop(row)
        row.state = RowState.QUEUED
        row.credits = max(0, row.credits - 1)
        insort(self.waiting, row, key=_seq)

    def drop(self, row: Row) -> None:
        """Take a row out of the queue or the batch and free what it holds."""
        _remove(self.waiting if row.state is RowState.QUEUED else self.running, row)
        self.blocks.release(row.blocks)
        row.blocks = []
        row.computed = row.published = 0

    def computed(self, row: Row, n: int) -> None:
        """`n` more tokens of the row are in its blocks: publish those that are full now. Equal content is held once."""
        row.computed += n
        row.high_water = max(row.high_water, row.computed)
        while row.chain and row.computed >= (row.published + 1) * self.blocks.block_tokens:
            own = row.blocks[row.published]
            block = self.blocks.prefix.publish(row.chain, row.tokens, row.blocks, row.published)
            if block is None:
                row.chain = None
                return
            if block != own:
                self.blocks.share(block)
                self.blocks.release([own])
                row.blocks[row.published] = block
            row.published += 1

    def over(self) -> bool:
        """Whether a lowered budget is still draining."""
        return self.pool.limit < max(self.pool.ceiling, self.pool.resident)


def _remove(rows: list[Row], row: Row) -> None:
    del rows[bisect_left(rows, row.seq, key=_seq)]
