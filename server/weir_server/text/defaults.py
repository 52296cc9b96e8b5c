"""What a model says about generating with it: when text ends, and which sampling values to use where a request gives none.

`generation_config.json` of a model directory; a GGUF file names its end tokens in its own metadata (see tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir_server.model.files import ModelError, hf_config, read_json
from weir_server.text.tokenizer import Tokenizer

SAMPLING = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


@dataclass(frozen=True)
class GenerationDefaults:
    """`stop_ids` end a row; `sampling` holds only what the model's authors wrote down."""

    stop_ids: tuple[int, ...]
    sampling: Mapping[str, float] = field(default_factory=dict)


def load_defaults(model: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """Raises ModelError where a file of the model is unreadable."""
    if not model.is_dir():
        return GenerationDefaults(tokenizer.eos_ids)
    path = model / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    ends = _ids(config, path) or _ids(hf_config(model), model / "config.json")
    sampling = {k: kind(config[k]) for k, kind in SAMPLING.items() if isinstance(config.get(k), int | float)}
    if config.get("do_sample") is False:
        sampling = {"temperature": 0.0}
    return GenerationDefaults(tuple(dict.fromkeys((*ends, *tokenizer.eos_ids))), sampling)


def _ids(config: Mapping[str, Any], where: Path) -> tuple[int, ...]:
    """`eos_token_id` is an id, a list of ids, or null."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{where} sets eos_token_id = {value!r}, which is no token id and no list of them.")
    return tuple(ids)
