"""Matrices of 8-bit weights, in the layout that exec/gemm.c multiplies with, and how they come about.

Symmetric, with a float32 scale for each 32 weights along a row (docs/decisions/140): a weight is q · scale rounded to float32,
whoever computes it. GGUF's own symmetric blocks of 32 are that to the bit; other weights are rounded to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

GROUP = 32
"""Weights along a row that share a scale."""
_PANEL = 16  # rows of the matrix that lie side by side
_ROWS = 4096  # that are rounded at a time: the scratch of a large embedding stays small


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of weights: q int8 [rows, in], zeros beyond `width` up to whole groups, and scales float32 [rows, in / 32]."""

    q: torch.Tensor
    scales: torch.Tensor
    width: int

    @staticmethod
    def joined(parts: list[Blocks]) -> Blocks:
        """All rows, in order; the parts are equally wide."""
        return Blocks(torch.cat([p.q for p in parts]), torch.cat([p.scales for p in parts]), parts[0].width)

    def rows(self, order: torch.Tensor) -> Blocks:
        return Blocks(self.q[order], self.scales[order], self.width)


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """W [out, in]. `lines` int32 [panels, groups, 9, 16]: for each 16 rows and 32 columns a line of scales (float32), then one
    for each 4 columns, whose lane j holds the 4 bytes of row j. What lies beyond the matrix is zero."""

    lines: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Blocks) -> Int8Matrix:
        shape = len(blocks.q), blocks.width
        lines = torch.empty(lines_shape(shape), dtype=torch.int32)
        panels, groups, _, _ = lines.shape
        q, scales = (torch.nn.functional.pad(t, (0, 0, 0, -shape[0] % _PANEL)) for t in (blocks.q, blocks.scales))
        lines[:, :, 0] = scales.contiguous().view(torch.int32).view(panels, _PANEL, groups).permute(0, 2, 1)
        lines[:, :, 1:] = q.flatten().view(torch.int32).view(panels, _PANEL, groups, GROUP // 4).permute(0, 2, 3, 1)
        return cls(lines, shape)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of W, float32 [len(rows), in]; `rows` int64, each below `out`."""
        picked = self.lines[rows // _PANEL, :, :, rows % _PANEL]  # [rows, groups, 9]
        q = picked[:, :, 1:].contiguous().view(torch.int8)
        return (q * picked[:, :, :1].view(torch.float32)).flatten(1)[:, : self.shape[1]].contiguous()

    def float32(self) -> torch.Tensor:
        """W, float32 [out, in]."""
        return self[torch.arange(self.shape[0])]


Matrix = torch.Tensor | Int8Matrix
"""W [out, in], float32 or in 8 bits."""


def dense(weight: Matrix) -> torch.Tensor:
    """What `weight` stands for, in float32."""
    return weight.float32() if isinstance(weight, Int8Matrix) else weight


def lines_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Of the lines of a matrix [out, in]: 9 bits a weight where both sides are whole."""
    out, width = shape
    return -(-out // _PANEL), -(-width // GROUP), 1 + GROUP // 4, _PANEL


def quantize(weight: torch.Tensor) -> Blocks:
    """`weight` [rows, in]: the scale of a group is its largest / 127, a weight the nearest multiple of that."""
    parts = []
    for some in weight.split(_ROWS):
        whole = torch.nn.functional.pad(some.to(torch.float32), (0, -some.shape[1] % GROUP))
        groups = whole.view(len(whole), whole.shape[1] // GROUP, GROUP)
        scales = groups.abs().amax(2, keepdim=True) / 127
        q = torch.where(scales > 0, groups / scales, 0).clamp_(-127, 127).round_().to(torch.int8)
        parts.append(Blocks(q.flatten(1), scales[:, :, 0], weight.shape[1]))
    return Blocks.joined(parts)


# ---------------------------------------------------------------- GGUF's blocks

def _q8_0(body: np.ndarray) -> np.ndarray:
    return body.view(np.int8)


def _q4_0(body: np.ndarray) -> np.ndarray:
    """16 bytes: elements 0 … 15 in the low halves, 16 … 31 in the high ones, eight too large."""
    return np.concatenate([body & 15, body >> 4], axis=-1).astype(np.int8) - np.int8(8)


_BLOCKS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {"Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0)}
EXACT = frozenset(_BLOCKS)
"""GGML types whose blocks are 32 symmetric weights of at most 8 bits under a scale: taken as they are."""


def of_gguf(raw: np.ndarray, kind: str) -> Blocks:
    """`raw`: uint8 [rows, bytes of a row] of a type of EXACT; a block is a float16 scale and then its weights."""
    size, unpacked = _BLOCKS[kind]
    blocks = raw.reshape(len(raw), -1, size)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0].astype(np.float32)
    q = np.ascontiguousarray(unpacked(np.ascontiguousarray(blocks[:, :, 2:])).reshape(len(raw), -1))
    return Blocks(torch.from_numpy(q), torch.from_numpy(scales), q.shape[1])
