"""`weir-server run` and `weir-server chat`: one answer, or a conversation, by the path that every chat request takes.

Each turn is the JSON of a chat request, accepted, queued and streamed as one that came over HTTP, with the engine in this
process and one slot: greedy text is what the server answers, byte for byte. Prompts are prefilled 2,048 tokens at a time;
`chat` keeps the KV of what was said, `run` looks nothing up.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer

from weir_server.cli.boot import boot_of, name_of
from weir_server.cli.flags import OPERATION, EngineFlags, LoadFlags, ModelArgument, option, with_flags
from weir_server.cli.serve import log_to_stderr
from weir_server.http.engine_client import EngineFailed
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot

CHUNK = 2048
ANSWER = "Answer"
HINT = "Ctrl-D ends, Ctrl-C stops an answer, /new begins a new conversation."


@dataclass(frozen=True, kw_only=True)
class TalkFlags(LoadFlags):
    """How to answer. What is None is left to the model's own defaults."""

    system: Annotated[str | None, option(ANSWER, "--system", help="What the model is told first.")] = None
    max_tokens: Annotated[
        int | None, option(ANSWER, "--max-tokens", "-n", min=1, help="Default: up to the context's end.")
    ] = None
    temperature: Annotated[
        float | None, option(ANSWER, "--temperature", min=0.0, max=100.0, help="0 is greedy. Default: the model's.")
    ] = None
    top_p: Annotated[float | None, option(ANSWER, "--top-p", help="Default: the model's.")] = None
    seed: Annotated[int | None, option(ANSWER, "--seed", help="Default: another one for each answer.")] = None
    log_level: Annotated[str, option(OPERATION, "--log-level", help="debug, info, warning or error.")] = "warning"

    def request(self, messages: list[dict[str, str]]) -> bytes:
        """The JSON of a chat request."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        given = {k: getattr(self, k) for k in ("max_tokens", "temperature", "top_p", "seed")}
        try:
            return orjson.dumps({"messages": said + messages, "stream": True, **given})
        except orjson.JSONEncodeError as e:  # bytes that are no UTF-8 reach us as half surrogate pairs
            raise UserError(f"What was said cannot be sent: {e}.") from None

    def boot(self, model: str, prompt_cache: bool) -> Boot:
        names = LoadFlags.__dataclass_fields__
        load = {k: v for k, v in asdict(self).items() if k in names}
        flags = EngineFlags(**load, no_batch=True, prefill_chunk_size=CHUNK, no_prompt_cache=not prompt_cache)
        return msgspec.structs.replace(boot_of(model, flags), measure=False)


@with_flags(TalkFlags)
def run(
    model: ModelArgument,
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to answer. Default: what stdin has.", rich_help_panel=ANSWER)
    ] = None,
    flags: TalkFlags,
) -> None:
    """Answer one prompt on stdout."""
    log_to_stderr(flags.log_level)
    text = _stdin() if prompt is None else prompt
    with Talk(flags, model, prompt_cache=False) as talk:
        talk.turn([{"role": "user", "content": text}], _say)
    if sys.stdout.isatty():
        _say("\n")


@with_flags(TalkFlags)
def chat(model: ModelArgument, *, flags: TalkFlags) -> None:
    """Talk with a model."""
    log_to_stderr(flags.log_level)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines
    with Talk(flags, model, prompt_cache=True) as talk:
        person = sys.stdin.isatty()
        if person:
            print(f"{talk.name}. {HINT}")
        messages: list[dict[str, str]] = []
        while (line := _ask("> " if person else "")) is not None:
            if line == "/new":
                messages = []
            elif line:
                messages = _exchange(talk, [*messages, {"role": "user", "content": line}])
        if person:
            print()


def _exchange(talk: Talk, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """One question and its answer: the conversation so far. What cannot be answered is taken out of it."""
    answer: list[str] = []

    def hear(text: str) -> None:
        answer.append(text)
        _say(text)

    try:
        talk.turn(messages, hear)
    except UserError as e:
        print(f"{e} /new begins a new conversation.", file=sys.stderr)
        return messages[:-1]
    except KeyboardInterrupt:
        pass  # what was said until then counts
    _say("\n")
    return [*messages, {"role": "assistant", "content": "".join(answer)}]


def _ask(prompt: str) -> str | None:
    """The next line, or None at the end."""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None
    except UnicodeDecodeError as e:
        raise UserError(f"What was typed is no text: {e}.") from None


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as e:
        raise UserError(f"What stdin has is no text: {e}.") from None


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Talk:
    """A loaded model. The event loop runs during a turn only, so that between turns a person's Ctrl-C is plain."""

    def __init__(self, flags: TalkFlags, model: str, prompt_cache: bool) -> None:
        from weir_server.cli.inprocess import own_service

        self._flags, self._runner = flags, asyncio.Runner()
        boot = flags.boot(model, prompt_cache)
        self.name = name_of(path := Path(boot.model))
        self._context = own_service(boot, path, self.name)

    def __enter__(self) -> Talk:
        with contextlib.ExitStack() as stack:
            stack.callback(self._runner.close)
            self._service = self._runner.run(self._context.__aenter__())
            stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._runner:
            self._runner.run(self._context.__aexit__(None, None, None))

    def turn(self, messages: list[dict[str, str]], hear: Callable[[str], object]) -> None:
        """Raises UserError for what the server would refuse, EngineFailed for its own faults, KeyboardInterrupt on Ctrl-C."""
        self._runner.run(self._turn(self._flags.request(messages), hear))

    async def _turn(self, body: bytes, hear: Callable[[str], object]) -> None:
        from weir_server.http.ask import CHAT, accept
        from weir_server.http.errors import ApiError
        from weir_server.http.sse import turns

        async def read() -> bytes:
            return body

        try:
            asked = await accept(self._service, CHAT, read, {})
        except ApiError as e:
            raise (UserError if e.status < 500 else EngineFailed)(str(e)) from None
        self._service.queue(asked.call)
        try:
            async for objects in turns(asked.call, asked.shape):
                for heard in objects:
                    if "error" in heard:
                        raise EngineFailed(heard["error"]["message"])
                    for choice in heard["choices"]:
                        hear(choice["delta"].get("content") or "")
        finally:
            self._service.leave(asked.call)
