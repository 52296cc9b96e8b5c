"""POST /v1/chat/completions and /v1/completions.

The order of checks is the cost of refusing: size limit and JSON, queue, then shapes, templates, tokens, lengths.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from weir_server.http.errors import ApiError, bad, json_response, overloaded
from weir_server.http.keys import SERVICE
from weir_server.http.live import Call
from weir_server.http.schema import (
    MAX_CHOICES,
    ChatRequest,
    Common,
    CompletionRequest,
    chat_messages,
    check_ids,
    convert,
    logit_bias_of,
    parse_body,
    prompts_of,
    refuse_unsupported,
    sampling_of,
    stops_of,
)
from weir_server.http.service import Service
from weir_server.http.shapes import ChatShape, CompletionShape, Shape
from weir_server.http.sse import stream
from weir_server.link.messages import KV_BUDGET_EXCEEDED, Submit
from weir_server.text.template import TemplateError, flatten

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where none is given (OpenAI's default)."""
LABEL = re.compile(r"[\w.:\-]{1,128}", re.ASCII)


Prepared = tuple[Common, list[list[int]], int]
"""The request, its prompts as ids, and how many logprobs it wants (-1: none)."""
Prepare = Callable[[Service, Mapping[str, Any], int], Awaitable[Prepared]]
"""(service, body, size of the body in bytes) → Prepared. Raises ApiError."""


async def chat(request: web.Request) -> web.StreamResponse:
    return await _answer(request, _prepare_chat, ChatShape)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, _prepare_completion, CompletionShape)


async def _prepare_chat(service: Service, body: Mapping[str, Any], size: int) -> Prepared:
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
    ids = await encode(service, [text], add_special=False)
    return ask, ids, ask.top_logprobs if ask.logprobs else -1


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
    return ask, ids, -1 if ask.logprobs is None else ask.logprobs


async def _answer(request: web.Request, prepare: Prepare, shape_of: type[Shape]) -> web.StreamResponse:
    service = request.app[SERVICE]
    call, ask, logprobs = await _accept(service, request, prepare)
    shape = shape_of(call.name, service.model.name, service.model.tokenizer, logprobs >= 0)
    service.queue(call, stops_of(ask))
    try:
        return await _deliver(request, call, shape, ask)
    finally:
        service.leave(call)


async def _accept(service: Service, request: web.Request, prepare: Prepare) -> tuple[Call, Common, int]:
    """The call to queue, its request and its logprobs. Raises ApiError for whatever is refused, which is counted here."""
    arrived, retry, rows = service.now(), _is_retry(request), 1
    try:
        raw = await read_json_body(request)
        body = parse_body(raw)
        rows = _rows_asked(body)
        _check_rows(service, rows)
        service.check_queue(rows)
        refuse_unsupported(body)
        check_model(service, body)
        ask, prompts, logprobs = await prepare(service, body, len(raw))
        submits = _submits(service, ask, prompts, logprobs, arrived)
        service.check_queue(rows)  # others may have come while this one was tokenised
    except ApiError as e:
        service.refuse(e.reason, rows, retry)
        raise
    label = request.headers.get("X-Request-Id", "")
    return Call(
        uuid.uuid4().hex, label if LABEL.fullmatch(label) else None, arrived, submits, retry, service.retry_after
    ), ask, logprobs  # fmt: skip


async def _deliver(request: web.Request, call: Call, shape: Shape, ask: Common) -> web.StreamResponse:
    await call.until_started()
    if not call.started and (failure := call.failure()):
        raise failure
    if ask.stream:
        try:
            return await stream(request, call, shape, bool(ask.stream_options and ask.stream_options.include_usage))
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client took nothing for too long") from None
    await call.until_done()
    if failure := call.failure():
        raise failure
    answer = json_response(shape.whole(call))
    answer.headers["X-Request-Id"] = call.label or call.name
    return answer


async def read_json_body(request: web.Request) -> bytes:
    """The body, within the limit (the framework raises beyond it), if it says it is JSON or says nothing."""
    if request.content_type not in ("application/json", "application/octet-stream"):
        raise ApiError(415, f"Content-Type is {request.content_type}; it must be application/json.")
    return await request.read()


def check_model(service: Service, body: Mapping[str, Any]) -> None:
    """A request may leave the model out; another one's name is a 404."""
    name = body.get("model", service.model.name)
    if name != service.model.name:
        raise ApiError(404, f"The model {str(name)[:100]!r} does not exist here.", code="model_not_found", param="model")


def _submits(service: Service, ask: Common, prompts: list[list[int]], logprobs: int, arrived: float) -> list[Submit]:
    """The engine's requests for one HTTP call, all lengths checked. Raises ApiError."""
    stops_of(ask)
    bias = logit_bias_of(ask, service.vocab)
    defaults, submits = service.model.defaults, []
    for ids in prompts:
        limit = _max_tokens(service, ask, ids)
        sampling = sampling_of(ask, defaults.sampling, defaults.stop_ids, bias, limit, logprobs)
        submits += service.book.submits(
            [ids], sampling=sampling, arrived=arrived, n=ask.n, cache_prompt=ask.cache_prompt, cache_salt=ask.cache_salt
        )
    return submits


def _max_tokens(service: Service, ask: Common, ids: list[int]) -> int:
    """How many tokens may follow this prompt. Raises ApiError for prompts that can never be served, or not now."""
    _check_length(service, len(ids))
    asked = ask.max_tokens
    if isinstance(ask, ChatRequest):
        asked = ask.max_completion_tokens or ask.max_tokens
    elif asked is None:
        asked = COMPLETION_TOKENS
    room = min(service.ready.context_per_slot, service.ready.max_servable) - len(ids)
    limit = room if asked is None else min(asked, room)
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


def _is_retry(request: web.Request) -> bool:
    """The official clients say which try this is."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("0", "")
