"""OpenAI response objects of the two generating endpoints: chunks of a stream, and whole answers. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from weir_server.http.live import Call, Entry, LiveRow
from weir_server.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""In place of minus infinity, which JSON lacks (vLLM's convention)."""


class Shape:
    """Common to both endpoints. `wants_logprobs`: then every choice carries them (null otherwise)."""

    whole_object = chunk_object = prefix = ""

    def __init__(self, call_name: str, model: str, tokenizer: Tokenizer, wants_logprobs: bool) -> None:
        self.head = {"id": f"{self.prefix}-{call_name}", "created": int(time.time()), "model": model}
        self.tokenizer = tokenizer
        self.wants_logprobs = wants_logprobs

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        out = {**self.head, "object": self.chunk_object, "choices": choices}
        return out if usage is None else {**out, "usage": usage}

    def whole(self, call: Call) -> dict[str, Any]:
        choices = [self.answer(row) for row in call.rows]
        return {**self.head, "object": self.whole_object, "choices": choices, "usage": call.usage()}

    def opening(self, row: LiveRow) -> dict[str, Any] | None:
        """A choice to send before any text, or None."""
        return None

    def delta(self, row: LiveRow, text: str, entries: Sequence[Entry]) -> dict[str, Any]:
        raise NotImplementedError

    def last(self, row: LiveRow) -> dict[str, Any]:
        raise NotImplementedError

    def answer(self, row: LiveRow) -> dict[str, Any]:
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        return self.tokenizer.piece(token).decode("utf-8", "replace")


class ChatShape(Shape):
    whole_object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, row: LiveRow) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": row.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, row: LiveRow, text: str, entries: Sequence[Entry]) -> dict[str, Any]:
        logprobs = self._logprobs(entries)
        return {"index": row.index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def last(self, row: LiveRow) -> dict[str, Any]:
        return {"index": row.index, "delta": {}, "logprobs": None, "finish_reason": row.reason}

    def answer(self, row: LiveRow) -> dict[str, Any]:
        text, entries = row.take()
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": row.index, "message": message, "logprobs": self._logprobs(entries), "finish_reason": row.reason}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        return {"content": [self._entry(e) for e in entries], "refusal": None}

    def _entry(self, entry: Entry) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in entry.logprobs.top]
        return {**self._token(entry.token, entry.logprobs.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST), "bytes": list(piece)}


class CompletionShape(Shape):
    whole_object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def delta(self, row: LiveRow, text: str, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"index": row.index, "text": text, "logprobs": self._logprobs(entries), "finish_reason": None}

    def last(self, row: LiveRow) -> dict[str, Any]:
        return {"index": row.index, "text": "", "logprobs": None, "finish_reason": row.reason}

    def answer(self, row: LiveRow) -> dict[str, Any]:
        text, entries = row.take()
        return {"index": row.index, "text": text, "logprobs": self._logprobs(entries), "finish_reason": row.reason}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        tops = [{self.token_text(t): max(p, LOWEST) for t, p in e.logprobs.top} for e in entries]
        return {
            "tokens": [self.token_text(e.token) for e in entries],
            "token_logprobs": [max(e.logprobs.logprob, LOWEST) for e in entries],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [e.offset for e in entries],
        }
