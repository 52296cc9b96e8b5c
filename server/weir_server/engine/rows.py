"""A row: one sequence being generated, and all that it owns.

QUEUED → PREFILLING → DECODING → FINISHED, and DECODING or PREFILLING → QUEUED when preempted: then its KV is gone, its
tokens stay, and it is prefilled again with what it has generated as part of its prompt. Its client never sees that.
"""

from __future__ import annotations

from enum import Enum

from weir_server.kv.prefix import Chain
from weir_server.link.messages import Submit


class RowState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


CREDITS = 2
"""Preemptions after which a row is readmitted only with room for all that it may still generate."""


class Row:
    """`tokens[:computed]` have their KV in `blocks`; block i holds tokens i·block_tokens …, the last one is the row's own."""

    __slots__ = (
        "admitted", "arrived", "blocks", "chain", "choice", "computed", "credits", "final", "high_water", "id", "prompt_len",
        "published", "sampling", "seq", "siblings", "state", "tokens",
    )

    def __init__(self, request: Submit, choice: int, seq: int, context: int, chain: Chain | None, siblings: list[Row]) -> None:
        self.id = request.id
        self.choice = choice
        self.seq = seq  # order of arrival over all rows
        self.arrived = request.arrived
        self.sampling = request.sampling
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.final = min(self.prompt_len + request.sampling.max_tokens, context)  # tokens at which it ends at the latest
        self.state = RowState.QUEUED
        self.admitted = False  # ever
        self.credits = CREDITS
        self.blocks: list[int] = []
        self.computed = 0
        self.high_water = 0  # most tokens ever computed: computing them again is recompute
        self.chain = chain  # None: neither reads nor writes the prefix cache
        self.published = 0  # blocks of the table that are findable
        self.siblings = siblings  # all rows of the request, this one included

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def reach(self) -> int:
        """Tokens whose KV it needs on admission: those it has and the next one, unless that is its last."""
        return min(len(self.tokens) + 1, self.final - 1)
