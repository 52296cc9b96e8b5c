"""What the engine asks of whatever runs the model: one forward over any number of rows.

The engine decides which tokens of which rows go into a step and which KV blocks they own; a Runner computes. It knows
nothing of requests, queues or budgets. Two implementations: the real one over a decoder, and NullRunner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weir_server.contract import FULL, SLIDING, Geometry
from weir_server.link.messages import Sampling, TokenLogprobs


@dataclass(slots=True)
class RowWork:
    """One row's share of a step: feed `tokens` at positions start … start+len-1, whose KV goes to `blocks` and `ring`.

    `blocks` is the row's whole table of full-attention blocks (block i holds positions i·block_tokens …), empty where the
    model has no such layers. `ring`: its sliding-attention blocks; position p lies in ring[(p // block_tokens) % len(ring)].
    If `sample`, the last token's logits give the next token; position of the new token = start + len(tokens).
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool
    sampling: Sampling
    choice: int  # which of the request's n rows
    context: Sequence[int]  # the row up to and including `tokens` (penalties); with prompt_logprobs at least the whole prompt
    prompt_len: int  # of the user's prompt: what follows it in `context` was generated
    ring: Sequence[int] = ()
    prompt_logprobs: int = -1  # k ≥ 0: logprobs, with the k best, of the prompt token after each of `tokens`


@dataclass(slots=True)
class RowResult:
    """`token` is None where nothing was sampled; `error` ends that row alone, the step's other rows stand."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # one for each fed token that another prompt token follows


__all__ = ["FULL", "SLIDING", "RowResult", "RowWork", "Runner"]


class Runner(Protocol):
    """One forward pass at a time, from one thread.

    A block is addressed by its attention type and its number: block b of a type with n blocks a chunk is the (b mod n)-th of
    chunk b // n. Chunks 0 and 1 are padding: no row owns a block of theirs.
    """

    geometry: Geometry
    window: int | None  # tokens that a sliding layer sees, its own included; None = the model has no such layers
    vocab_size: int
    supports_batching: bool

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        """Run the rows, write their KV, sample where asked. Results in the order of `rows`.

        A failure of one row (NaN logits, a sampling error) is that row's `error`. Raises only if the whole step is lost.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: str = FULL) -> None:
        """Copy KV of block src to block dst of one attention type, for each (src, dst): copy-on-write and forks."""
        ...

    def swap_out(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Copy pool block src to swap block dst, by attention type: one batched transfer. Both pools have one geometry."""
        ...

    def swap_in(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Copy swap block src to pool block dst, by attention type: one batched transfer."""
        ...

    def release_chunks(self, chunks: Sequence[int]) -> None:
        """Give the memory of free chunks back to the system; they read as zeros when next used."""
        ...
