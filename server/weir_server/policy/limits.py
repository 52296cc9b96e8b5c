"""What a step may hold, the choices fixed at start, and the context of a slot."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weir_server.link.errors import UserError

CHUNK_IDLE = 512
CHUNK_DECODING = 28
"""Prompt tokens of a step while nothing decodes (or has just begun to), and while something does."""
BEGINNING = 3
"""Tokens with which a row still counts as one that has just begun."""
PADDED_PIECE = 512
MIN_CONTEXT = 512
PRESSURE = "least_progress"
"""The pressure policy where none is given."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one step, and how it is filled. The request cap is not here: it is the live knob `max_batch_size`.

    `tokens`: most query tokens. `pages`: most KV blocks read, each reader's counted (one row always goes). `chunk`: most
    prompt tokens (None = adaptive, 0 = prompts are split only where they exceed the token budget). `grant`: steps that a
    parked prefill waits at most before half of a step is reserved for it (0 = without bound). `prompts`: most prompts in one
    step; `padded`: most tokens that they would be if all were as long as the longest (None = derived, 0 = one prompt alone).
    `pressure`: newest_stalled | least_progress. `slot_victims`: whom a row of a higher lane may drive from its slot
    (longest-first | lowest-priority, None = nobody).
    """

    tokens: int
    pages: float = math.inf
    chunk: int | None = None
    grant: int = 16
    prompts: int = 4
    padded: int | None = None
    prefill_first: bool = False
    pressure: str = PRESSURE
    slot_victims: str | None = None

    def prefill_tokens(self, decoding: bool) -> int:
        """Most prompt tokens of a step: large while nothing decodes, small while something does."""
        if self.chunk is None:
            return min(self.tokens, CHUNK_DECODING if decoding and not self.prefill_first else CHUNK_IDLE)
        return min(self.tokens, self.chunk) if self.chunk else self.tokens

    @property
    def piece(self) -> int:
        """Most tokens that one row is fed in one step."""
        return self.prefill_tokens(decoding=False)

    @property
    def padded_tokens(self) -> int:
        return 2 * self.prompts * min(self.piece, PADDED_PIECE) if self.padded is None else self.padded


def token_budget(max_rows: int, chunk: int | None, context: int) -> int:
    """Token budget where none is given: every row decodes and a whole prefill chunk still fits."""
    if chunk is None:
        return max_rows + CHUNK_IDLE
    return max_rows + (chunk or context)


def context_per_slot(ctx_size: int, slots: int) -> int:
    """Tokens (prompt and answer) of one row, where the model's context allows them: floor(ctx_size / slots).

    An explicit `ctx_size` is the whole server's, shared by its `slots` (the explicit boot batch, else --parallel). Raises
    UserError under 512.
    """
    share = ctx_size // slots
    if share < MIN_CONTEXT:
        raise UserError(
            f"--ctx-size {ctx_size} over {slots} slots leaves {share} tokens each, under the least of {MIN_CONTEXT}: "
            f"raise it to {MIN_CONTEXT * slots} or lower the number of slots"
        )
    return share
