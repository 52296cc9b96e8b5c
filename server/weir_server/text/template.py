"""Chat templates: messages → prompt text, by the template that the model brings.

Templates are programs from a model file, so they run in jinja2's immutable sandbox, with what templates in the wild use
(`raise_exception`, `tojson`, `strftime_now`, break and continue), as transformers' `chat_template_utils.py` has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weir_server.model.files import read_gguf_metadata, read_json


class TemplateError(Exception):
    """These messages can't be made a prompt; the sentence is for the client (400)."""


def find_template(model: Path) -> str | None:
    """The model's template: chat_template.jinja wins over tokenizer_config.json (a string, or named ones with a `default`).

    Raises ModelError where a file of the model is unreadable.
    """
    if not model.is_dir():
        return read_gguf_metadata(model).metadata.get("tokenizer.chat_template")
    if (own := model / "chat_template.jinja").is_file():
        return own.read_text(encoding="utf-8")
    config = model / "tokenizer_config.json"
    found = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda fmt: now().strftime(fmt)
    return env


class ChatTemplate:
    """`source` None: the model has no template, and every call says so."""

    def __init__(self, source: str | None, bos: str = "", eos: str = "", now: Callable[[], datetime] = datetime.now) -> None:
        self._problem = "This model has no chat template; use /v1/completions."
        self._template: jinja2.Template | None = None
        self._names = {"bos_token": bos, "eos_token": eos}
        if source is not None:
            try:
                self._template = _environment(now).from_string(source)
            except jinja2.TemplateSyntaxError as e:
                self._problem = f"The chat template of this model cannot be read: {e.message}."

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt up to where the assistant begins to speak. Raises TemplateError."""
        if self._template is None:
            raise TemplateError(self._problem)
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except TemplateError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as e:
            raise TemplateError(f"The chat template of this model cannot take these messages: {e}") from None


def flatten(message: Mapping[str, Any]) -> dict[str, Any]:
    """One OpenAI message as templates expect it: content one string, `developer` as `system`.

    Content that is null, absent or [] is an empty string: the turn stays. `message["content"]`, where a list, must hold
    text parts only (checked by the caller).
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {**{k: v for k, v in message.items() if v is not None}, "role": role, "content": content or ""}
