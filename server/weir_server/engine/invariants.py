"""The invariants of scheduler and cache, checked on the live engine every so many steps; their numbers are the metric's labels.

Violations are counted and logged, never raised: a fault in the books of one row must not take the others down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weir_server.engine.batch import Batch
from weir_server.engine.rows import Row
from weir_server.kv.blocks import BlockAllocator
from weir_server.kv.cache import Cache
from weir_server.policy.state import State, StepPlan


def violations(batch: Batch, state: State, plan: StepPlan) -> Iterator[tuple[str, str]]:
    """(invariant, what is wrong) of a batch after a step that `plan` described."""
    cache, swap = batch.cache, batch.swap
    yield from _held("full", cache.full, Counter(block for row in batch.running for block in row.blocks))
    yield from _held("ring", cache.ring, Counter(block for row in batch.running for block in row.ring))
    yield from _chunks("pool", cache)
    if swap:
        tables = [row.swapped for row in batch.queue if row.swapped]
        yield from _held("swapped full", swap.full, Counter(block for table in tables for block in table.full))
        yield from _held("swapped ring", swap.ring, Counter(block for table in tables for block in table.ring))
        yield from _chunks("swap pool", swap)
    for row in batch.running:
        yield from _row(row, cache)
    for row in batch.queue:
        if row.blocks or row.ring or (row.computed and not row.swapped):
            yield "I1", f"row {row.choice} of request {row.id} waits and holds {len(row.blocks) + len(row.ring)} blocks"
    for fault in cache.prefix.faults() if cache.prefix else ():
        yield "I4", fault
    fed = sum(plan.take) + sum(tokens for _, tokens in plan.admit)
    if fed > state.limits.tokens or (plan.admit and len(state.running) + len(plan.admit) - len(plan.preempt) > state.rows):
        yield "I6", f"{fed} tokens in a step of {state.limits.tokens}, {len(plan.admit)} rows admitted"
    if plan.empty and (state.running or state.queued):
        yield "I7", f"{len(state.running)} rows run and {state.queued} wait, and the step is empty"
    if not batch.running and cache.held:
        yield "I9", f"nothing runs and {cache.held} chunks are held"
    if swap and not batch.queue and swap.held:
        yield "I9", f"nothing waits and {swap.held} chunks of the swap pool are held"


def _held(what: str, blocks: BlockAllocator, held: Counter[int]) -> Iterator[tuple[str, str]]:
    if held != Counter(blocks.refs):
        yield "I1", f"{what}: rows hold {held.total()} references, the allocator counts {sum(blocks.refs.values())}"
    for fault in blocks.faults():
        yield "I2", f"{what}: {fault}"


def _chunks(what: str, cache: Cache) -> Iterator[tuple[str, str]]:
    """Every chunk is free, cached, or held by one type."""
    chunks = [{block // a.per_chunk for block in a.refs} for a in (cache.full, cache.ring)]
    held = len(chunks[0] | chunks[1])
    if held + cache.cached + cache.pool.free != cache.pool.usable or chunks[0] & chunks[1]:
        yield "I2", f"{what}: {held} held + {cache.cached} cached + {cache.pool.free} free of {cache.pool.usable}"


def _row(row: Row, cache: Cache) -> Iterator[tuple[str, str]]:
    size = cache.shape.block_tokens
    shared = [b for b in row.blocks[row.computed // size :] if cache.full.refs.get(b, 0) > 1]
    if shared or any(cache.ring.refs.get(b, 0) > 1 for b in row.ring):
        yield "I3", f"a block that row {row.choice} of request {row.id} writes is in two tables"
    if row.published * size > row.computed:
        yield "I5", f"request {row.id} published {row.published} blocks with {row.computed} tokens computed"
