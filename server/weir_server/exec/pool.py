"""The KV pool: one anonymous mapping, cut into chunks.

    chunk (= one block: `page_size` tokens in every layer; a multiple of 4 KiB)
    ├─ layer 0 ─┬─ K: [kv head][head_dim][token]   keys lie across, so that 16 of them fill a vector
    │           └─ V: [kv head][token][head_dim]
    ├─ layer 1 …

Chunks 0 and 1 are reserved: padding reads from 0 and writes to 1, and no row ever owns them. The mapping costs memory only
where it is written; `release` gives pages back to the system, and they read as zeros afterwards.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.model.config import DecoderConfig

_PAGE = 4096
_FLOAT = 4


def chunk_bytes(config: DecoderConfig, page_size: int) -> int:
    """Bytes of `page_size` tokens' K and V in all layers, rounded up to whole memory pages."""
    raw = config.layers * 2 * page_size * config.kv_heads * config.head_dim * _FLOAT
    return -(-raw // _PAGE) * _PAGE


class KvPool:
    """`num_chunks` chunks, the reserved ones included. `keys`, `values`: float32 views of the whole pool."""

    def __init__(self, config: DecoderConfig, page_size: int, num_chunks: int) -> None:
        if num_chunks <= RESERVED_CHUNKS:
            raise ValueError(f"a pool of {num_chunks} chunks has none for rows: {RESERVED_CHUNKS} are reserved")
        self.page_size, self.num_chunks = page_size, num_chunks
        self.chunk_bytes = chunk_bytes(config, page_size)
        self._memory = mmap.mmap(-1, self.chunk_bytes * num_chunks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(self._memory, dtype=torch.float32)
        heads, dim = config.kv_heads, config.head_dim
        self.chunk_floats = self.chunk_bytes // _FLOAT
        self.half_floats = heads * dim * page_size  # K or V of one layer
        outer, sizes = (self.chunk_floats, 2 * self.half_floats, dim * page_size), (num_chunks, config.layers, heads)
        self.keys = flat.as_strided((*sizes, dim, page_size), (*outer, page_size, 1))
        self.values = flat.as_strided((*sizes, page_size, dim), (*outer, dim, 1), self.half_floats)
        self._chunks = flat.view(num_chunks, self.chunk_floats)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy chunk src to chunk dst, for each (src, dst) in order."""
        for src, dst in pairs:
            self._chunks[dst].copy_(self._chunks[src])

    def release(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._memory.madvise(mmap.MADV_DONTNEED, chunk * self.chunk_bytes, self.chunk_bytes)
