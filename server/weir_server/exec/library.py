"""The compiled C library, an optional extension of the wheel, and the structures that C and Python agree on."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from weir_server.exec.step import UnsupportedError

_LEVELS = {"AVX2": 1, "AVX512": 2}
"""torch's word for what it uses (ATEN_CPU_CAPABILITY lowers it) → the kernels' instruction set; others get the baseline."""


class Attention(ctypes.Structure):
    """`Attention` of kernels.h."""

    _fields_ = [
        ("pool", ctypes.c_void_p), ("half", ctypes.c_int64), ("bf16", ctypes.c_int),
        ("heads", ctypes.c_int), ("kv_heads", ctypes.c_int), ("dim", ctypes.c_int), ("page", ctypes.c_int),
        ("window", ctypes.c_int), ("table_width", ctypes.c_int), ("scale", ctypes.c_float), ("eps", ctypes.c_float),
        ("positions", ctypes.c_void_p), ("row_of", ctypes.c_void_p), ("tables", ctypes.c_void_p),
        ("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
        ("together", ctypes.c_int), ("scores_stride", ctypes.c_int64), ("scratch", ctypes.c_void_p),
    ]  # fmt: skip


class Op(ctypes.Structure):
    """`Op` of program.c."""

    _fields_ = [
        ("code", ctypes.c_int32), ("picked", ctypes.c_int32), ("in", ctypes.c_int32), ("with", ctypes.c_int32),
        ("out", ctypes.c_int32), ("choice", ctypes.c_int32), ("isa", ctypes.c_int32), ("number", ctypes.c_float),
        ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p), ("offset", ctypes.c_int64),
    ]  # fmt: skip


class Run(ctypes.Structure):
    """`Run` of program.c."""

    _fields_ = [
        ("ops", ctypes.c_void_p), ("n_ops", ctypes.c_int64), ("rows", ctypes.c_int64 * 2), ("buffers", ctypes.c_void_p),
        ("picked", ctypes.c_void_p), ("attention", ctypes.c_void_p), ("tiles", ctypes.c_void_p), ("n_tiles", ctypes.c_int64),
        ("work", ctypes.c_int64),
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
    ours = sum(ctypes.sizeof(struct) for struct in (Run, Op, Attention))
    if not hasattr(library, "weir_run_bytes") or library.weir_run_bytes() != ours:
        raise UnsupportedError("the C kernels were built from other sources: build them again")
    library.weir_run.argtypes, library.weir_run.restype = [ctypes.c_void_p], None
    library.weir_select(_LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0))
    return library
