"""Linear layers over the packed matrix products of gemm.c, through ctypes: float32, or 8-bit weights with float32 rows.

A row's result is the same bits whatever the number of rows and wherever it stands among them. Why not oneDNN's: see
docs/decisions/025. The weights' 8-bit values are the same at every row count too; they are not kept in float32 besides.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from weir_server.exec.library import load_library
from weir_server.exec.memory import Arena
from weir_server.exec.step import UnsupportedError
from weir_server.model.int8 import Int8Matrix, Matrix

ISA_NAMES = ("plain C", "AVX2", "AVX-512")


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """y [rows, out] = x [rows, in] · Wᵀ in float32. `weight`: packed, float32 or (`int8`) lines of 8 bits; may be mapped."""

    kind: NativeKind
    weight: torch.Tensor
    shape: tuple[int, ...]  # out, in
    int8: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError where x is not float32 [rows, in]: C would read past it."""
        if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"a float32 [rows, {self.shape[1]}] was expected, not {x.dtype} {list(x.shape)}")
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, (out, width) = x.shape[0], self.shape
        y = torch.empty(rows, out)
        multiply = self.kind.library.weir_gemm_q8 if self.int8 else self.kind.library.weir_gemm
        multiply(self.kind.isa, rows, out, width, x.data_ptr(), x.stride(0), self.weight.data_ptr(), y.data_ptr(), out)
        return y


class NativeKind:
    """How weights are packed and multiplied; called with a weight it gives its linear, as model.linear.Products does."""

    row_independent = keeps_int8 = True

    def __init__(self, isa: int | None = None) -> None:
        """`isa`: an index of ISA_NAMES, at most what the processor has (the default).

        Raises UnsupportedError where there is no compiled library, ValueError for an instruction set that is not here.
        """
        self.library = library = load_library()
        self.arena = Arena()
        if not hasattr(library, "weir_gemm"):
            raise UnsupportedError("the C kernels were built without matrix products")
        best = int(library.weir_gemm_isa())
        self.isa = best if isa is None else isa
        if not 0 <= self.isa <= best:
            raise ValueError(f"instruction set {isa} is not one of 0 … {best} ({ISA_NAMES[best]} is the best here)")
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        for size in (library.weir_gemm_bytes, library.weir_gemm_q8_bytes):
            size.argtypes, size.restype = [number, number], number
        library.weir_gemm_pack.argtypes, library.weir_gemm_pack.restype = [number, number, pointer, pointer], None
        for multiply in (library.weir_gemm, library.weir_gemm_q8):
            multiply.argtypes = [ctypes.c_int, number, number, number, pointer, number, pointer, pointer, number]
            multiply.restype = None

    def __call__(self, weight: Matrix) -> NativeLinear:
        """Pack `weight` [out, in]; the caller may let go of it afterwards. One of 8 bits is packed already: it is kept."""
        if isinstance(weight, Int8Matrix):
            if weight.lines.nbytes != self.library.weir_gemm_q8_bytes(*weight.shape) or not weight.lines.is_contiguous():
                raise ValueError(f"lines of {list(weight.lines.shape)} are not those of a matrix {list(weight.shape)}")
            return NativeLinear(self, weight.lines, weight.shape, int8=True)
        out, width = weight.shape
        weight = weight.detach().to(torch.float32).contiguous()
        packed = self.arena.empty(self.library.weir_gemm_bytes(out, width) // 4)
        self.library.weir_gemm_pack(out, width, weight.data_ptr(), packed.data_ptr())
        return NativeLinear(self, packed, (out, width), int8=False)

    def settle(self) -> None:
        self.arena.move()

    def __str__(self) -> str:
        return f"own on {ISA_NAMES[self.isa]}, independent of the row count"
