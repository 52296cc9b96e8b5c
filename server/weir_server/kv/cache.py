"""KV memory of one place: a pool of chunks and an allocator for each attention type over it.

The engine has one that rows compute in, and where KV is offloaded a second one, the swap pool: of the same geometry, without
a prefix cache. Here is counted what one pool comes to over its types; what a row gets is the policy's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weir_server.contract import FULL, SLIDING
from weir_server.kv.blocks import BlockAllocator
from weir_server.kv.pool import ChunkPool
from weir_server.kv.prefix import PrefixCache
from weir_server.kv.shape import Need, Room, Shape


class Table(NamedTuple):
    """The blocks of one row: of full attention in the order of its tokens, and its ring of sliding blocks."""

    full: list[int]
    ring: list[int]


class Cache:
    """`prefix`: computed blocks that are found again, or None. Sliding layers overwrite theirs, so with those there is none."""

    def __init__(self, num_chunks: int, chunk_bytes: int, shape: Shape, prefix: PrefixCache | None = None) -> None:
        self.shape = shape
        self.pool = ChunkPool(num_chunks, chunk_bytes)
        self.prefix = None if shape.ring_per_chunk else prefix
        self.full = BlockAllocator(self.pool, shape.full_per_chunk, self.prefix)
        self.ring = BlockAllocator(self.pool, shape.ring_per_chunk)

    @property
    def cached(self) -> int:
        """Chunks of cold prefixes: one block each."""
        return self.prefix.cold if self.prefix else 0

    @property
    def held(self) -> int:
        """Chunks of which rows hold a block."""
        return self.pool.in_use - self.cached

    @property
    def used_bytes(self) -> int:
        return self.held * self.pool.chunk_bytes

    @property
    def stranded_bytes(self) -> int:
        """Of free blocks in chunks that have used ones."""
        parts = ((a.loose, a.per_chunk) for a in (self.full, self.ring) if a.loose)
        return sum(loose * self.pool.chunk_bytes // per_chunk for loose, per_chunk in parts)

    @property
    def free_by_type(self) -> dict[str, int]:
        """Blocks that each attention type could get, if the other got none."""
        of = {FULL: (self.full, self.shape.full_per_chunk), SLIDING: (self.ring, self.shape.ring_per_chunk)}
        return {kind: self.pool.free * n + blocks.loose for kind, (blocks, n) in of.items() if n}

    def room(self, chunks: int) -> Room:
        """What rows may take if they may hold `chunks` in all."""
        return self.shape.room(chunks - self.held, self.full.loose, self.ring.loose)

    def freed_by(self, full: Sequence[int], ring: Sequence[int]) -> Room:
        """What there would be more if a row let go of these."""
        chunks, loose = self.full.freed_by(full)
        ring_chunks, ring_loose = self.ring.freed_by(ring) if ring else (0, 0)
        return self.shape.room(chunks + ring_chunks, loose, ring_loose)

    def holds(self, need: Need) -> bool:
        """Whether `need` fits what is free now."""
        return self.room(self.pool.usable).take(need).chunks >= 0

    def take(self, need: Need) -> Table:
        """All of it, or IndexError: ask `holds` first."""
        return Table([self.full.allocate() for _ in range(need.full)], [self.ring.allocate() for _ in range(need.ring)])

    def release(self, full: Sequence[int], ring: Sequence[int]) -> None:
        """Owning nothing is fine."""
        self.full.release(full)
        self.ring.release(ring)

    def trim(self) -> list[int]:
        """Bring what is cached and resident under the cap; returns chunks whose memory the runner should give back."""
        self.pool.settle(self.held)
        while self.prefix and self.prefix.cold and self.pool.in_use > self.pool.limit:
            self.pool.give(self.prefix.evict())
        return self.pool.trim()
