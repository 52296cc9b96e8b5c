"""What a model says about generating with it: when text ends, and which sampling values to use where a request gives none.

`generation_config.json` of a model directory; a GGUF file names its end tokens in its own metadata (see tokenizer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir_server.model.files import hf_config, read_json
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
    ends = _ids(config.get("eos_token_id")) or _ids(hf_config(model).get("eos_token_id")) or ()
    sampling = {k: kind(config[k]) for k, kind in SAMPLING.items() if isinstance(config.get(k), int | float)}
    if config.get("do_sample") is False:
        sampling = {"temperature": 0.0}
    return GenerationDefaults(tuple(dict.fromkeys((*ends, *tokenizer.eos_ids))), sampling)


def _ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is an id, a list of ids, or null."""
    return tuple(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
