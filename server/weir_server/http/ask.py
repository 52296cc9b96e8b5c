"""One OpenAI request: JSON → checked → tokenised → a Call that can be queued. No routes: commands ask in the same way.

The order of checks is the cost of refusing: size limit and JSON, queue, then shapes, templates, tokens, lengths.
"""

from __future__ import annotations

import codecs
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weir_server.http.errors import ApiError, bad, overloaded
from weir_server.http.live import Call, Prompt
from weir_server.http.schema import (
    MAX_CHOICES,
    REFUSED_OF_CHAT,
    ChatRequest,
    Common,
    CompletionRequest,
    chat_messages,
    check_ids,
    convert,
    lane_of,
    logit_bias_of,
    parse_body,
    prompts_of,
    refuse_unsupported,
    sampling_of,
    seconds_in,
    stops_of,
)
from weir_server.http.service import Service
from weir_server.http.shapes import ChatShape, CompletionShape, Shape
from weir_server.link.messages import KV_BUDGET_EXCEEDED, Submit, TokenLogprobs
from weir_server.text.template import TemplateError, flatten
from weir_server.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where none is given (OpenAI's default)."""
TIMEOUT_HEADER = "X-Request-Timeout"
LABEL = re.compile(r"[\w.:\-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its prompts as ids. `texts`: the same prompts where they were given as texts, else empty.

    `logprobs`: how many of the best to tell beside each token's own (-1: no logprobs at all).
    """

    ask: Common
    prompts: list[list[int]]
    texts: list[str]
    logprobs: int
    echo: bool = False

    @property
    def prompt_logprobs(self) -> int:
        """What the engine is asked for: the more of what `echo` shows and of what is told apart."""
        return max(self.logprobs if self.echo else -1, _or_none(self.ask.prompt_logprobs))


@dataclass(frozen=True)
class Endpoint:
    """`prepare` makes (service, body, size of the body in bytes) a Prepared, or raises ApiError."""

    prepare: Callable[[Service, Mapping[str, Any], int], Awaitable[Prepared]]
    shape: type[Shape]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that may be queued, and how its answer looks."""

    call: Call
    shape: Shape
    stream: bool
    include_usage: bool


async def accept(
    service: Service, endpoint: Endpoint, read: Callable[[], Awaitable[bytes]], headers: Mapping[str, str]
) -> Asked:
    """Raises ApiError for whatever is refused, which is counted here, and what `read`, which gives the body, raises."""
    arrived, retry, rows = service.now(), _is_retry(headers), 1
    try:
        raw = await read()
        body = parse_body(raw)
        rows = _rows_asked(body)
        _check_rows(service, rows)
        service.check_queue(rows)
        refuse_unsupported(body)
        check_model(service, body)
        prepared = await endpoint.prepare(service, body, len(raw))
        deadline = _deadline(prepared.ask, headers, arrived)
        submits = _submits(service, prepared, arrived, deadline)
        service.check_queue(rows)  # others may have come while this one was tokenised
    except ApiError as e:
        service.refuse(e.reason, rows, retry)
        raise
    call = _call(service, prepared, submits, retry, headers.get("X-Request-Id", ""))
    options = prepared.ask.stream_options
    shape = endpoint.shape(
        call.name, service.model.name, service.model.tokenizer, prepared.logprobs, _or_none(prepared.ask.prompt_logprobs)
    )
    return Asked(call, shape, prepared.ask.stream, bool(options and options.include_usage))


def _call(service: Service, p: Prepared, submits: list[Submit], retry: bool, label: str) -> Call:
    prompts = {}
    if p.echo or p.prompt_logprobs >= 0:
        for i, submit in enumerate(submits):
            prompts[submit.id] = _prompt(service.model.tokenizer, submit, p.texts[i] if p.texts else None)
    return Call(
        uuid.uuid4().hex, label if LABEL.fullmatch(label) else None, submits[0].arrived, submits, retry, service.retry_after,
        stops_of(p.ask), prompts, p.echo, generates=p.ask.max_tokens != 0,
    )  # fmt: skip


def _prompt(tokenizer: Tokenizer, submit: Submit, text: str | None) -> Prompt:
    """What the client is told of its prompt: the text as it was given, else of its ids."""
    decoder, ids = codecs.getincrementaldecoder("utf-8")("replace"), submit.prompt
    offsets, chars = [], 0
    for i in ids:
        offsets.append(chars)
        chars += len(decoder.decode(tokenizer.piece(i)))
    whole = tokenizer.decode(ids)
    text = whole if text is None else text
    before = len(whole) - len(text) if whole.endswith(text) else 0  # what the tokenizer puts in front of a text
    logprobs: list[TokenLogprobs | None] = [None] * len(ids) if submit.prompt_logprobs >= 0 else []
    return Prompt(ids, text, [max(0, at - before) for at in offsets], logprobs)


# ---------------------------------------------------------------- the two endpoints

async def _prepare_chat(service: Service, body: Mapping[str, Any], size: int) -> Prepared:
    refuse_unsupported(body, REFUSED_OF_CHAT)
    messages, most = body.get("messages"), service.ready.context_per_slot
    if isinstance(messages, list) and len(messages) > most:
        raise bad("messages", f"messages has {len(messages)} entries; at most {most}, the tokens of the context, are taken.")
    ask = convert(body, ChatRequest)
    if ask.top_logprobs and not ask.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs: true.")
    template = service.model.template
    try:
        text = await service.off_loop(size, lambda: template.render([flatten(m) for m in chat_messages(ask)]))
    except TemplateError as e:
        raise bad("messages", str(e)) from None
    return Prepared(ask, await encode(service, [text], add_special=False), [text], ask.top_logprobs if ask.logprobs else -1)


async def _prepare_completion(service: Service, body: Mapping[str, Any], size: int) -> Prepared:
    ask = convert(body, CompletionRequest)
    prompts = prompts_of(ask)
    if texts := [p for p in prompts if isinstance(p, str)]:  # then all are
        ids = await encode(service, texts, add_special=True)
    else:
        ids = [p for p in prompts if isinstance(p, list)]
        for prompt in ids:
            _check_length(service, len(prompt))
            check_ids("prompt", prompt, service.vocab)
    return Prepared(ask, ids, texts, _or_none(ask.logprobs), ask.echo)


CHAT = Endpoint(_prepare_chat, ChatShape)
COMPLETIONS = Endpoint(_prepare_completion, CompletionShape)


# ---------------------------------------------------------------- what is checked

def check_model(service: Service, body: Mapping[str, Any]) -> None:
    """A request may leave the model out; another one's name is a 404."""
    name = body.get("model", service.model.name)
    if name != service.model.name:
        raise ApiError(404, f"The model {str(name)[:100]!r} does not exist here.", code="model_not_found", param="model")


def _submits(service: Service, p: Prepared, arrived: float, deadline: float | None) -> list[Submit]:
    """The engine's requests for one HTTP call, all lengths checked. Raises ApiError."""
    ask, submits = p.ask, []
    stops_of(ask)
    if ask.stream and ask.prompt_logprobs is not None:
        raise bad("prompt_logprobs", "prompt_logprobs are told in whole answers only: leave out stream.")
    bias, defaults = logit_bias_of(ask, service.vocab), service.model.defaults
    for ids in p.prompts:
        limit = _max_tokens(service, p, ids)
        sampling = sampling_of(ask, defaults.sampling, defaults.stop_ids, bias, limit, p.logprobs)
        submits += service.book.submits(
            [ids], sampling=sampling, arrived=arrived, n=ask.n, cache_prompt=ask.cache_prompt, cache_salt=ask.cache_salt,
            lane=lane_of(ask.priority), deadline=deadline, prompt_logprobs=p.prompt_logprobs,
        )
    return submits


def _deadline(ask: Common, headers: Mapping[str, str], arrived: float) -> float | None:
    """The sooner of what the request and a header allow, on the clock that both processes share."""
    given = [s for s in (ask.timeout, seconds_in(TIMEOUT_HEADER, headers.get(TIMEOUT_HEADER))) if s is not None]
    return arrived + min(given) if given else None


def _max_tokens(service: Service, p: Prepared, ids: list[int]) -> int:
    """How many tokens the engine may make. Raises ApiError for prompts that can never be served, or not now."""
    _check_length(service, len(ids))
    asked = p.ask.max_tokens
    if isinstance(p.ask, ChatRequest):
        asked = asked if p.ask.max_completion_tokens is None else p.ask.max_completion_tokens
    elif asked is None:
        asked = COMPLETION_TOKENS
    if asked == 0 and not p.echo:
        raise bad("max_tokens", "max_tokens is 0, which only scores a prompt under echo; it must be 1 or more.")
    room = min(service.ready.context_per_slot, service.ready.max_servable) - len(ids)
    limit = room if asked is None else min(asked or 1, room)
    if service.book.over_budget(len(ids), limit, service.board.target.kv_cache_budget):
        raise overloaded(KV_BUDGET_EXCEEDED, service.retry_after(), "kv_budget")
    return limit


def _check_length(service: Service, tokens: int) -> None:
    """Could a prompt of so many tokens ever be served?"""
    context, servable = service.ready.context_per_slot, service.ready.max_servable
    if not tokens:
        raise bad("prompt", "Empty prompt: request has no input tokens to process.")
    if tokens >= context:
        raise too_long(tokens, context)
    if tokens >= servable:
        message = f"The prompt has {tokens} tokens; the KV cache of this server can hold rows of {servable} tokens at most."
        raise ApiError(400, message, code="kv_impossible", reason="kv_impossible")


def too_long(tokens: int | str, context: int) -> ApiError:
    message = f"This model's context is {context} tokens; the prompt has {tokens} and one must be left to generate."
    return ApiError(400, message, code="context_length", reason="context_length", param="prompt")


async def encode(service: Service, texts: Sequence[str], add_special: bool) -> list[list[int]]:
    """Ids of texts, off the loop if long; refused at once where even the longest tokens could not make one fit."""
    tokenizer, context = service.model.tokenizer, service.ready.context_per_slot
    sizes = [len(text.encode()) for text in texts]
    least = -(-max(sizes) // tokenizer.longest_piece)
    if least >= context:
        raise too_long(f"at least {least}", context)
    return await service.off_loop(sum(sizes), lambda: [tokenizer.encode(text, add_special) for text in texts])


def _rows_asked(body: Mapping[str, Any]) -> int:
    """n for each prompt, before anything is validated: what is no sensible number counts as one."""
    n, prompt = body.get("n", 1), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * (n if isinstance(n, int) and 1 <= n <= MAX_CHOICES else 1)


def _check_rows(service: Service, rows: int) -> None:
    if rows > (most := service.board.envelope.max_batch_size[1]):
        message = f"n times the prompt's texts are {rows} choices; this server runs at most {most} rows at once."
        raise bad("n", message)


def _is_retry(headers: Mapping[str, str]) -> bool:
    """The official clients say which try this is."""
    return headers.get("x-stainless-retry-count", "0") not in ("0", "")


def _or_none(count: int | None) -> int:
    """How many logprobs, in the engine's words."""
    return -1 if count is None else count
