"""The `cpu` backend: forwards as programs (exec/program.py) that C runs, over our own products and kernels.

The library is an optional extension of the wheel: where no compiler was at hand it is absent, and `gather` serves.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import torch

from weir_server.contract import SLIDING
from weir_server.exec.gather import rotary_table
from weir_server.exec.library import Attention, load_library
from weir_server.exec.pool import KvPool
from weir_server.exec.program import Program, Tracer
from weir_server.exec.step import NO_STEP, Compiled, Step, UnsupportedError
from weir_server.model.config import DecoderConfig
from weir_server.model.decoder import Forward

_LANES = 16
_SCORES = 96 << 10
"""Floats of scores that may lie in a core's L2 cache, beside the keys and values on their way."""
_TILES_EACH = 2
"""Or a thread with a long row keeps the others waiting."""


class CpuBackend:
    name = "cpu"
    page_multiple = _LANES

    def __init__(self, *, config: DecoderConfig, pool: KvPool) -> None:
        """Raises UnsupportedError."""
        c = config
        for what, size in (("head_dim", c.head_dim), ("hidden", c.hidden), ("ffn", c.ffn), ("page size", pool.page_size)):
            if size % _LANES:
                raise UnsupportedError(f"the C kernels need a {what} that is a multiple of {_LANES}, not {size}")
        self.config, self.pool, self.library = config, pool, load_library()
        self.rotary = {kind: rotary_table(config, kind) for kind in config.layers_of}
        kinds = list(config.layers_of)
        self.layers = [(kinds.index(kind), pool.page * ordinal) for kind, ordinal in config.ordinals]
        self.queries, self.most_heads = int(self.library.weir_max_queries()), int(self.library.weir_most_heads())
        self.tile = max(1, self.queries // (c.heads // c.kv_heads))
        self.scratch = torch.empty(0)

    def compile(self, forward: Forward, width: int) -> Compiled:
        """Raises UnsupportedError where products are not ours."""
        program = Program(self.library, Tracer(self.config, self.layers), forward, width)
        return lambda x, step=NO_STEP: self._run(program, x, step)

    def _run(self, program: Program, x: torch.Tensor, step: Step) -> torch.Tensor:
        if step is NO_STEP:
            return program(x, step.picked)
        row_of = np.repeat(np.arange(len(step.starts) - 1, dtype=np.int32), np.diff(step.starts))
        tables = {kind: self.pool.offsets(kind, table) for kind, table in step.tables.items()}
        tiles = _tiles(step.starts, self.tile)
        scratch = self._scratch_for(len(tiles), step.longest)
        kinds = (Attention * len(tables))(*(self._attention(kind, step, row_of, tables[kind], scratch) for kind in tables))
        return program(
            x, step.picked, int(step.positions.sum(dtype=np.int64)), attention=ctypes.addressof(kinds),
            tiles=tiles.ctypes.data, n_tiles=len(tiles),
        )  # fmt: skip

    def _scratch_for(self, tiles: int, longest: int) -> tuple[int, int, int]:
        """KV heads that a tile takes at once, floats of a query's scores, and the address of room for them; it only grows.

        Heads of a page lie side by side and are read fastest in one go (decision 151): as many as leave each thread several
        tiles, and their scores in its L2 cache.
        """
        threads, queries = torch.get_num_threads(), self.queries
        stride = -(-longest // 256) * 256
        fit = _SCORES // (queries * stride) if tiles >= _TILES_EACH * threads else 1
        together = max(1, min(fit, self.config.kv_heads, self.most_heads))
        if self.scratch.numel() < together * queries * stride * threads:
            self.scratch = torch.empty(together * queries * stride * threads)
        return together, stride, self.scratch.data_ptr()

    def _attention(
        self, kind: str, step: Step, row_of: np.ndarray, tables: np.ndarray, scratch: tuple[int, int, int]
    ) -> Attention:
        """The kernel's arguments for layers of a type, but for what differs between those. The arrays must outlive it."""
        c, pool = self.config, self.pool
        cos, sin = self.rotary[kind]
        window = (c.window or 0) if kind == SLIDING else 0
        return Attention(
            pool.flat.data_ptr(), pool.half, int(pool.flat.dtype is torch.bfloat16),
            c.heads, c.kv_heads, c.head_dim, pool.page_size, window, tables.shape[1],
            c.attention_scale, c.rms_eps, step.positions.ctypes.data, row_of.ctypes.data, tables.ctypes.data,
            cos.data_ptr(), sin.data_ptr(), None, None, *scratch,
        )  # fmt: skip


def _tiles(starts: np.ndarray, most: int) -> np.ndarray:
    """Cut each row's tokens into runs of at most `most`: int32 [tiles, 2] of (first token, count)."""
    runs = [(t, min(most, end - t)) for begin, end in pairwise(starts) for t in range(begin, end, most)]
    return np.array(runs, np.int32)
