"""The pool: all KV memory, in chunks, and the live cap on how much of it may be in use.

    chunk   0   1 | 2 … num_chunks-1
           padding | usable: given to one allocator at a time

The two padding chunks absorb the reads and writes of padded rows and are never given out. The cap (the KV budget) is in
bytes outside and in whole chunks, rounded down, here. Lowering it takes nothing from anybody: `limit` falls at once and
stops admissions, `ceiling` (up to where running rows may grow) follows when what is held has fallen to it.
"""

from __future__ import annotations

from collections import deque

RESERVED_CHUNKS = 2


def usable_chunks(num_chunks: int) -> int:
    """Chunks that requests can really get, of a pool of `num_chunks`. The only place that knows of the reserved ones."""
    return max(0, num_chunks - RESERVED_CHUNKS)


class ChunkPool:
    """A stack of free chunks. Touched ones (whose memory is resident) lie on top, so memory is reused before it grows."""

    def __init__(self, num_chunks: int, chunk_bytes: int) -> None:
        """Raises ValueError for a pool without a usable chunk."""
        self.usable = usable_chunks(num_chunks)
        if self.usable < 1:
            raise ValueError(f"a pool of {num_chunks} chunks has none to give")
        self.chunk_bytes = chunk_bytes
        self.limit = self.ceiling = self.usable
        self._free = deque(range(num_chunks - 1, RESERVED_CHUNKS - 1, -1))
        self._touched: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.usable - len(self._free)

    @property
    def resident(self) -> int:
        """Chunks whose memory may be backed by pages: in use, or free and not yet given back."""
        return len(self._touched)

    def take(self) -> int:
        """A free chunk. Raises IndexError if there is none; keeping below the limit is the caller's business."""
        chunk = self._free.pop()
        self._touched.add(chunk)
        return chunk

    def give(self, chunk: int) -> None:
        self._free.append(chunk)

    def set_budget(self, budget: int | None, held: int) -> None:
        """Cap the pool at `budget` bytes (None = no cap) while `held` chunks belong to rows."""
        self.limit = self.usable if budget is None else min(self.usable, budget // self.chunk_bytes)
        self.ceiling = max(self.ceiling, self.limit)
        self.settle(held)

    def settle(self, held: int) -> None:
        """Let the ceiling follow a lowered limit once the rows' own chunks fit under it."""
        if held <= self.limit:
            self.ceiling = self.limit

    def trim(self) -> list[int]:
        """Free chunks whose memory goes back to the system, so that no more than `limit` stays resident."""
        released = []
        while len(self._touched) > self.limit and self._free and self._free[-1] in self._touched:
            chunk = self._free.pop()
            self._touched.discard(chunk)
            self._free.appendleft(chunk)
            released.append(chunk)
        return released
