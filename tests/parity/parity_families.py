"""Tiny random checkpoints of every family that is served: one row each, over transformers' own classes.

`make` gives a model whose answers differ from token to token (weights larger than at initialisation). Windows and contexts
are odd on purpose: a window is no multiple of a page, and shorter than the prompts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


class FamilyRow(NamedTuple):
    """`name` with a suffix after a dash is a variant of one family. `classes`: transformers' config and model."""

    name: str
    classes: str
    config: dict[str, Any]
    gguf: str | None = None  # general.architecture of its GGUF files, where it has any

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]


FAMILIES = [
    FamilyRow("llama", "Llama", {}, "llama"),
    FamilyRow(
        "llama-gqa3", "Llama",
        {"num_attention_heads": 6, "hidden_size": 96, "head_dim": 32, "tie_word_embeddings": True}, "llama",
    ),
    FamilyRow("mistral", "Mistral", {"sliding_window": 23, "head_dim": 32}),
    FamilyRow("mistral-full", "Mistral", {"sliding_window": None}),
    FamilyRow("qwen2", "Qwen2", {"use_sliding_window": False, "sliding_window": 16}, "qwen2"),
    FamilyRow(
        "qwen2-hybrid", "Qwen2",
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    FamilyRow("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, "qwen3"),
    FamilyRow(
        "gemma3", "Gemma3Text",
        {
            "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 19, "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    FamilyRow(  # as llama.cpp knows it: every sixth layer is full, queries are scaled by the head's size
        "gemma3-capped", "Gemma3Text",
        {
            "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 33, "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 20.0,
        },
        "gemma3",
    ),
]  # fmt: skip

ROWS = {row.name: row for row in FAMILIES}


def make(row: FamilyRow | str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model, float32, eager attention."""
    import transformers

    row = ROWS[row] if isinstance(row, str) else row
    stem = "Gemma3ForCausalLM" if row.classes == "Gemma3Text" else f"{row.classes}ForCausalLM"
    config = getattr(transformers, f"{row.classes}Config")(**(SIZES | {"tie_word_embeddings": False} | row.config | changes))
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = getattr(transformers, stem)(config).eval()
    offset = 1.0 if row.family == "gemma3" else 0.0  # its norms multiply by one more than is stored
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.15)
            elif name.endswith("bias"):
                p.normal_(0, 0.5)
            else:
                p.uniform_(0.5 - offset, 1.5 - offset)
    return model


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    return make("llama", seed, **changes)


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def reference_tokens(model: Any, tokens: list[int], n: int) -> list[int]:
    """`n` greedy tokens after `tokens`."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long), max_new_tokens=n,
            min_new_tokens=n, do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return out[0, len(tokens) :].tolist()


def prompt(n: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 500, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
