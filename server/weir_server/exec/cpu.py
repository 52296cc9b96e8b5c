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
        self.tile = max(1, int(self.library.weir_max_queries()) // (c.heads // c.kv_heads))
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
        tiles, scratch = _tiles(step.starts, self.tile), self._scratch_for(step.longest)
        kinds = (Attention * len(tables))(*(self._attention(kind, step, row_of, tables[kind], scratch) for kind in tables))
        return program(
            x, step.picked, int(step.positions.sum(dtype=np.int64)), attention=ctypes.addressof(kinds),
            tiles=tiles.ctypes.data, n_tiles=len(tiles),
        )  # fmt: skip

    def _scratch_for(self, longest: int) -> tuple[int, int]:
        """Floats for each thread, and the address, of room for the scores of one tile; it only grows."""
        stride = int(self.library.weir_max_queries()) * -(-longest // 256) * 256
        if self.scratch.numel() < stride * torch.get_num_threads():
            self.scratch = torch.empty(stride * torch.get_num_threads())
        return stride, self.scratch.data_ptr()

    def _attention(
        self, kind: str, step: Step, row_of: np.ndarray, tables: np.ndarray, scratch: tuple[int, int]
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
