"""The allocator for full attention: a row's block i holds its tokens i·block_tokens … in every layer; one block a chunk.

    usable = used (some row holds it) + cached (cold, findable by content) + free

Blocks that rows share are full and never written again; the tail that a row writes is its own. Cached blocks count as free
for every decision, since an allocation may take them: uninitialized blocks first while the cap allows, then cold ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir_server.kv.pool import ChunkPool
from weir_server.kv.prefix import PrefixCache


class BlockAllocator:
    """References to blocks. It obeys; whether a row *should* get a block is the policy's decision."""

    def __init__(self, pool: ChunkPool, prefix: PrefixCache, block_tokens: int) -> None:
        self.pool = pool
        self.prefix = prefix
        self.block_tokens = block_tokens
        self.used = 0
        self.refs: dict[int, int] = {}

    @property
    def cached(self) -> int:
        return self.prefix.cold

    @property
    def free(self) -> int:
        return self.pool.usable - self.used - self.cached

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def allocate(self) -> int:
        """A block that nobody else holds. Raises KeyError when the whole pool is held: a policy that let it come so far."""
        if self.pool.free and (self.pool.in_use < self.pool.limit or not self.cached):
            block = self.pool.take()
        else:
            block = self.prefix.evict()
        self.refs[block] = 1
        self.used += 1
        return block

    def share(self, block: int) -> None:
        """One more row holds this full block, which is held or cold."""
        count = self.refs.get(block, 0)
        if not count:
            self.prefix.warm(block)
            self.used += 1
        self.refs[block] = count + 1

    def release(self, blocks: Sequence[int]) -> None:
        """A row lets go of its table, or of the end of it. Owning nothing is fine."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            del self.refs[block]
            self.used -= 1
            if not self.prefix.cool(block):
                self.pool.give(block)

    def alone(self, blocks: Sequence[int]) -> int:
        """How many of these blocks would become free if their row let go of them."""
        return sum(self.refs[block] == 1 for block in blocks)

    def cold_of(self, blocks: Sequence[int]) -> int:
        """How many of these published blocks nobody holds: sharing them takes from what is free."""
        return sum(block not in self.refs for block in blocks)

    def trim(self) -> list[int]:
        """Bring what is cached and resident under the cap; returns chunks whose memory the runner should give back."""
        self.pool.settle(self.used)
        while self.pool.in_use > self.pool.limit and self.cached:
            self.pool.give(self.prefix.evict())
        return self.pool.trim()
