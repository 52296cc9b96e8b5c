"""Calls in flight: what one HTTP request waits for, and its rows as their events come in.

The event loop's reader fills `LiveRow`s; the call's handler wakes, takes all that is pending and writes it at once. A slow
client therefore costs no more than the text of its rows, whose length the context bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weir_server.http.errors import ApiError, overloaded
from weir_server.http.observe import Row
from weir_server.link.messages import DEADLINE_EXCEEDED, KV_BUDGET_EXCEEDED, Submit, TokenLogprobs
from weir_server.text.detok import RowText


@dataclass(frozen=True, slots=True)
class Entry:
    """One token with its logprobs (None for a prompt's first), and where its text begins in the row's text."""

    token: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(slots=True)
class Prompt:
    """A prompt that goes back to its client: under `echo` in front of the answers, under `prompt_logprobs` beside them.

    `offsets` parallel to `ids`: where each one's text begins in `text`. `logprobs` fill as the engine tells them, None for the
    first token; empty where nobody asked for them.
    """

    ids: list[int]
    text: str = ""
    offsets: Sequence[int] = ()
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def tell(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """What the engine says of the tokens from `start`; a row that was preempted meanwhile says it again."""
        self.logprobs[start : start + len(logprobs)] = logprobs

    @property
    def entries(self) -> list[Entry]:
        return [Entry(*entry) for entry in zip(self.ids, self.logprobs, self.offsets, strict=True)] if self.logprobs else []


@dataclass(slots=True, eq=False)
class LiveRow:
    """`text`, `entries`: pending for the handler. `reason` is set once, when the row is over for its client."""

    call: Call
    submit: Submit  # the engine's request
    choice: int  # which of that request's rows
    index: int  # which choice of the HTTP response
    seq: int  # order of arrival
    limit: int  # most tokens that it may generate for its client
    seen: Row
    text: RowText
    echo: Prompt | None = None  # to be said before anything else
    pending: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    chars: int = 0  # of text released so far
    cached: int = 0
    slot: int | None = None
    admitted: bool = False
    reason: str | None = None
    message: str = ""
    lane: int = field(init=False)
    arrived: float = field(init=False)

    def __post_init__(self) -> None:
        self.lane, self.arrived = self.submit.lane, self.submit.arrived

    @property
    def id(self) -> int:
        return self.submit.id

    def take(self) -> tuple[str, list[Entry]]:
        """All that is pending."""
        text, entries = "".join(self.pending), self.entries
        self.pending, self.entries = [], []
        return text, entries

    def put_prompt(self) -> None:
        """Under `echo`, once: the prompt is the beginning of the answer."""
        if self.echo is not None:
            self.put(self.echo.text)
            self.entries += self.echo.entries
            self.echo = None

    def put(self, text: str) -> None:
        if text:
            self.pending.append(text)
            self.chars += len(text)

    def end(self, reason: str, message: str = "") -> None:
        if self.reason is None:
            self.put(self.text.finish())
            self.reason, self.message = reason, message


class Call:
    """One HTTP request: `name` is what /v1/requests knows it by, `label` the client's own id if it gave a good one."""

    def __init__(
        self, name: str, label: str | None, arrived: float, submits: Sequence[Submit], retry: bool = False,
        retry_after: Callable[[], int] = lambda: 1, stops: Sequence[str] = (), prompts: dict[int, Prompt] | None = None,
        echo: bool = False, generates: bool = True,
    ) -> None:  # fmt: skip
        """`retry`: the client was refused before. `retry_after`: seconds to tell it where it is handed back. `prompts`: by
        submit, those that go back to the client, in front of the answers under `echo`. Where the call only scores its prompt
        (not `generates`) the one token that the engine then makes is dropped.
        """
        self.name = name
        self.label = label
        self.arrived = arrived
        self.submits = submits
        self.retry = retry
        self.retry_after = retry_after
        self.stops = stops
        self.prompts = prompts or {}
        self.echo = echo
        self.generates = generates
        self.rows: list[LiveRow] = []
        self.wake = asyncio.Event()
        self.cancelled_by_request = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(s.prompt) for s in self.submits)

    @property
    def done(self) -> bool:
        return all(row.reason is not None for row in self.rows)

    @property
    def started(self) -> bool:
        return any(row.admitted for row in self.rows)

    async def until_started(self) -> None:
        """Until a row was admitted to the batch, or all are over without that."""
        while not (self.started or self.done):
            await self.changed()

    async def until_done(self) -> None:
        while not (self.done or self.failure()):
            await self.changed()

    async def changed(self) -> None:
        """Until something is new since the last call."""
        await self.wake.wait()
        self.wake.clear()

    def failure(self) -> ApiError | None:
        """The first row that ended neither by itself nor at its limit, as an answer."""
        for row in self.rows:
            if row.reason == "handed_back":
                if row.message.startswith(KV_BUDGET_EXCEEDED):
                    return overloaded(row.message, self.retry_after(), "kv_budget")
                return overloaded(f"Handed back before it began: {row.message}", 0, "handed_back")
            if row.reason == "cancelled":
                if row.message == DEADLINE_EXCEEDED:
                    message = "The request was not done within its timeout."
                    return ApiError(504, message, kind="timeout", code=DEADLINE_EXCEEDED)
                if self.cancelled_by_request:
                    return ApiError(409, "The request was cancelled.", kind="cancelled", code="cancelled")
                return overloaded(row.message or "The request was ended by the server.", 0, "draining")
            if row.reason == "error":
                return ApiError(500, row.message or "inference backend error", kind="server_error")
        return None

    def usage(self) -> dict[str, object]:
        """OpenAI's usage. Tokens count up to the one that completed a stop string; each prompt counts once."""
        generated = sum(row.text.tokens for row in self.rows)
        cached = {row.id: row.cached for row in self.rows if row.choice == 0}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        }
