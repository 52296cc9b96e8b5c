"""One step's work, flattened: the tokens of all rows end to end, and where each row's KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weir_server.exec.interface import RowWork


class UnsupportedError(Exception):
    """Why a backend cannot serve here; a clause for one log line."""


@dataclass(frozen=True, slots=True)
class Step:
    """T tokens of R rows. A token attends to positions 0 … its own of its row."""

    tokens: torch.Tensor  # int64 [T]
    positions: np.ndarray  # int32 [T]
    starts: np.ndarray  # int32 [R + 1]: row r has tokens starts[r] … starts[r+1]-1
    tables: np.ndarray  # int32 [R, W]: blocks of the row, padded with the reserved block 0
    sample_at: torch.Tensor  # int64: index of the last token of each row that samples

    @property
    def longest(self) -> int:
        """Tokens of the longest context that is read."""
        return int(self.positions.max()) + 1


def flatten(rows: Sequence[RowWork], page_size: int) -> Step:
    """Raises ValueError for a row without tokens or with fewer blocks than its tokens need: the engine's error."""
    counts = [len(r.tokens) for r in rows]
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.empty(starts[-1], np.int32)
    tables = np.zeros((len(rows), max(-(-(r.start + n) // page_size) for r, n in zip(rows, counts, strict=True))), np.int32)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        need = -(-(row.start + count) // page_size)
        if not count or len(row.blocks) < need:
            raise ValueError(f"row {i}: {count} tokens at {row.start} need {need} blocks, it has {len(row.blocks)}")
        positions[starts[i] : starts[i + 1]] = np.arange(row.start, row.start + count)
        tables[i, :need] = row.blocks[:need]
    tokens = torch.tensor([t for r in rows for t in r.tokens], dtype=torch.int64)
    sample_at = torch.tensor([starts[i + 1] - 1 for i, r in enumerate(rows) if r.sample], dtype=torch.int64)
    return Step(tokens, positions, starts, tables, sample_at)
