"""What a Llama-family decoder is, from GGUF metadata or config.json. No torch.

Every field of a config either is understood, or is harmless, or refuses the model by name: a field that changes the
mathematics and is passed over in silence gives wrong answers that nobody notices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir_server.model.files import GgufHeader, ModelError

FAMILIES = ("llama",)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes in elements. `rope_divisors` (head_dim/2, or empty for none) divide the inverse frequencies."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rms_eps: float
    rope_theta: float
    rope_divisors: tuple[float, ...]
    tied: bool

    def inverse_frequencies(self) -> list[float]:
        """θ^(-2i/d), i < d/2, divided by the scaling. Source: RoFormer (arXiv 2104.09864) §3.2.2."""
        half = self.head_dim // 2
        divisors = self.rope_divisors or (1.0,) * half
        return [self.rope_theta ** (-2 * i / self.head_dim) / divisors[i] for i in range(half)]


# ---------------------------------------------------------------- Hugging Face

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,), "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,), "use_sliding_window": (False,), "sliding_window": (), "quantization_config": (),
    "num_local_experts": (0,), "num_experts": (0,), "attn_logit_softcapping": (), "final_logit_softcapping": (),
    "attention_multiplier": (), "embedding_multiplier": (1.0,), "residual_multiplier": (1.0,), "logits_scaling": (1.0,),
    "logit_scale": (1.0,), "qk_layernorm": (False,), "use_qk_norm": (False,), "no_rope_layers": (),
}  # fmt: skip
"""config.json fields that change the mathematics → the values under which they change nothing (absent is always one)."""


def from_hf(config: Mapping[str, Any], where: Path) -> DecoderConfig:
    """From config.json as `hf_config` gives it. Raises ModelError that names the field and its value."""
    family = _family(config.get("model_type"), where)
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise ModelError(f"{where} sets {key} = {config[key]!r}, which this server does not implement.")
    hidden, heads = _count(config, "hidden_size", where), _count(config, "num_attention_heads", where)
    head_dim = _count(config, "head_dim", where, hidden // heads)
    theta, divisors = _hf_rope(config, head_dim, where)
    return _checked(
        DecoderConfig(
            family=family, layers=_count(config, "num_hidden_layers", where), hidden=hidden, heads=heads,
            kv_heads=_count(config, "num_key_value_heads", where, heads), head_dim=head_dim,
            ffn=_count(config, "intermediate_size", where), vocab=_count(config, "vocab_size", where),
            context=_count(config, "max_position_embeddings", where, 2048),
            rms_eps=_positive(config, "rms_norm_eps", where, 1e-6), rope_theta=theta, rope_divisors=divisors,
            tied=bool(config.get("tie_word_embeddings", False)),
        ),
        where,
    )  # fmt: skip


def _hf_rope(config: Mapping[str, Any], head_dim: int, where: Path) -> tuple[float, tuple[float, ...]]:
    """Base and divisors. transformers 5 writes `rope_parameters`; before it were `rope_theta` and `rope_scaling`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = _positive(rope, "rope_theta", where, _positive(config, "rope_theta", where, 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError(f"{where} sets partial_rotary_factor = {rope['partial_rotary_factor']!r}, which is not implemented.")
    if kind == "default":
        return theta, ()
    if kind == "linear":
        return theta, (_positive(rope, "factor", where),) * (head_dim // 2)
    if kind == "llama3":
        return theta, _llama3_divisors(rope, theta, head_dim, where)
    raise ModelError(f"{where} asks for rope_type {kind!r}; implemented are default, linear and llama3.")


def _llama3_divisors(rope: Mapping[str, Any], theta: float, head_dim: int, where: Path) -> tuple[float, ...]:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended (Llama 3.1's scheme)."""
    factor, trained = _positive(rope, "factor", where), _positive(rope, "original_max_position_embeddings", where)
    low, high = _positive(rope, "low_freq_factor", where), _positive(rope, "high_freq_factor", where)
    divisors = []
    for i in range(head_dim // 2):
        turns = trained / (2 * math.pi * theta ** (2 * i / head_dim))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return tuple(divisors)


# ---------------------------------------------------------------- GGUF

def from_gguf(header: GgufHeader, rope_divisors: tuple[float, ...] = ()) -> DecoderConfig:
    """From GGUF metadata; `rope_divisors` are the values of the tensor rope_freqs.weight, if there is one."""
    meta, where = header.metadata, header.path
    family = _family(meta.get("general.architecture"), where)
    own = {k.removeprefix(family + "."): v for k, v in meta.items() if k.startswith(family + ".")}
    hidden, heads = _count(own, "embedding_length", where), _count(own, "attention.head_count", where)
    head_dim = _count(own, "attention.key_length", where, hidden // heads)
    neutral = {
        "attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,), "attention.sliding_window": (0,),
        "expert_count": (0,), "rope.scaling.type": ("none", "linear"), "logit_scale": (1.0,), "attention.scale": (),
        "attention.causal": (True,), "residual_scale": (1.0,), "embedding_scale": (1.0,),
    }  # fmt: skip
    for key, values in neutral.items():
        if key in own and own[key] not in values:
            raise ModelError(f"{where} sets {family}.{key} = {own[key]!r}, which this server does not implement.")
    if own.get("rope.scaling.type") == "linear":
        rope_divisors = (_positive(own, "rope.scaling.factor", where),) * (head_dim // 2)
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{where} has no tensor token_embd.weight.")
    return _checked(
        DecoderConfig(
            family=family, layers=_count(own, "block_count", where), hidden=hidden, heads=heads,
            kv_heads=_count(own, "attention.head_count_kv", where, heads), head_dim=head_dim,
            ffn=_count(own, "feed_forward_length", where),
            vocab=header.tensors["token_embd.weight"].shape[0],  # may be padded beyond the tokenizer's
            context=_count(own, "context_length", where),
            rms_eps=_positive(own, "attention.layer_norm_rms_epsilon", where, 1e-5),
            rope_theta=_positive(own, "rope.freq_base", where, 10000.0), rope_divisors=rope_divisors,
            tied="output.weight" not in header.tensors,
        ),
        where,
    )  # fmt: skip


# ---------------------------------------------------------------- checks

def _family(name: Any, where: Path) -> str:
    if name not in FAMILIES:
        raise ModelError(f"{where} is of the architecture {name!r}; served are {', '.join(FAMILIES)}.")
    return str(name)


def _positive(config: Mapping[str, Any], key: str, where: Path, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{where} does not say {key}.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{where} sets {key} = {value!r}, which is no positive number.")
    return float(value)


def _count(config: Mapping[str, Any], key: str, where: Path, default: int | None = None) -> int:
    value = _positive(config, key, where, default)
    if value != int(value):
        raise ModelError(f"{where} sets {key} = {value!r}, which is no whole number.")
    return int(value)


def _checked(c: DecoderConfig, where: Path) -> DecoderConfig:
    if c.heads % c.kv_heads:
        raise ModelError(f"{where} has {c.heads} attention heads, no multiple of its {c.kv_heads} KV heads.")
    if c.head_dim % 2:
        raise ModelError(f"{where} has head_dim {c.head_dim}; rotary embeddings need an even one.")
    if c.rope_divisors and len(c.rope_divisors) != c.head_dim // 2:
        raise ModelError(f"{where} has {len(c.rope_divisors)} rope divisors for head_dim {c.head_dim}.")
    return c
