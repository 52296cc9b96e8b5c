"""The invariants of scheduler and cache, checked on the live engine every so many steps; their numbers are the metric's labels.

Violations are counted and logged, never raised: a fault in the books of one row must not take the others down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weir_server.engine.batch import Batch
from weir_server.policy.step import State, StepPlan


def violations(batch: Batch, state: State, plan: StepPlan) -> Iterator[tuple[str, str]]:
    """(invariant, what is wrong) of a batch after a step that `plan` described."""
    blocks, rows = batch.blocks, [*batch.running, *batch.waiting]
    held = Counter(block for row in rows for block in row.blocks)
    if held != Counter(blocks.refs):
        yield "I1", f"rows hold {sum(held.values())} references, the allocator counts {sum(blocks.refs.values())}"
    if blocks.used != len(held) or blocks.used + blocks.cached + blocks.pool.free != blocks.pool.usable:
        yield "I2", f"{blocks.used} used + {blocks.cached} cached + {blocks.pool.free} free != {blocks.pool.usable}"
    for row in batch.running:
        writable = row.blocks[row.computed // blocks.block_tokens :]
        if any(held[block] > 1 for block in writable):
            yield "I3", f"a block that row {row.choice} of request {row.id} writes is in two tables"
        if row.published * blocks.block_tokens > row.computed:
            yield "I5", f"request {row.id} published {row.published} blocks with {row.computed} tokens computed"
    for fault in blocks.prefix.faults():
        yield "I4", fault
    fed = sum(plan.take) + sum(plan.admit)
    if fed > state.limits.tokens or (plan.admit and len(state.running) + len(plan.admit) > state.rows):
        yield "I6", f"{fed} tokens in a step of {state.limits.tokens}, {len(plan.admit)} rows admitted"
    if plan.empty and (state.running or state.queued):
        yield "I7", f"{len(state.running)} rows run and {state.queued} wait, and the step is empty"
    if not rows and blocks.used:
        yield "I9", f"nothing runs and {blocks.used} blocks are used"
