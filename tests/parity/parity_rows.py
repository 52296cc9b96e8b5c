"""A Runner driven by hand: rows with their own blocks, fed in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from weir_server.contract import FULL, SLIDING, Geometry
from weir_server.exec.backends import Backend
from weir_server.exec.cpu import CpuBackend
from weir_server.exec.gather import GatherBackend
from weir_server.exec.interface import RowWork
from weir_server.exec.pool import KvPool
from weir_server.exec.runner import LoadedModel, ModelRunner
from weir_server.exec.step import UnsupportedError, flatten
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.link.messages import Sampling

GREEDY = Sampling(max_tokens=1000, temperature=0)
BACKENDS = {"gather": GatherBackend, "cpu": CpuBackend}


ROOM = 192
"""Tokens that a row of `Row.of` can hold."""


def make_runner(
    loaded: LoadedModel, backend: str, page_size: int = 16, rows: int = 5, swap: bool = False
) -> ModelRunner:
    """A runner with the backend named and room for so many rows, or a skip that says why this machine has none."""
    num_chunks = RESERVED_CHUNKS + rows * _chunks_of_row(loaded.geometry(page_size))
    pool, other = (KvPool(loaded.config, page_size, num_chunks, loaded.kv_dtype) for _ in range(2))
    try:
        chosen: Backend = BACKENDS[backend](config=loaded.config, pool=pool)
    except UnsupportedError as e:
        pytest.skip(f"the {backend} backend cannot serve here: {e}")
    return ModelRunner(loaded.decoder, pool, chosen, other if swap else None)


def _chunks_of_row(geometry: Geometry) -> int:
    blocks = -(-ROOM // geometry.block_tokens)
    return sum(-(-blocks // n) for n in geometry.blocks_per_chunk.values())


def places(runner: ModelRunner, place: int, chunk: int) -> tuple[list[int], list[int]]:
    """Blocks, and ring for pieces of up to `chunk` tokens, of the `place`-th row that the pool has room for."""
    geometry, most = runner.geometry, -(-ROOM // runner.pool.page_size)
    wanted = {FULL: most, SLIDING: min(most, -(-((runner.window or 0) + chunk) // runner.pool.page_size))}
    begin, found = RESERVED_CHUNKS + place * _chunks_of_row(geometry), {}
    for kind, n in geometry.blocks_per_chunk.items():
        found[kind] = list(range(begin * n, begin * n + wanted[kind]))
        begin += -(-most // n)
    assert begin <= runner.pool.num_chunks, "this pool has no room for that row"
    return found.get(FULL, []), found.get(SLIDING, [])


@dataclass
class Row:
    """`tokens`: prompt and what was generated; `done`: of them, how many have their KV in the blocks."""

    tokens: list[int]
    blocks: Sequence[int] = ()
    sampling: Sampling = GREEDY
    choice: int = 0
    done: int = 0
    ring: Sequence[int] = ()
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @classmethod
    def of(cls, runner: ModelRunner, tokens: list[int], place: int = 0, chunk: int = 64, **more: Any) -> Row:
        """A row in the `place`-th place, to be fed in pieces of up to `chunk` tokens."""
        blocks, ring = places(runner, place, chunk)
        return cls(list(tokens), blocks, ring=ring, **more)

    def work(self, count: int | None = None) -> RowWork:
        """The next `count` tokens (all that are left by default); samples when they are the last."""
        end = len(self.tokens) if count is None else min(self.done + count, len(self.tokens))
        context = self.tokens[:end]
        last = end == len(self.tokens)
        return RowWork(
            context[self.done :], self.done, self.blocks, last, self.sampling, self.choice, context, self.prompt_len,
            ring=self.ring,
        )  # fmt: skip


def step(runner: ModelRunner, *parts: tuple[Row, int | None]) -> list[int | None]:
    """One forward over the parts; appends what was sampled."""
    works = [row.work(count) for row, count in parts]
    results = runner.execute(works)
    for (row, _), work, result in zip(parts, works, results, strict=True):
        assert result.error is None
        row.done += len(work.tokens)
        if result.token is not None:
            row.tokens.append(result.token)
    return [r.token for r in results]


def run_rows(runner: ModelRunner, rows: Sequence[Row], n: int) -> list[list[int]]:
    """`n` more tokens of each row, all rows together, prompts whole."""
    for _ in range(n):
        step(runner, *((row, None) for row in rows))
    return [row.tokens[-n:] for row in rows]


def all_logits(runner: ModelRunner, works: Sequence[RowWork]) -> torch.Tensor:
    """Logits of every token of the step, not only of those that sample."""
    with torch.inference_mode():
        decoder, backend = runner.decoder, runner.backend
        flat = flatten(works, runner.pool.page_size, decoder.config)
        flat = replace(flat, picked=torch.arange(len(flat.tokens)))
        hidden, head = (backend.compile(f, decoder.config.hidden) for f in (decoder.hidden, decoder.head))
        return head(hidden(decoder.embedded(flat.tokens), flat)).clone()
