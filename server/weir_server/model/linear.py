"""Linear layers without bias, by torch: the way where our own products (exec/gemm.py) were not built.

Weights are packed once by oneDNN: at 4 to 32 rows this is 2 to 3 times as fast as MKL's `F.linear`, which besides gives five
classes of results by row count, so that batching would flip near-ties. The packing ops are private in torch: they are
probed at load, and where they are missing or fail the probe `F.linear` serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from weir_server.model.int8 import Matrix, dense

_HINT_ROWS = 16
"""Rows that the packing is told to expect. From 8 on a single row goes through the same kernel as many (AVX2)."""


Linear = Callable[[torch.Tensor], torch.Tensor]
"""y [rows, out] = x [rows, in] · Wᵀ in float32."""


class Products(Protocol):
    """A way to multiply. `row_independent`: a row's result is the same bits at any row count; `str()` says it in words.
    `keeps_int8`: a matrix of 8 bits is multiplied as it is, not held in float32."""

    @property
    def row_independent(self) -> bool: ...

    @property
    def keeps_int8(self) -> bool: ...

    def __call__(self, weight: Matrix) -> Linear:
        """Pack `weight` [out, in]; the caller may let go of it afterwards."""
        ...

    def settle(self) -> None:
        """What only makes later products faster; while others multiply, once all weights are packed."""
        ...


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """y [rows, out] = x [rows, in] · Wᵀ in float32. `pad_single`: one row is computed as two equal ones."""

    weight: torch.Tensor  # packed by oneDNN, or plain
    packed: bool
    pad_single: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.pad_single and x.shape[0] == 1:
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class TorchProducts:
    """Products by oneDNN's packed form or by F.linear."""

    packed: bool
    pad_single: bool
    row_independent: bool
    keeps_int8 = False

    def __call__(self, weight: Matrix) -> TorchLinear:
        plain = dense(weight)
        if self.packed:
            plain = torch.ops.mkldnn._reorder_linear_weight(plain.contiguous(), _HINT_ROWS)
        return TorchLinear(plain, self.packed, self.pad_single)

    def settle(self) -> None:
        pass

    def __str__(self) -> str:
        name = "oneDNN packed" if self.packed else "F.linear"
        padded = ", single rows padded to two" if self.pad_single else ""
        return f"{name}{padded}, {'independent of' if self.row_independent else 'dependent on'} the row count"


def probe(weights: Iterable[Matrix], most_rows: int = 300) -> TorchProducts:
    """Try the ways to multiply on `weights` (one for each shape) and choose; about 0.3 s for SmolLM2.

    oneDNN if it works and gives F.linear's values to rounding. Row counts are compared up to `most_rows`; for matrices that
    only sampling rows meet (the head), to 32.
    """
    each = [dense(w) for w in {tuple(w.shape): w for w in weights}.values()]
    packed = all(agrees(TorchProducts(True, False, False), w) for w in each)
    single = many = True
    for weight in each:
        multiply = TorchProducts(packed, False, False)(weight)
        rows = most_rows if weight.numel() < 1 << 23 else 32
        dependent = _dependent_rows(multiply, weight.shape[1], rows)
        single &= 1 not in dependent
        many &= not dependent - {1}
    return TorchProducts(packed, pad_single=many and not single, row_independent=many)


def agrees(products: Products, weight: Matrix) -> bool:
    """Whether `products` work here and give F.linear's values for some 500 columns of `weight` to rounding."""
    some = torch.arange(0, weight.shape[0], 1 + weight.shape[0] // 512)
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
    try:
        got = products(weight)(x)[:, some]
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    want = F.linear(x, weight[some])
    return bool((got - want).abs().max() <= 1e-4 * want.abs().max() + 1e-5)


def _dependent_rows(multiply: Linear, width: int, most: int) -> set[int]:
    """The row counts at which some row's bits differ from those at `most` rows."""
    x = torch.randn(most, width, generator=torch.Generator().manual_seed(2))
    reference = multiply(x)
    counts = [n for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 127, 128, 256) if n < most]
    return {n for n in counts if not torch.equal(multiply(x[:n].contiguous()), reference[:n])}
