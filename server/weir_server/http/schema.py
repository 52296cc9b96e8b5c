"""OpenAI requests: shapes, ranges, and what is refused by name. JSON object in, `Ask` out; every error names its parameter.

null counts as absent. Unknown fields are ignored, as OpenAI's own clients expect; fields whose meaning we know and don't
have are refused, because an answer that silently ignores them would be wrong.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from weir_server.http.errors import ApiError, bad
from weir_server.link.messages import Sampling

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Stop = Annotated[str, Meta(min_length=1)]
MAX_STOPS, MAX_LOGPROBS, MAX_CHOICES, MAX_BIASES = 16, 20, 1024, 1024


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions share. None = the model's own default, or ours."""

    model: str | None = None
    max_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: Int64 | None = None
    stop: Stop | list[Stop] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: Natural = 0
    logit_bias: dict[str, float] = {}
    cache_prompt: bool = True
    cache_salt: str = ""
    priority: Literal["high", "normal", "low"] | Int64 = 0
    timeout: Seconds | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0


class CompletionRequest(Common, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (),
    "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structured_outputs": (), "grammar": ("",),
}  # fmt: skip
"""Field → values that mean "not asked for"."""
REFUSED_OF_CHAT: Mapping[str, tuple[Any, ...]] = {"echo": (False,)}
LANES = {"high": 0, "normal": 1, "low": 2}

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request, null members left out. Half of a surrogate pair is no JSON (RFC 8259 §8.2)."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise bad(None, f"The body is not valid JSON: {e}.") from None
    if not isinstance(body, dict):
        raise bad(None, "The body must be a JSON object.")
    return {k: v for k, v in body.items() if v is not None}


def refuse_unsupported(body: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]] = REFUSED) -> None:
    for name, harmless in refused.items():
        if name in body and body[name] not in harmless:
            raise bad(name, f"{name} is not available yet in this server.")


T = TypeVar("T")


def convert(body: Mapping[str, Any], kind: type[T]) -> T:
    """`body` as `kind`. Raises ApiError 400 that names the parameter."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as e:
        raise _explain(str(e)) from None


def _explain(message: str) -> ApiError:
    """msgspec's "Expected `int`, got `str` - at `$.seed`" as ours: parameter first."""
    text, _, where = message.partition(" - at `$")
    param = where.rstrip("`").lstrip(".") or None
    if missing := re.search(r"missing required field `(\w+)`", text):
        return bad(missing[1], f"{missing[1]} is required.")
    return bad(param.split("[")[0] if param else None, f"{param or 'The body'}: {text[0].lower()}{text[1:]}.")


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages, checked: known roles, content of text. Raises ApiError that names message and part."""
    if not request.messages:
        raise bad("messages", "messages is empty.")
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        if (role := message.get("role")) not in ROLES:
            raise bad(f"{where}.role", f"{where}.role is {_short(role)}; known roles are {', '.join(ROLES)}.")
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                _check_part(f"{where}.content[{j}]", part)
        elif content is not None and not isinstance(content, str):
            raise bad(f"{where}.content", f"{where}.content must be a string, a list of parts, or null.")
    return request.messages


def _check_part(where: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise bad(where, f"{where} is of type {_short(kind)}; this model takes text only.")
    if not isinstance(part.get("text"), str):
        raise bad(f"{where}.text", f"{where}.text must be a string.")


def stops_of(request: Common) -> tuple[str, ...]:
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stops) > MAX_STOPS:
        raise bad("stop", f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed.")
    return stops


def lane_of(priority: str | int) -> int:
    """The queue's lane, 0 first. Integers as in vLLM: what is lower is served earlier, 0 is normal."""
    if isinstance(priority, str):
        return LANES[priority]
    return 0 if priority < 0 else 1 if priority == 0 else 2


def seconds_in(name: str, text: str | None) -> float | None:
    """A number of seconds from a header. Raises ApiError."""
    if text is None:
        return None
    try:
        return msgspec.convert(text, Seconds, strict=False)
    except msgspec.ValidationError:
        raise bad(name, f"{name} is {_short(text)}; it must be a number of seconds above 0.") from None


def sampling_of(
    request: Common, defaults: Mapping[str, float], stop_ids: tuple[int, ...], bias: dict[int, float], max_tokens: int,
    logprobs: int,
) -> Sampling:  # fmt: skip
    """What the engine is told. `max_tokens` and `bias` are resolved; a seed that was not given is drawn here."""

    def value(name: str, ours: float) -> Any:
        given = getattr(request, name)
        return defaults.get(name, ours) if given is None else given

    if request.min_tokens > max_tokens:
        raise bad("min_tokens", f"min_tokens {request.min_tokens} is above the {max_tokens} tokens that may be generated.")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=value("temperature", 1.0),
        top_k=max(0, int(value("top_k", 0))),
        top_p=value("top_p", 1.0),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=random.getrandbits(63) if request.seed is None else request.seed,
        stop_ids=() if request.ignore_eos else stop_ids,
        logit_bias=bias,
        logprobs=logprobs,
    )


def logit_bias_of(request: Common, vocab: int) -> dict[int, float]:
    if len(request.logit_bias) > MAX_BIASES:
        raise bad("logit_bias", f"logit_bias has {len(request.logit_bias)} entries; at most {MAX_BIASES} are allowed.")
    out = {}
    for key, bias in request.logit_bias.items():
        if not re.fullmatch(r"\d{1,18}", key, re.ASCII) or int(key) >= vocab:
            raise bad("logit_bias", f"logit_bias: {_short(key)} is no token id of this model (0 to {vocab - 1}).")
        if not -100 <= bias <= 100 or math.isnan(bias):
            raise bad("logit_bias", f"logit_bias: the bias of {key} must lie between -100 and 100.")
        out[int(key)] = bias
    return out


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, one or several, each a text or a list of ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(p) for p in prompt}
    if len(kinds) != 1:
        raise bad("prompt", "prompt is empty." if not prompt else "prompt mixes texts, ids and lists.")
    prompts: list[Any] = [prompt] if kinds == {int} else prompt
    for ids in prompts:
        if not ids and ids != "":
            raise bad("prompt", "prompt has an empty list of ids.")
    return prompts


def check_ids(param: str, ids: list[int], vocab: int) -> None:
    for i in ids:
        if not 0 <= i < vocab:
            raise bad(param, f"{param}: {i} is no token id of this model (0 to {vocab - 1}).")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
