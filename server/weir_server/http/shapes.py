"""OpenAI response objects of the two generating endpoints: chunks of a stream, and whole answers. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from weir_server.http.live import Call, Entry, LiveRow, Prompt
from weir_server.link.messages import LOWEST_LOGPROB, TokenLogprobs
from weir_server.text.tokenizer import Tokenizer


class Shape:
    """Common to both endpoints. `tops`: how many of the best go beside each token's own logprob, -1: no logprobs at all (then
    every choice has null); `prompt_tops` likewise for those of the prompt, which are told apart.
    """

    whole_object = chunk_object = prefix = ""

    def __init__(self, call_name: str, model: str, tokenizer: Tokenizer, tops: int = -1, prompt_tops: int = -1) -> None:
        self.head = {"id": f"{self.prefix}-{call_name}", "created": int(time.time()), "model": model}
        self.tokenizer = tokenizer
        self.tops, self.prompt_tops = tops, prompt_tops

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

    def prompt_logprobs(self, prompt: Prompt) -> list[dict[str, Any] | None]:
        """vLLM's form: for each token of the prompt an object by id, itself first and then the best; null for the first."""
        return [None if p is None else self._by_id(i, p) for i, p in zip(prompt.ids, prompt.logprobs, strict=True)]

    def _by_id(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = logprobs.top[: self.prompt_tops]
        ranks = {t: i for i, (t, _) in enumerate(top, 1)}
        return {
            str(t): {"logprob": max(p, LOWEST_LOGPROB), "rank": ranks.get(t), "decoded_token": self.token_text(t)}
            for t, p in ((token, logprobs.logprob), *top)
        }


class ChatShape(Shape):
    whole_object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, call: Call) -> dict[str, Any]:
        answer = super().whole(call)
        if self.prompt_tops >= 0:
            answer["prompt_logprobs"] = self.prompt_logprobs(call.prompts[call.submits[0].id])
        return answer

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
        if self.tops < 0:
            return None
        return {"content": [self._entry(e) for e in entries], "refusal": None}

    def _entry(self, entry: Entry) -> dict[str, Any]:
        assert entry.logprobs is not None  # only a prompt's first token has none, and chats are not echoed
        top = [self._token(token, logprob) for token, logprob in entry.logprobs.top]
        return {**self._token(entry.token, entry.logprobs.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(piece)}


class CompletionShape(Shape):
    whole_object, chunk_object, prefix = "text_completion", "text_completion", "cmpl"

    def delta(self, row: LiveRow, text: str, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"index": row.index, "text": text, "logprobs": self._logprobs(entries), "finish_reason": None}

    def last(self, row: LiveRow) -> dict[str, Any]:
        return {"index": row.index, "text": "", "logprobs": None, "finish_reason": row.reason}

    def answer(self, row: LiveRow) -> dict[str, Any]:
        text, entries = row.take()
        out = {"index": row.index, "text": text, "logprobs": self._logprobs(entries), "finish_reason": row.reason}
        return out if self.prompt_tops < 0 else {**out, "prompt_logprobs": self.prompt_logprobs(row.call.prompts[row.id])}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self.tops < 0:
            return None
        told = [e.logprobs for e in entries]
        tops = [
            None if p is None else {self.token_text(t): max(q, LOWEST_LOGPROB) for t, q in p.top[: self.tops]} for p in told
        ]
        return {
            "tokens": [self.token_text(e.token) for e in entries],
            "token_logprobs": [None if p is None else max(p.logprob, LOWEST_LOGPROB) for p in told],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [e.offset for e in entries],
        }
