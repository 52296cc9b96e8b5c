"""The KV pool: one anonymous mapping, cut into chunks.

    chunk      a multiple of 4 KiB; belongs to one attention type at a time; pages of all layers and types are alike
    ├─ block   of a type: one page for each of its layers, in their order
    │  ├─ page ─┬─ K: [kv head][head_dim][token]   keys lie across, so that 16 of them fill a vector
    │  │        └─ V: [kv head][token][head_dim]
    │  └─ page …
    └─ block …

A chunk has as many pages as make whole blocks of every type: the least common multiple of the types' numbers of layers. With
one type that is one block. Block b of a type with n blocks a chunk is the (b mod n)-th of chunk b // n.

Chunks 0 and 1 are reserved: padding reads from 0 and writes to 1, and no row ever owns them. The mapping costs memory only
where it is written; `release` gives pages back to the system, and they read as zeros afterwards.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weir_server.contract import Geometry
from weir_server.exec.memory import anonymous
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.model.config import DecoderConfig

_PAGE = 4096


def geometry(config: DecoderConfig, page_size: int, dtype: torch.dtype = torch.float32) -> Geometry:
    """The pool's units for pages of `page_size` tokens: chunk bytes are rounded up to whole pages of memory."""
    pages = math.lcm(*config.layers_of.values())
    raw = pages * 2 * page_size * config.kv_heads * config.head_dim * dtype.itemsize
    return Geometry(
        -(-raw // _PAGE) * _PAGE, page_size, {kind: pages // layers for kind, layers in config.layers_of.items()}
    )


class KvPool:
    """`num_chunks` chunks, the reserved ones included, of numbers of `dtype`: float32, or bfloat16 (half of all, see 153)."""

    def __init__(
        self, config: DecoderConfig, page_size: int, num_chunks: int, dtype: torch.dtype = torch.float32
    ) -> None:
        if num_chunks <= RESERVED_CHUNKS:
            raise ValueError(f"a pool of {num_chunks} chunks has none for rows: {RESERVED_CHUNKS} are reserved")
        self.geometry = geometry(config, page_size, dtype)
        self.page_size, self.num_chunks = page_size, num_chunks
        self._memory = anonymous(self.geometry.chunk_bytes * num_chunks)
        self.flat = torch.frombuffer(self._memory, dtype=dtype)
        self.half = config.kv_heads * config.head_dim * page_size  # numbers of K or V of a page
        self.page = 2 * self.half
        self._layers = config.layers_of
        self.chunk = self.geometry.chunk_bytes // dtype.itemsize
        self._blocks = {
            kind: self.flat.as_strided((num_chunks, n, numbers), (self.chunk, numbers, 1))
            for kind, n in self.geometry.blocks_per_chunk.items()
            for numbers in [self._layers[kind] * self.page]
        }

    def offsets(self, kind: str, blocks: np.ndarray) -> np.ndarray:
        """Where blocks of a type begin, in numbers from the pool's start: int64, of the shape of `blocks`. A layer's page lies
        `page` · (its ordinal among the type's layers) further."""
        n = self.geometry.blocks_per_chunk[kind]
        if n == 1:
            return np.multiply(blocks, self.chunk, dtype=np.int64)
        return blocks // n * np.int64(self.chunk) + blocks % n * np.int64(self._layers[kind] * self.page)

    def block(self, kind: str, number: int) -> torch.Tensor:
        """A block's memory, [layers · page]: a view."""
        n = self.geometry.blocks_per_chunk[kind]
        return self._blocks[kind][number // n, number % n]

    def copy(self, pairs: Sequence[tuple[int, int]], kind: str) -> None:
        """Copy block src to block dst of a type, for each (src, dst) in order."""
        self.fetch(self, {kind: pairs})

    def fetch(self, source: KvPool, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Copy block src of a pool of the same geometry to our block dst, for each (src, dst) of each type in order.

        Blocks are large: a loop of plain copies runs at the speed of memory and needs no room of its own.
        """
        for kind, of_kind in pairs.items():
            for src, dst in of_kind:
                self.block(kind, dst).copy_(source.block(kind, src))

    def release(self, chunks: Sequence[int]) -> None:
        """Give the memory of chunks back to the system."""
        size = self.geometry.chunk_bytes
        for chunk in chunks:
            self._memory.madvise(mmap.MADV_DONTNEED, chunk * size, size)
