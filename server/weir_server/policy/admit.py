"""Who leaves the queue: the head when a slot is free and its *whole* prompt fits, and a bounded few past one that does not.

free − watermark·budget ≥ need; the watermark only while something decodes (it is room for those to grow), and nothing at all
is asked of a row that runs alone, or a row that fits exactly would wait for ever. Past a head that does not fit, at most
PASSES later rows are looked at. Each row counts who passed it, and nobody passes a row that PASSES have passed: so no row is
ever overtaken by more, and what frees up after that is the head's.
"""

from __future__ import annotations

from collections.abc import Iterator

from weir_server.kv.shape import Room
from weir_server.policy.limits import Limits
from weir_server.policy.state import Waiting

PASSES = 8
"""K of the head bypass."""


class StepTokens:
    """What a step still has: `left` tokens in all, of which `chunk` may be prompt tokens, in so many pieces; and `pages`.

    Whoever comes first may read more pages than a step should. With chunking off a prompt is split only if it comes first and
    is longer than the step.
    """

    def __init__(self, limits: Limits, decoding: bool) -> None:
        self.left, self.chunk = limits.tokens, limits.prefill_tokens(decoding)
        self.whole, self.most_prompts, self.padded = limits.chunk == 0, limits.prompts, limits.padded_tokens
        self.prompts = self.longest = self.prompt_tokens = 0
        self.pages, self.first = limits.pages, True

    def decode(self, pages: int, reserved: int = 0) -> int:
        """The token of a decoding row that reads `pages`; 0 if there is none left but the reserved ones."""
        if self.left <= reserved or not (self.first or pages <= self.pages):
            return 0
        self.left, self.pages, self.first = self.left - 1, self.pages - pages, False
        return 1

    def prompt(self, wanted: int, pages: int) -> int:
        """Tokens of a prompt of which `wanted` are missing; 0 if it has to wait for another step."""
        if not (self.first or pages <= self.pages):
            return 0
        tokens = min(wanted, self.chunk, self.left)
        longest = max(self.longest, tokens)
        if self.prompts and (
            (self.whole and tokens < wanted)
            or self.prompts >= self.most_prompts
            or (self.prompts + 1) * longest > self.padded
        ):
            return 0
        if tokens:
            self.pages, self.first = self.pages - pages, False
            self.prompts, self.longest = self.prompts + 1, longest
            self.left, self.chunk, self.prompt_tokens = self.left - tokens, self.chunk - tokens, self.prompt_tokens + tokens
        return tokens


def admit(
    waiting: Iterator[Waiting], queued: int, slots: int, room: Room, margin: int, step: StepTokens, alone: bool
) -> tuple[tuple[tuple[int, int], ...], str | None]:
    """(place in the queue, tokens) of each row that joins the batch, and what the first one left behind waits for.

    `queued`: how many wait. `slots`: free ones (negative while a lowered batch drains). `alone`: nothing runs.
    """
    admitted: list[tuple[int, int]] = []
    bound: str | None = None
    passes, place = PASSES, -1
    while place + 1 < queued and passes > 0:
        if len(admitted) >= slots:
            return tuple(admitted), bound or ("drain" if slots < 0 else "slots")
        row, place = next(waiting), place + 1
        left = room.take(row.need)
        if left.chunks < margin and not (alone and not admitted):
            if bound is None:
                bound, queued = "kv", min(queued, place + 1 + PASSES)
            passes = min(passes, PASSES - row.passed)
            continue
        if not (tokens := step.prompt(row.left, row.pages) if row.left else step.decode(row.pages)):
            return tuple(admitted), bound or "prefill"
        admitted.append((place, tokens))
        room = left
        passes -= bound is not None
    return tuple(admitted), bound
