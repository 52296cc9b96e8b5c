"""The families of decoders that are served: one row each, saying what sets it apart from Llama. No torch.

Llama is the ground: RMSNorm, rotary grouped-query attention, SiLU-gated MLP (arXiv 2302.13971 §2.2). Everything that reads
models (config, loader, decoder) knows these differences and no family's name, so a new family of known differences costs a
row here and a row of tests/parity/parity_families.py, which holds it against transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]
"""A config by Hugging Face's names, whatever file it comes from."""


@dataclass(frozen=True, slots=True)
class Family:
    """`reads`: config fields that have a meaning here and would be refused elsewhere. `defaults`: what transformers takes
    for fields that config.json leaves out, where that differs from Llama and no tensor's shape would show it."""

    name: str  # as GGUF's general.architecture
    model_type: str  # as config.json's
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before they are rotated
    post_norms: bool = False  # RMSNorm behind attention and MLP too, before the residual takes them in
    activation: str = "silu"
    scaled_embedding: bool = False  # by sqrt(hidden)
    slides: Callable[[Fields, int], bool] | None = None  # whether layer i does, without layer_types
    window_is_opt_in: bool = False  # it counts only beside use_sliding_window = true
    local_rope: bool = False  # sliding layers turn by a base of their own, and unscaled
    norm_offset: float = 0.0  # to add to the norms' weights of a Hugging Face directory; GGUF files have it added
    interleaved: bool = False  # GGUF files hold the halves of each head of q and k interleaved
    gguf_derived: Callable[[Fields], dict[str, Any]] = lambda fields: {}  # fields that llama.cpp computes, not reads
    reads: frozenset[str] = frozenset()
    defaults: Fields = field(default_factory=dict)
    hf_names: Mapping[str, str] = field(default_factory=dict)  # piece → tensor of a layer, where loader.HF_LAYER has another


_WINDOW = frozenset({"sliding_window", "layer_types"})
_QWEN: dict[str, Any] = {
    "slides": lambda fields, i: i >= fields.get("max_window_layers", 28), "window_is_opt_in": True,
    "reads": _WINDOW | {"use_sliding_window"}, "defaults": {"max_position_embeddings": 32768},
}  # fmt: skip


def _gemma3_scale(fields: Fields) -> dict[str, Any]:
    """The largest one (62 layers) scales queries by hidden / heads, the others by the head's size: llama.cpp's gemma3.cpp."""
    if fields.get("num_hidden_layers") == 62:
        return {"query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]}
    return {}


_ROWS = (
    Family("llama", "llama", interleaved=True),
    Family(  # GGUF files of it say that they are llama
        "mistral", "mistral", slides=lambda fields, i: True, reads=frozenset({"sliding_window"}),
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    Family("qwen2", "qwen2", qkv_bias=True, **_QWEN),
    Family("qwen3", "qwen3", qk_norm=True, **{**_QWEN, "defaults": {**_QWEN["defaults"], "head_dim": 128}}),
    Family(
        "gemma3", "gemma3_text", qk_norm=True, post_norms=True, activation="gelu_tanh", scaled_embedding=True, local_rope=True,
        slides=lambda fields, i: (i + 1) % (fields.get("sliding_window_pattern") or 6) > 0, norm_offset=1.0,
        gguf_derived=_gemma3_scale,
        reads=_WINDOW | {"sliding_window_pattern", "query_pre_attn_scalar", "final_logit_softcapping"},
        defaults={
            "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
            "rope_theta": 1e6, "max_position_embeddings": 131072, "tie_word_embeddings": True,
        },
        hf_names={
            "mlp_norm": "pre_feedforward_layernorm.weight", "post_attn_norm": "post_attention_layernorm.weight",
            "post_mlp_norm": "post_feedforward_layernorm.weight",
        },
    ),
)  # fmt: skip

FAMILIES = {family.name: family for family in _ROWS}
