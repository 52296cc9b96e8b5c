"""The geometry of KV memory as arithmetic: how many blocks a row needs, and whether they fit. Pure integers.

    chunk of the pool          given to full attention   [ block | block | block | block | block ]
    (lcm of the layer counts,  given to sliding layers   [                 block                 ]
     here 1 full, 5 sliding)                               a page for each layer of the type

A row has as many full-attention blocks as its tokens fill, and one ring of sliding blocks: the window and the most tokens that
one step may write before they are attended to. A model of one type has one block a chunk, and all of this is counting to one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from weir_server.contract import FULL, SLIDING, Geometry


class Need(NamedTuple):
    """Blocks that a row asks for."""

    full: int
    ring: int = 0


class Room(NamedTuple):
    """What may be allocated: free chunks, and the free blocks of chunks already begun, which are free to their type alone."""

    chunks: int
    full: int = 0
    ring: int = 0
    full_per_chunk: int = 1
    ring_per_chunk: int = 0

    @property
    def blocks(self) -> int:
        """Full-attention blocks, if nothing else is asked of the chunks."""
        return self.chunks * self.full_per_chunk + self.full

    def take(self, need: Need) -> Room:
        """What is left: less than no chunks if `need` does not fit. Begun chunks go first."""
        chunks, full, ring = self.chunks, self.full - need.full, self.ring - need.ring
        if full < 0:
            begun = -(full // self.full_per_chunk)
            chunks, full = chunks - begun, full + begun * self.full_per_chunk
        if ring < 0:
            begun = -(ring // self.ring_per_chunk)
            chunks, ring = chunks - begun, ring + begun * self.ring_per_chunk
        return Room(chunks, full, ring, self.full_per_chunk, self.ring_per_chunk)

    def give(self, freed: Room) -> Room:
        """With what a row would free. Rows that empty a chunk only together free more than the sum, never less."""
        return Room(
            self.chunks + freed.chunks, self.full + freed.full, self.ring + freed.ring, self.full_per_chunk, self.ring_per_chunk
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """`*_per_chunk`: blocks of a type that fill a chunk, 0 where the model has no such layers.

    `window`: tokens that a sliding layer sees, its own included. `piece`: most tokens that a row is fed in one step.
    """

    block_tokens: int
    full_per_chunk: int = 1
    ring_per_chunk: int = 0
    window: int = 0
    piece: int = 0

    @classmethod
    def of(cls, geometry: Geometry, window: int | None, piece: int) -> Shape:
        types = geometry.blocks_per_chunk
        return cls(geometry.block_tokens, types.get(FULL, 0), types.get(SLIDING, 0), window or 0, piece)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def need(self, tokens: int, final: int) -> Need:
        """Blocks of a row with `tokens` computed that may come to have `final`: its ring is whole from the start."""
        full = self.blocks(tokens) if self.full_per_chunk else 0
        return Need(full, self.blocks(min(self.window + self.piece, final)) if self.ring_per_chunk else 0)

    def room(self, chunks: int, full: int = 0, ring: int = 0) -> Room:
        return Room(chunks, full, ring, self.full_per_chunk, self.ring_per_chunk)

    def chunks(self, need: Need) -> int:
        """Chunks that hold `need` and nothing else."""
        return -self.room(0).take(need).chunks

    def whole_chunks(self, blocks: int) -> int:
        """Chunks that hold so many blocks of each type: `block_tokens` tokens each in every layer of the model."""
        return self.chunks(Need(blocks if self.full_per_chunk else 0, blocks if self.ring_per_chunk else 0))

    def worst_chunks(self, tokens: int) -> int:
        """Chunks with which a row comes to `tokens`, wherever its blocks lay beside those of rows that have left.

        Full blocks need no more than they fill: while one of their chunks has room, they take no other. A ring is allocated
        whole, so that of a hybrid each block may lie in a chunk of its own.
        """
        full, ring = self.need(tokens, tokens)
        return self.chunks(Need(full)) + (ring if full else self.chunks(Need(0, ring)))

    def servable(self, chunks: int, context: int) -> int:
        """Tokens of the longest row, up to `context`, that a pool of so many usable chunks always brings to its end."""
        return bisect_right(range(context + 1), chunks, key=self.worst_chunks) - 1
