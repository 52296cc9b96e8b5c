"""Linear layers over the packed matrix products of gemm.c, through ctypes: float32, or 8-bit weights with float32 rows.

A row's result is the same bits whatever the number of rows and wherever it stands among them. Why not oneDNN's: see
docs/decisions/025. The weights' 8-bit values are the same at every row count too; they are not kept in float32 besides.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch

from weir_server.exec.library import load_library
from weir_server.exec.step import UnsupportedError

Weights = Literal["float32", "int8"]
ISA_NAMES = ("plain C", "AVX2", "AVX-512")

_NAMES = {"float32": "weir_gemm", "int8": "weir_gemm_q8"}


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """y [rows, out] = x [rows, in] · Wᵀ in float32, `weight` packed by NativeKind."""

    kind: NativeKind
    weight: torch.Tensor  # uint8
    shape: tuple[int, int]  # out, in

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError where x is not float32 [rows, in]: C would read past it."""
        if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"a float32 [rows, {self.shape[1]}] was expected, not {x.dtype} {list(x.shape)}")
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, (out, width) = x.shape[0], self.shape
        y = torch.empty(rows, out)
        self.kind.multiply(
            self.kind.isa, rows, out, width, x.data_ptr(), x.stride(0), self.weight.data_ptr(), y.data_ptr(), out
        )  # fmt: skip
        return y


class NativeKind:
    """How weights are packed and multiplied; called with a weight it gives its linear, as model.linear.LinearKind does."""

    row_independent = True

    def __init__(self, weights: Weights = "float32", isa: int | None = None) -> None:
        """`isa`: an index of ISA_NAMES, at most what the processor has (the default).

        Raises UnsupportedError where there is no compiled library, ValueError for an instruction set that is not here.
        """
        library = load_library()
        if not hasattr(library, "weir_gemm"):
            raise UnsupportedError("the C kernels were built without matrix products")
        best = int(library.weir_gemm_isa())
        self.weights, self.isa = weights, best if isa is None else isa
        if not 0 <= self.isa <= best:
            raise ValueError(f"instruction set {isa} is not one of 0 … {best} ({ISA_NAMES[best]} is the best here)")
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self._bytes = library[f"{_NAMES[weights]}_bytes"]
        self._bytes.argtypes, self._bytes.restype = [number, number], number
        self._pack = library[f"{_NAMES[weights]}_pack"]
        self._pack.argtypes, self._pack.restype = [number, number, pointer, pointer], None
        self.multiply = library[_NAMES[weights]]
        self.multiply.argtypes = [ctypes.c_int, number, number, number, pointer, number, pointer, pointer, number]
        self.multiply.restype = None

    def __call__(self, weight: torch.Tensor) -> NativeLinear:
        """Pack `weight` [out, in], float32; the caller may let go of it afterwards."""
        out, width = weight.shape
        weight = weight.detach().to(torch.float32).contiguous()
        packed = torch.empty(self._bytes(out, width), dtype=torch.uint8)
        self._pack(out, width, weight.data_ptr(), packed.data_ptr())
        return NativeLinear(self, packed, (out, width))

    def __str__(self) -> str:
        return f"own {self.weights} on {ISA_NAMES[self.isa]}, independent of the row count"
