"""One step's work, flattened: the tokens of all rows end to end, and where each row's KV lies.

Rings are unrolled here: entry i of a row's table is the block of positions i·page … of its attention type, whatever ring it
comes from, so that backends see tables alone. Entries for pages that have left the window name blocks that hold later
positions by now; a window keeps them from being seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weir_server.contract import FULL
from weir_server.exec.interface import RowWork
from weir_server.model.config import DecoderConfig


class UnsupportedError(Exception):
    """Why a backend cannot serve here; a clause for one log line."""


@dataclass(frozen=True, slots=True)
class Step:
    """T tokens of R rows. A token attends to positions 0 … its own of its row, in sliding layers to the window's last."""

    tokens: torch.Tensor  # int64 [T]
    positions: np.ndarray  # int32 [T]
    starts: np.ndarray  # int32 [R + 1]: row r has tokens starts[r] … starts[r+1]-1
    tables: dict[str, np.ndarray]  # by attention type: int32 [R, W], blocks of the row, padded with the reserved block 0
    picked: torch.Tensor  # int64: tokens that the head reads; at first the last one of each row that samples

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return int(self.positions.max()) + 1


_NONE = np.empty(0, np.int32)
NO_STEP = Step(torch.empty(0, dtype=torch.int64), _NONE, np.zeros(1, np.int32), {}, torch.empty(0, dtype=torch.int64))
"""For what needs neither positions nor pages: the head."""


class Compiled(Protocol):
    """Equations made ready by a backend: the input [rows, width], which may be overwritten, and the step → a result that stands
    until the next call."""

    def __call__(self, x: torch.Tensor, step: Step = NO_STEP, /) -> torch.Tensor: ...


def flatten(rows: Sequence[RowWork], page_size: int, config: DecoderConfig) -> Step:
    """Raises ValueError for a row without tokens or with fewer blocks than its tokens need: the engine's error."""
    counts = [len(r.tokens) for r in rows]
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.empty(starts[-1], np.int32)
    width = max(-(-(r.start + n) // page_size) for r, n in zip(rows, counts, strict=True))
    tables = {kind: np.zeros((len(rows), width), np.int32) for kind in config.layers_of}
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if not count:
            raise ValueError(f"row {i} has no tokens")
        need = -(-(row.start + count) // page_size)
        positions[starts[i] : starts[i + 1]] = np.arange(row.start, row.start + count)
        for kind, table in tables.items():
            if kind == FULL:
                if len(row.blocks) < need:
                    raise ValueError(f"row {i}: {count} tokens at {row.start} need {need} blocks, it has {len(row.blocks)}")
                table[i, :need] = row.blocks[:need]
            else:
                table[i, :need] = _unrolled(i, row, count, page_size, config.window or 0)[:need]
    tokens = torch.tensor([t for r in rows for t in r.tokens], dtype=torch.int64)
    picked = torch.tensor([starts[i + 1] - 1 for i, r in enumerate(rows) if r.sample], dtype=torch.int64)
    return Step(tokens, positions, starts, tables, picked)


def _unrolled(i: int, row: RowWork, count: int, page_size: int, window: int) -> np.ndarray:
    """The row's ring, repeated over all pages of its context. All that the step reads must lie in it beside what it writes."""
    end = row.start + count
    live = end - max(0, row.start + 1 - window)
    if len(row.ring) * page_size < live:
        raise ValueError(
            f"row {i}: {count} tokens at {row.start} with a window of {window} need a ring of {live} tokens, "
            f"it has {len(row.ring)} blocks of {page_size}"
        )
    return np.resize(np.asarray(row.ring, np.int32), -(-end // page_size))
