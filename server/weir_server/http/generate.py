"""POST /v1/chat/completions and /v1/completions.

The order of checks is the cost of refusing: size limit and JSON, queue, then shapes, templates, tokens, lengths.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from weir_server.http.errors import ApiError, bad, busy_response, json_response, overloaded
from weir_server.http.keys import SERVICE
from weir_server.http.live import Call
from weir_server.http.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    chat_messages,
    convert,
    lane,
    parse_body,
    prompts_of,
    refuse_unsupported,
    sampling_of,
    stops_of,
)
from weir_server.http.service import Busy, Service
from weir_server.http.shapes import ChatShape, CompletionShape, Shape
from weir_server.http.sse import stream
from weir_server.text.template import TemplateError, flatten

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where none is given (OpenAI's default)."""
LABEL = re.compile(r"[\w.:\-]{1,128}", re.ASCII)


async def chat(request: web.Request) -> web.StreamResponse:
    async def prepare(service: Service, body: Mapping[str, Any]) -> tuple[Common, list[list[int]], int]:
        ask = convert(body, ChatRequest)
        if ask.top_logprobs and not ask.logprobs:
            raise bad("top_logprobs", "top_logprobs needs logprobs: true.")
        messages = [flatten(m) for m in chat_messages(ask)]
        ids = await _chat_prompt(service, messages)
        return ask, [ids], ask.top_logprobs if ask.logprobs else -1

    return await _answer(request, prepare, ChatShape)


async def completions(request: web.Request) -> web.StreamResponse:
    async def prepare(service: Service, body: Mapping[str, Any]) -> tuple[Common, list[list[int]], int]:
        ask = convert(body, CompletionRequest)
        prompts = prompts_of(ask, service.vocab)
        encoded = [p if isinstance(p, list) else await encode(service, p, True, "prompt") for p in prompts]
        return ask, encoded, -1 if ask.logprobs is None else ask.logprobs

    return await _answer(request, prepare, CompletionShape)


Prepare = Callable[[Service, Mapping[str, Any]], Any]


async def _answer(request: web.Request, prepare: Prepare, shape_of: type[Shape]) -> web.StreamResponse:
    service = request.app[SERVICE]
    arrived = service.now()
    service.seen.retried += _is_retry(request)
    try:
        body = parse_body(await read_json_body(request))
        service.check_queue(_rows_asked(body))
        refuse_unsupported(body)
        check_model(service, body)
        ask, prompts, logprobs = await prepare(service, body)
        call = _call(service, request, ask, prompts, logprobs, arrived)
        service.check_queue(sum(s.n for s in call.submits))  # others may have come while this one was tokenised
    except Busy as e:
        return busy_response(e.retry_after)
    except ApiError as e:
        if e.reason in ("invalid", "context_length", "kv_impossible"):
            service.seen.refuse(e.reason, "none")
        elif e.reason == "kv_budget":
            service.seen.refuse(e.reason, "kv")
        raise
    shape = shape_of(call.name, service.model.name, service.model.tokenizer, logprobs >= 0)
    service.queue(call, stops_of(ask))
    try:
        return await _deliver(request, call, shape, ask)
    finally:
        service.leave(call)


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


def _call(
    service: Service, request: web.Request, ask: Common, prompts: Sequence[list[int]], logprobs: int, arrived: float
) -> Call:
    """The engine's requests for one HTTP call, all lengths checked. Raises ApiError."""
    rows = ask.n * len(prompts)
    most = service.board.envelope.max_batch_size[1]
    if rows > most:
        raise bad("n", f"{rows} choices are asked for; this server runs at most {most} rows at once.")
    stops_of(ask)
    submits = []
    for ids in prompts:
        limit = _max_tokens(service, ask, ids)
        sampling = sampling_of(
            ask, service.model.defaults.sampling, service.model.defaults.stop_ids, limit, service.vocab, logprobs
        )
        submits += service.book.submits(
            [ids], sampling=sampling, arrived=arrived, n=ask.n, priority=lane(ask.priority),
            cache_prompt=ask.cache_prompt, cache_salt=ask.cache_salt,
        )  # fmt: skip
    label = request.headers.get("X-Request-Id", "")
    return Call(uuid.uuid4().hex, label if LABEL.fullmatch(label) else None, arrived, submits)


def _max_tokens(service: Service, ask: Common, ids: list[int]) -> int:
    """How many tokens may follow this prompt. Raises ApiError for prompts that can never be served, or not now."""
    context, servable = service.ready.context_per_slot, service.ready.max_servable
    if not ids:
        raise bad("prompt", "Empty prompt: request has no input tokens to process.")
    if len(ids) >= context:
        raise too_long(len(ids), context)
    if len(ids) >= servable:
        message = f"The prompt has {len(ids)} tokens; the KV cache of this server can hold rows of {servable} tokens at most."
        raise ApiError(400, message, code="kv_impossible", reason="kv_impossible")
    if service.book.over_budget(len(ids), service.board.target.kv_cache_budget):
        raise overloaded("request_memory_budget_exceeded", service.retry_after(), "kv_budget")
    asked = ask.max_tokens
    if isinstance(ask, ChatRequest):
        asked = ask.max_completion_tokens or ask.max_tokens
    elif asked is None:
        asked = COMPLETION_TOKENS
    room = min(context, servable) - len(ids)
    return room if asked is None else min(asked, room)


def too_long(tokens: int | str, context: int) -> ApiError:
    message = f"This model's context is {context} tokens; the prompt has {tokens} and one must be left to generate."
    return ApiError(400, message, code="context_length", reason="context_length", param="prompt")


async def encode(service: Service, text: str, add_special: bool, param: str) -> list[int]:
    """Ids of a text, off the loop if long; refused at once where even the longest tokens could not make it fit."""
    size = len(text.encode())
    tokenizer, context = service.model.tokenizer, service.ready.context_per_slot
    least = -(-size // tokenizer.longest_piece)
    if least >= context:
        raise too_long(f"at least {least}", context)
    return await service.off_loop(size, lambda: tokenizer.encode(text, add_special))


async def _chat_prompt(service: Service, messages: list[dict[str, Any]]) -> list[int]:
    size = sum(len(m["content"]) for m in messages)
    try:
        text = await service.off_loop(size, lambda: service.model.template.render(messages))
    except TemplateError as e:
        raise bad("messages", str(e)) from None
    return await encode(service, text, False, "messages")


def _rows_asked(body: Mapping[str, Any]) -> int:
    """For the queue check, before anything is validated: what is no sensible number counts as one row."""
    n = body.get("n", 1)
    return n if isinstance(n, int) and 1 <= n <= 1024 else 1


def _is_retry(request: web.Request) -> bool:
    """The official clients say which try this is."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("0", "")
