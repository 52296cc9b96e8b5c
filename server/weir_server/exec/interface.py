"""What the engine asks of whatever runs the model: one forward over any number of rows.

The engine decides which tokens of which rows go into a step and which KV blocks they own; a Runner computes. It knows
nothing of requests, queues or budgets. Two implementations: the real one over a decoder, and NullRunner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weir_server.contract import Geometry
from weir_server.link.messages import Sampling, TokenLogprobs


@dataclass(slots=True)
class RowWork:
    """One row's share of a step: feed `tokens` at positions start … start+len-1, whose KV goes to `blocks`.

    `blocks` is the row's whole block table (block i holds positions i·block_tokens …). If `sample`, the last token's logits
    give the next token; position of the new token = start + len(tokens).
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool
    sampling: Sampling
    choice: int  # which of the request's n rows
    context: Sequence[int]  # all tokens of the row up to and including `tokens`: for penalties
    prompt_len: int  # of the user's prompt: what follows it in `context` was generated


@dataclass(slots=True)
class RowResult:
    """`token` is None where nothing was sampled; `error` ends that row alone, the step's other rows stand."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Runner(Protocol):
    """One forward pass at a time, from one thread."""

    geometry: Geometry
    vocab_size: int
    supports_batching: bool

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        """Run the rows, write their KV, sample where asked. Results in the order of `rows`.

        A failure of one row (NaN logits, a sampling error) is that row's `error`. Raises only if the whole step is lost.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV of block src to block dst for each (src, dst): copy-on-write and forks."""
        ...

    def release_chunks(self, chunks: Sequence[int]) -> None:
        """Give the memory of free chunks back to the system; they read as zeros when next used."""
        ...
