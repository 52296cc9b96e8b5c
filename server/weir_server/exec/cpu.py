"""The `cpu` backend: the C kernels of kernels.c through ctypes, one call for each operation of a layer.

The library is an optional extension of the wheel: where no compiler was at hand it is absent, and `gather` serves.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from weir_server.contract import SLIDING
from weir_server.exec.gather import rotary_table
from weir_server.exec.pool import KvPool
from weir_server.exec.step import Step, UnsupportedError
from weir_server.model.config import DecoderConfig

_LANES = 16

_LEVELS = {"AVX2": 1, "AVX512": 2}
"""torch's word for what it uses (ATEN_CPU_CAPABILITY lowers it) → the kernels' instruction set; others get the baseline."""


class _Attention(ctypes.Structure):
    """`Attention` of kernels.c."""

    _fields_ = [
        ("pool", ctypes.c_void_p), ("half", ctypes.c_int64),
        ("heads", ctypes.c_int), ("kv_heads", ctypes.c_int), ("dim", ctypes.c_int), ("page", ctypes.c_int),
        ("window", ctypes.c_int), ("table_width", ctypes.c_int), ("scale", ctypes.c_float), ("eps", ctypes.c_float),
        ("positions", ctypes.c_void_p), ("row_of", ctypes.c_void_p), ("tables", ctypes.c_void_p),
        ("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64), ("scratch", ctypes.c_void_p),
    ]  # fmt: skip


def load_library() -> ctypes.CDLL:
    """The compiled kernels. Raises UnsupportedError where there are none, or where torch brings no OpenMP that they can use."""
    found = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not found:
        raise UnsupportedError("the C kernels were not built")
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as e:
        raise UnsupportedError(f"the C kernels do not load: {e}") from None
    if not hasattr(library, "weir_attention_bytes") or library.weir_attention_bytes() != ctypes.sizeof(_Attention):
        raise UnsupportedError("the C kernels were built from other sources: build them again")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.weir_add_rms_norm.argtypes = [pointer, pointer, pointer, pointer, number, number, ctypes.c_float]
    library.weir_gated.argtypes = [pointer, pointer, number, number, number]
    library.weir_attention.argtypes = [pointer, pointer, pointer, number, pointer, number, ctypes.c_int64]
    library.weir_select(_LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0))
    for name in ("weir_add_rms_norm", "weir_gated", "weir_attention"):
        getattr(library, name).restype = None
    return library


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
        page = pool.flat.data_ptr(), 4 * pool.page_floats
        self.layers = [(kind, page[0] + page[1] * ordinal) for kind, ordinal in config.ordinals]
        self.gelu = int(config.traits.activation == "gelu_tanh")
        self.queries = int(self.library.weir_max_queries())
        self.scratch = torch.empty(0)

    def bind(self, step: Step) -> CpuOps:
        return CpuOps(self, step)

    def scratch_for(self, longest: int) -> tuple[int, int]:
        """Address of room for the scores of one tile for each thread, and its floats a thread; it only grows."""
        stride = self.queries * -(-longest // 256) * 256
        if self.scratch.numel() < stride * torch.get_num_threads():
            self.scratch = torch.empty(stride * torch.get_num_threads())
        return self.scratch.data_ptr(), stride


class CpuOps:
    """See model.decoder.Ops."""

    def __init__(self, backend: CpuBackend, step: Step) -> None:
        c = backend.config
        self.backend, self.library, self.config, self.step = backend, backend.library, c, step
        self.row_of = np.repeat(np.arange(len(step.starts) - 1, dtype=np.int32), np.diff(step.starts))
        self.tiles = _tiles(step.starts, max(1, backend.queries // (c.heads // c.kv_heads)))
        self.scratch = backend.scratch_for(step.longest)
        self.kinds = {kind: self._attention_of(kind) for kind in step.tables}

    def _attention_of(self, kind: str) -> tuple[_Attention, np.ndarray, int]:
        """The kernel's arguments for layers of a type but for what differs between those, its tables (to be kept alive), and
        the multiply-adds of a layer."""
        c, step, backend = self.config, self.step, self.backend
        window = (c.window or 0) if kind == SLIDING else 0
        tables = backend.pool.offsets(kind, step.tables[kind])
        seen = step.positions + 1 if not window else np.minimum(step.positions + 1, window)
        cos, sin = backend.rotary[kind]
        scratch, stride = self.scratch
        args = _Attention(
            0, backend.pool.half_floats, c.heads, c.kv_heads, c.head_dim, backend.pool.page_size, window, tables.shape[1],
            c.attention_scale, c.rms_eps, step.positions.ctypes.data, self.row_of.ctypes.data, tables.ctypes.data,
            cos.data_ptr(), sin.data_ptr(), None, None, stride, scratch,
        )  # fmt: skip
        return args, tables, int(seen.sum(dtype=np.int64)) * c.heads * c.head_dim * 2

    def add_rms_norm(self, *, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(residual)
        self.library.weir_add_rms_norm(
            None if x is None else x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), *residual.shape,
            self.config.rms_eps,
        )  # fmt: skip
        return out

    def gated(self, *, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(gate_up), self.config.ffn)
        self.library.weir_gated(gate_up.data_ptr(), out.data_ptr(), *out.shape, self.backend.gelu)
        return out

    def attention(
        self, *, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty(len(qkv), self.config.heads * self.config.head_dim)
        kind, pool = self.backend.layers[layer]
        args, _, work = self.kinds[kind]
        args.pool = pool
        args.q_norm, args.k_norm = (None if w is None else w.data_ptr() for w in (q_norm, k_norm))
        self.library.weir_attention(
            ctypes.byref(args), qkv.data_ptr(), out.data_ptr(), len(qkv), self.tiles.ctypes.data, len(self.tiles), work
        )
        return out


def _tiles(starts: np.ndarray, most: int) -> np.ndarray:
    """Cut each row's tokens into runs of at most `most`: int32 [tiles, 2] of (first token, count)."""
    runs = [(t, min(most, end - t)) for begin, end in pairwise(starts) for t in range(begin, end, most)]
    return np.array(runs, np.int32)
