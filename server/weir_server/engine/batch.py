"""The rows that wait and the rows that run, and the KV blocks that they hold: the policy's view, and its plan carried out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from weir_server.contract import FULL, SLIDING, Knobs
from weir_server.engine.rows import Row, RowState
from weir_server.kv.cache import Cache
from weir_server.kv.shape import Need
from weir_server.policy.limits import Limits
from weir_server.policy.queue import Lanes, effective_lane
from weir_server.policy.state import Running, State, StepPlan, Waiting

_turn = attrgetter("turn")
Pairs = dict[str, list[tuple[int, int]]]
"""(from, to) block numbers by attention type."""


class Adoption(NamedTuple):
    """KV that a row need not compute: blocks to share, a partial one and a ring to copy, and how many tokens that makes."""

    tokens: int = 0
    shared: list[int] = []
    tail: int | None = None
    ring: list[int] = []


class Offer(NamedTuple):
    """A waiting row as the policy was shown it."""

    row: Row
    adoption: Adoption
    ask: Waiting


@dataclass(slots=True)
class Work:
    """What one step feeds: rows with the number of their tokens; what is copied before it; what is counted of it."""

    rows: list[tuple[Row, int]]
    swap_out: Pairs = field(default_factory=dict)
    swap_in: Pairs = field(default_factory=dict)
    copies: Pairs = field(default_factory=dict)  # tails and rings of forks
    offloaded: list[Row] = field(default_factory=list)
    reset: int = 0  # rows whose KV was given up
    given_up: int = 0  # their tokens
    restored: int = 0  # tokens whose KV comes back from the swap pool
    admitted: list[Row] = field(default_factory=list)  # for the first time
    bypassed: int = 0  # rows that joined past one that did not fit
    promoted: int = 0  # lanes that the rows which joined for the first time had risen
    decode_rows: int = 0
    context: int = 0  # tokens that they read
    prompts: int = 0
    prefill: int = 0  # tokens of those
    recomputed: int = 0  # of which had been computed before


class Batch:
    """`running` is in order of first admission. Rows of a request whose prompt another one computes stand `behind` it."""

    def __init__(self, cache: Cache, swap: Cache | None, budget: int | None) -> None:
        self.cache = cache
        self.swap = swap
        self.cache.pool.set_budget(budget, 0)
        self.queue: Lanes[Row] = Lanes()
        self.behind = 0
        self.running: list[Row] = []
        self._turns = 0

    @property
    def waiting(self) -> int:
        return len(self.queue) + self.behind

    @property
    def oldest_arrival(self) -> float | None:
        return self.queue.oldest_arrival()

    # ------------------------------------------------------------------------------------------------ the queue

    def enqueue(self, rows: list[Row]) -> None:
        """The rows of a new request. The first one computes the prompt for all, unless each has to look at it itself."""
        for row in rows:
            row.behind = row is not rows[0] and row.prompt_logprobs < 0
            if row.behind:
                self.behind += 1
            else:
                self.queue.push(row)

    def _step_forward(self, row: Row) -> None:
        row.behind = False
        self.behind -= 1
        self.queue.push(row)

    def through(self, row: Row) -> None:
        """The row has its prompt computed: those behind it may come."""
        for other in row.siblings:
            if other.behind:
                self._step_forward(other)

    # ------------------------------------------------------------------------------------------------ the policy's view

    def view(self, now: float, knobs: Knobs, limits: Limits, starved: int) -> tuple[State, list[Offer]]:
        """What the policy decides from, and the list that fills with each waiting row that it looks at."""
        cache, size = self.cache, self.cache.shape.block_tokens
        grows = cache.shape.full_per_chunk > 0
        running = [
            Running(
                0 if row.state is RowState.DECODING else row.left,
                need := 1 if grows and len(row.tokens) > len(row.blocks) * size else 0,
                len(row.blocks) + need + len(row.ring),
                row.computed,
                row.generated,
                row.lane,
            )
            for row in self.running
        ]
        offers: list[Offer] = []
        head = self.queue.head(now)
        state = State(
            running=running,
            waiting=self._offers(now, offers),
            queued=len(self.queue),
            head_lane=None if head is None else head.lane,
            rows=knobs.max_batch_size,
            room=cache.room(cache.pool.limit),
            growth=cache.room(cache.pool.ceiling).blocks,
            budget=cache.pool.limit,
            watermark=knobs.admission_watermark,
            starved=starved,
            limits=limits,
        )
        if state.short or state.contested:
            # what the head would share with a row that gives way to it does not become free
            kept = set(self._adoption(head).shared) if head and not state.short else set()
            running[:] = [
                ask._replace(frees=cache.freed_by([block for block in row.blocks if block not in kept], row.ring))
                for ask, row in zip(running, self.running, strict=True)
            ]  # fmt: skip
        return state, offers

    def fits_budget(self, row: Row) -> bool:
        """Whether the live KV budget could ever hold the row's prompt and its next token."""
        return self.chunks_asked(row) <= self.cache.pool.limit

    def chunks_asked(self, row: Row) -> int:
        """Chunks that the row needs to be admitted to an empty pool."""
        return self.cache.shape.chunks(self.cache.shape.need(row.reach, row.final - 1))

    def _offers(self, now: float, offers: list[Offer]) -> Iterator[Waiting]:
        """Waiting rows in order, looked up in the cache only when the policy asks for the next."""
        for row in self.queue.in_order(now):
            adoption = self._adoption(row)
            full, ring = self.cache.shape.need(row.reach if row.credits else row.final - 1, row.final - 1)
            need = Need(full - len(adoption.shared) + self.cache.full.cold_of(adoption.shared), ring)
            left = 0 if self._resumes(row) else row.left - (0 if row.swapped else adoption.tokens)
            offers.append(Offer(row, adoption, Waiting(left, need, row.lane, row.passed, full + ring)))
            yield offers[-1].ask

    @staticmethod
    def _resumes(row: Row) -> bool:
        """Whether the row goes on decoding as soon as its KV is back."""
        return row.swapped is not None and row.left == 1 and row.generated > 0

    def _adoption(self, row: Row) -> Adoption:
        """The longest known start of the row: from the prefix cache, or from another row of its request that has it whole.

        At least one token is left to compute, since its logits are needed. Who wants logprobs of the prompt reads all of it.
        """
        if row.swapped or row.prompt_logprobs >= 0:
            return Adoption()
        shared = self._match(row)
        size = self.cache.shape.block_tokens
        prompt = row.prompt_len - 1
        donor = next((r for r in row.siblings if r.state is RowState.DECODING), None)
        if donor is None or prompt <= len(shared) * size or not self._ring_holds(donor, prompt):
            return Adoption(len(shared) * size, shared)
        full = prompt // size if donor.blocks else 0
        return Adoption(prompt, donor.blocks[:full], donor.blocks[full] if donor.blocks and prompt % size else None, donor.ring)

    def _match(self, row: Row) -> list[int]:
        """Cached blocks of the row's start. While it waits they are wanted; if one was evicted, all are looked up anew."""
        prefix = self.cache.prefix
        if prefix is None or row.chain is None:
            return []
        if row.lost != prefix.adopted_evictions:
            self._unwant(row)
        most = (len(row.tokens) - 1) // self.cache.shape.block_tokens
        found = prefix.match(row.chain, row.tokens, most, row.matched)
        if len(found) > len(row.matched):
            prefix.want(found, row.seq)
            row.matched, row.lost = found, prefix.adopted_evictions
        return found

    def _unwant(self, row: Row) -> None:
        if row.matched and self.cache.prefix:
            self.cache.prefix.unwant(row.matched, row.seq)
        row.matched = []

    def _ring_holds(self, donor: Row, tokens: int) -> bool:
        """Whether what comes after the first `tokens` would still see all of its window in the donor's ring."""
        if not donor.ring:
            return True
        first = max(0, tokens - self.cache.shape.window + 1)
        return donor.computed <= first + len(donor.ring) * self.cache.shape.block_tokens

    # ------------------------------------------------------------------------------------------------ the plan carried out

    def apply(self, plan: StepPlan, offers: list[Offer], now: float) -> Work:
        """Preempt, admit, grow. References are taken first, so that no allocation evicts what another row is to share."""
        work = Work([(row, n) for row, n in zip(self.running, plan.take, strict=True) if n])
        for row in [self.running[i] for i in plan.preempt]:
            self._preempt(row, work)
        joining = [(offers[place], n) for place, n in plan.admit]
        if joining:
            self._count_passes(offers, [place for place, _ in plan.admit], work)
        for offer, _ in joining:
            self._join(offer, now, work)
        if plan.take:
            self._grow(work)
        for offer, n in joining:
            self._fill(offer.row, offer.adoption, work)
            work.rows.append((offer.row, n))
        for row, n in work.rows:
            if row.state is RowState.DECODING:
                work.decode_rows += 1
                work.context += row.computed + 1
            else:
                work.prompts += 1
                work.prefill += n
                work.recomputed += max(0, min(row.computed + n, row.high_water) - row.computed)
        return work

    def _preempt(self, row: Row, work: Work) -> None:
        """Back to its place in the queue with the tokens that it has, and with their KV if the swap pool has room for it."""
        need = Need(self.cache.shape.blocks(row.computed) if row.blocks else 0, len(row.ring))
        if self.swap and row.computed and self.swap.holds(need):
            row.swapped = self.swap.take(need)
            _pair(work.swap_out, FULL, row.blocks, row.swapped.full)
            _pair(work.swap_out, SLIDING, row.ring, row.swapped.ring)
            work.offloaded.append(row)
        else:
            work.reset += 1
            work.given_up += row.computed
            row.computed = 0
        self._leave(row)
        row.state = RowState.QUEUED
        row.credits = max(0, row.credits - 1)
        self.queue.push(row)

    def reset(self, row: Row) -> None:
        """What a waiting row has in the swap pool is of no use: it will be computed again."""
        if row.swapped and self.swap:
            self.swap.release(*row.swapped)
        row.swapped = None
        row.computed = 0

    def _leave(self, row: Row) -> None:
        """Out of the batch, letting go of all blocks."""
        del self.running[bisect_left(self.running, row.turn, key=_turn)]
        self.cache.release(row.blocks, row.ring)
        row.blocks, row.ring = [], []
        row.published = 0

    def _count_passes(self, offers: list[Offer], places: list[int], work: Work) -> None:
        """Who was looked at and did not join has been passed by those behind it who did."""
        waits = [place for place in range(len(offers)) if place not in places]
        for place in waits:
            offers[place].row.passed += sum(other > place for other in places)
        work.bypassed = sum(place > waits[0] for place in places) if waits else 0

    def _join(self, offer: Offer, now: float, work: Work) -> None:
        """Move a row from the queue into the batch, holding what it shares."""
        row, adoption, _ = offer
        self.queue.remove(row)
        self._unwant(row)
        if not row.admitted:
            row.turn = self._turns
            self._turns += 1
            work.admitted.append(row)
            work.promoted += row.lane - effective_lane(row, now)
        insort(self.running, row, key=_turn)
        row.state = RowState.DECODING if self._resumes(row) else RowState.PREFILLING
        row.passed = 0
        if row.swapped is None:
            row.blocks = list(adoption.shared)
            for block in row.blocks:
                self.cache.full.share(block)
            row.computed = adoption.tokens
            row.published = len(row.blocks)

    def _grow(self, work: Work) -> None:
        """The blocks that the next tokens of running rows need."""
        if self.cache.shape.full_per_chunk:
            size = self.cache.shape.block_tokens
            for row, _ in work.rows:
                if len(row.tokens) > len(row.blocks) * size:
                    row.blocks.append(self.cache.full.allocate())

    def _fill(self, row: Row, adoption: Adoption, work: Work) -> None:
        """All blocks of a row that has joined, and where what is in them comes from."""
        need = self.cache.shape.need(row.reach, row.final - 1)
        table = self.cache.take(Need(need.full - len(row.blocks), need.ring))
        row.blocks += table.full
        row.ring = table.ring
        if row.swapped and self.swap:
            _pair(work.swap_in, FULL, row.swapped.full, row.blocks)
            _pair(work.swap_in, SLIDING, row.swapped.ring, row.ring)
            self.swap.release(*row.swapped)
            row.swapped = None
            work.restored += row.computed
        if adoption.tail is not None:
            _pair(work.copies, FULL, [adoption.tail], row.blocks[len(adoption.shared) :])
        if adoption.ring:
            slots = self._slots_seen(adoption.tokens, len(row.ring))
            _pair(work.copies, SLIDING, [adoption.ring[i] for i in slots], [row.ring[i] for i in slots])

    def _slots_seen(self, tokens: int, ring: int) -> list[int]:
        """Blocks of a ring that hold what the token after the first `tokens` sees."""
        shape = self.cache.shape
        first = max(0, tokens - shape.window + 1) // shape.block_tokens
        return sorted({i % ring for i in range(first, shape.blocks(tokens))})

    def drop(self, row: Row) -> None:
        """Take a row out of the queue or the batch and free what it holds."""
        if row.behind:
            row.behind = False
            self.behind -= 1
            return
        if row.state is RowState.QUEUED:
            self.queue.remove(row)
            self._unwant(row)
            self.reset(row)
        else:
            self._leave(row)
        if following := next((other for other in row.siblings if other.behind), None):
            self._step_forward(following)

    def computed(self, row: Row, n: int) -> None:
        """`n` more tokens of the row are in its blocks: publish those that are full now. Equal content is held once."""
        row.computed += n
        row.high_water = max(row.high_water, row.computed)
        full = self.cache.full
        while row.chain and full.prefix and row.computed >= (row.published + 1) * self.cache.shape.block_tokens:
            own = row.blocks[row.published]
            block = full.prefix.publish(row.chain, row.tokens, row.blocks, row.published)
            if block is None:
                row.chain = None
                return
            if block != own:
                full.share(block)
                full.release([own])
                row.blocks[row.published] = block
            row.published += 1

    def over(self) -> bool:
        """Whether a lowered budget is still draining."""
        return self.cache.pool.limit < max(self.cache.pool.ceiling, self.cache.pool.resident)


def _pair(pairs: Pairs, kind: str, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Add (source, target) of as many blocks as there are of both."""
    if sources and targets:
        pairs.setdefault(kind, []).extend(zip(sources, targets, strict=False))
