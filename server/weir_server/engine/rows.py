"""A row: one sequence being generated, and all that it owns.

QUEUED → PREFILLING → DECODING → FINISHED, and DECODING or PREFILLING → QUEUED when preempted: its KV goes to the swap pool, or
is gone and computed again with what it has generated as part of its prompt. Its tokens stay; its client never sees any of it.
"""

from __future__ import annotations

from enum import Enum

from weir_server.kv.cache import Table
from weir_server.kv.prefix import Chain
from weir_server.link.messages import Submit
from weir_server.policy.queue import LANES


class RowState(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


CREDITS = 2
"""Preemptions after which a row is readmitted only with room for all that it may still generate."""


class Row:
    """`tokens[:computed]` have their KV in `blocks` and `ring`, or in the swap pool while it waits with `swapped`.

    Block i holds tokens i·block_tokens …, the last one is the row's own; position p lies in ring[p // block_tokens % len].
    """

    __slots__ = (
        "arrived", "behind", "blocks", "chain", "choice", "computed", "credits", "final", "high_water", "id", "lane", "lost",
        "matched", "passed", "prompt_len", "prompt_logprobs", "published", "ring", "sampling", "seq", "siblings", "state",
        "swapped", "tokens", "told", "turn",
    )  # fmt: skip

    def __init__(self, request: Submit, choice: int, seq: int, context: int, chain: Chain | None, siblings: list[Row]) -> None:
        self.id = request.id
        self.choice = choice
        self.seq = seq  # order of arrival over all rows
        self.arrived = request.arrived
        self.lane = min(max(request.lane, 0), LANES - 1)
        self.sampling = request.sampling
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.final = min(self.prompt_len + request.sampling.max_tokens, context)  # tokens at which it ends at the latest
        self.prompt_logprobs = request.prompt_logprobs
        self.told = 1  # prompt tokens whose logprobs have been sent, or have none: the first one
        self.state = RowState.QUEUED
        self.turn = -1  # order of first admission; -1 = never admitted
        self.behind = False  # it waits for another row of its request to compute their prompt
        self.passed = 0  # rows that were admitted past it
        self.credits = CREDITS
        self.blocks: list[int] = []
        self.ring: list[int] = []
        self.swapped: Table | None = None
        self.computed = 0
        self.high_water = 0  # most tokens ever computed: computing them again is recompute
        self.chain = chain  # None: neither reads nor writes the prefix cache
        self.matched: list[int] = []  # cached blocks that it counts on while it waits
        self.lost = 0  # wanted blocks that the cache had evicted when they were matched
        self.published = 0  # blocks of the table that are findable
        self.siblings = siblings  # all rows of the request, this one included

    @property
    def admitted(self) -> bool:
        return self.turn >= 0

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
