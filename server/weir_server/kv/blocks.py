"""The allocator of one attention type: which blocks rows hold, and how many rows hold each.

    blocks of its chunks = used (some row holds it) + cached (cold, findable by content) + loose (free, to this type alone)

A chunk belongs to one allocator at a time. A new block comes from the fullest chunk that has room, so that others empty; an
emptied chunk goes back to the pool; nothing is moved. Blocks that rows share are full and never written again; the tail that
a row writes is its own. Cached blocks count as free for every decision, since an allocation may take them: uninitialized
blocks first while the cap allows, then cold ones. Only models without sliding layers cache; they have one block a chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weir_server.kv.pool import ChunkPool
from weir_server.kv.prefix import PrefixCache


class BlockAllocator:
    """References to blocks: block b lies in chunk b // per_chunk. It obeys; whether a row *should* get one is policy."""

    def __init__(self, pool: ChunkPool, per_chunk: int = 1, prefix: PrefixCache | None = None) -> None:
        self.pool = pool
        self.per_chunk = per_chunk
        self.prefix = prefix
        self.refs: dict[int, int] = {}
        self.loose = 0
        self._free: dict[int, list[int]] = {}  # of each chunk that has used and free blocks, the free ones
        self._chunks: list[dict[int, None]] = [{} for _ in range(per_chunk)]  # those chunks by how many they have free

    @property
    def used(self) -> int:
        return len(self.refs)

    def allocate(self) -> int:
        """A block that nobody else holds. Raises IndexError when the whole pool is held: a policy that let it come so far."""
        pool, prefix = self.pool, self.prefix
        if prefix and prefix.cold and (not pool.free or pool.in_use >= pool.limit):
            block = prefix.evict()
        elif self.per_chunk == 1:
            block = pool.take()
        else:
            block = self._take()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more row holds this full block, which is held or cold."""
        count = self.refs.get(block, 0)
        if not count and self.prefix:
            self.prefix.warm(block)
        self.refs[block] = count + 1

    def release(self, blocks: Sequence[int]) -> None:
        """A row lets go of its table, or of the end of it."""
        prefix = self.prefix
        for block in prefix.cooling(blocks) if prefix else blocks:
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            del self.refs[block]
            if prefix and prefix.cool(block):
                continue
            if self.per_chunk == 1:
                self.pool.give(block)
            else:
                self._give(block)

    def cold_of(self, blocks: Sequence[int]) -> int:
        """How many of these published blocks nobody holds: sharing them takes from what is free."""
        return sum(block not in self.refs for block in blocks)

    def freed_by(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Chunks and loose blocks that there would be more without these; in an emptied chunk nothing is loose any more."""
        if self.per_chunk == 1:
            return sum(self.refs[block] == 1 for block in blocks), 0
        chunks = loose = 0
        for chunk, count in Counter(block // self.per_chunk for block in blocks if self.refs[block] == 1).items():
            free = len(self._free.get(chunk, ()))
            if count + free == self.per_chunk:
                chunks, loose = chunks + 1, loose - free
            else:
                loose += count
        return chunks, loose

    def _take(self) -> int:
        for chunks in self._chunks[1:]:
            if chunks:
                chunk, _ = chunks.popitem()
                free = self._free[chunk]
                break
        else:
            chunk = self.pool.take()
            free = self._free[chunk] = list(range((chunk + 1) * self.per_chunk - 1, chunk * self.per_chunk - 1, -1))
            self.loose += self.per_chunk
        self.loose -= 1
        block = free.pop()
        if free:
            self._chunks[len(free)][chunk] = None
        else:
            del self._free[chunk]
        return block

    def _give(self, block: int) -> None:
        chunk = block // self.per_chunk
        free = self._free.setdefault(chunk, [])
        if free:
            del self._chunks[len(free)][chunk]
        free.append(block)
        self.loose += 1
        if len(free) < self.per_chunk:
            self._chunks[len(free)][chunk] = None
        else:
            del self._free[chunk]
            self.loose -= self.per_chunk
            self.pool.give(chunk)

    def faults(self) -> list[str]:
        """What is wrong with the chunks that have used and free blocks."""
        n = self.per_chunk
        wrong = [f"free block {b} is held" for free in self._free.values() for b in free if b in self.refs]
        wrong += [f"chunk {c} has {len(f)} free blocks of {n}" for c, f in self._free.items() if not 0 < len(f) < n]
        if self.loose != sum(map(len, self._free.values())):
            wrong.append(f"{self.loose} loose blocks are counted")
        held = {block // n for block in self.refs} if n else set()
        return wrong + [f"chunk {c} is begun and nobody holds a block of it" for c in self._free if c not in held]
