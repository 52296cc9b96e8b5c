"""What a decoder is, from GGUF metadata or config.json. No torch.

Every field of a config either is understood, or is harmless, or refuses the model by name: a field that changes the
mathematics and is passed over in silence gives wrong answers that nobody notices. GGUF metadata is read into Hugging Face's
names first, so that there is one way from fields to a decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weir_server.contract import FULL, SLIDING
from weir_server.model.families import FAMILIES, Family
from weir_server.model.files import GgufHeader, ModelError, read_json


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `divisors` (head_dim/2, or empty for none) divide the inverse frequencies."""

    theta: float
    divisors: tuple[float, ...] = ()

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """θ^(-2i/d), i < d/2, divided by the scaling. Source: RoFormer (arXiv 2104.09864) §3.2.2."""
        divisors = self.divisors or (1.0,) * (head_dim // 2)
        return [self.theta ** (-2 * i / head_dim) / divisors[i] for i in range(head_dim // 2)]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes in elements. `window`: tokens that a sliding layer sees, the query's own included; None where none slides."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rms_eps: float
    tied: bool
    layer_types: tuple[str, ...]  # FULL or SLIDING for each layer
    window: int | None
    ropes: Mapping[str, Rope]  # by attention type
    attention_scale: float  # of the scores
    final_softcap: float | None  # logits = cap · tanh(logits / cap)

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def layers_of(self) -> dict[str, int]:
        """Layers of each attention type that there is."""
        return {kind: self.layer_types.count(kind) for kind in (FULL, SLIDING) if kind in self.layer_types}

    @property
    def ordinals(self) -> list[tuple[str, int]]:
        """For each layer its attention type and its index among the layers of that type."""
        return [(kind, self.layer_types[:i].count(kind)) for i, kind in enumerate(self.layer_types)]


# ---------------------------------------------------------------- Hugging Face

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "mlp_bias": (False,), "rope_interleaved": (False,), "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,), "sliding_window": (), "layer_types": (), "sliding_window_pattern": (),
    "attention_chunk_size": (), "use_bidirectional_attention": (False,), "quantization_config": (),
    "num_local_experts": (0,), "num_experts": (0,), "attn_logit_softcapping": (), "final_logit_softcapping": (),
    "query_pre_attn_scalar": (), "attention_multiplier": (), "embedding_multiplier": (1.0,), "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,), "logit_scale": (1.0,), "logits_soft_cap": (), "clip_qkv": (),
    "qk_layernorm": (False,), "use_qk_norm": (False,), "no_rope_layers": (),
}  # fmt: skip
"""config.json fields that change the mathematics → the values under which they change nothing (absent is always one). A
family may give one a meaning (Family.reads)."""

MOST_LAYERS = 4096
"""More than any decoder has: a broken config must not have us count to a billion."""

_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


def of_directory(path: Path) -> DecoderConfig:
    """Of a directory in the Hugging Face layout. Raises ModelError."""
    return from_hf(read_json(path / "config.json"), path / "config.json")


def from_hf(config: Mapping[str, Any], where: Path) -> DecoderConfig:
    """From config.json. A field that is null takes no default: some say so that there is no window. Raises ModelError."""
    family = _family("model_type", config.get("model_type"), where)
    fields = _Fields({k: v for k, v in {**family.defaults, **config}.items() if v is not None}, where)
    for key, neutral in _NEUTRAL.items():
        if key in fields.values and key not in family.reads and fields[key] not in neutral:
            raise _not_implemented(where, key, fields[key])
    for key in ("hidden_act", "hidden_activation"):
        if fields.get(key, _ACTIVATIONS[family.activation][0]) not in _ACTIVATIONS[family.activation]:
            raise _not_implemented(where, key, fields[key])
    return _decoder(family, fields, fields.count("vocab_size"), fields.flag("tie_word_embeddings"), {})


# ---------------------------------------------------------------- GGUF

_GGUF = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern", "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
"""GGUF's key (behind the architecture) → Hugging Face's."""


def from_gguf(header: GgufHeader, rope_divisors: tuple[float, ...] = ()) -> DecoderConfig:
    """From GGUF metadata; `rope_divisors` are the values of the tensor rope_freqs.weight, if there is one."""
    meta, where = header.metadata, header.path
    family = _family("general.architecture", meta.get("general.architecture"), where)
    own = {k.removeprefix(family.name + "."): v for k, v in meta.items() if k.startswith(family.name + ".")}
    if own.get("attention.sliding_window") == 0:
        del own["attention.sliding_window"]
    values = {ours: own[key] for key, ours in _GGUF.items() if key in own}
    fields = _Fields(values, where, {ours: f"{family.name}.{key}" for key, ours in _GGUF.items()})
    head_dim = _head_dim(fields)
    fields = replace(fields, values={**values, **family.gguf_derived(values)})
    neutral = {
        "attention.value_length": (head_dim,), "rope.dimension_count": (head_dim,), "rope.dimension_count_swa": (head_dim,),
        "attention.key_length_swa": (head_dim,), "attention.value_length_swa": (head_dim,),
        "expert_count": (0,), "rope.scaling.type": ("none", "linear"), "logit_scale": (1.0,), "attention.scale": (),
        "attention.causal": (True,), "residual_scale": (1.0,), "embedding_scale": (1.0,), "attn_logit_softcapping": (),
    }  # fmt: skip
    read = family.reads if not family.window_is_opt_in else frozenset[str]()  # llama.cpp knows no window of those
    neutral |= {key: () for key, ours in _GGUF.items() if ours in _NEUTRAL and ours not in read}
    for key, harmless in neutral.items():
        if key in own and own[key] not in harmless:
            raise _not_implemented(where, f"{family.name}.{key}", own[key])
    if own.get("rope.scaling.type") == "linear":
        rope_divisors = (_Fields(own, where).positive("rope.scaling.factor"),) * (head_dim // 2)
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{where} has no tensor token_embd.weight.")
    vocab = header.tensors["token_embd.weight"].shape[0]  # may be padded beyond the tokenizer's
    fields.count("max_position_embeddings")
    return _decoder(family, fields, vocab, "output.weight" not in header.tensors, {FULL: rope_divisors})


# ---------------------------------------------------------------- from fields to a decoder

@dataclass(frozen=True, slots=True)
class _Fields:
    """A config by Hugging Face's names. `names`: what the file itself calls them, for messages."""

    values: Mapping[str, Any]
    where: Path
    names: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def positive(self, key: str, default: float | None = None) -> float:
        value = default if self.get(key) is None else self[key]
        if value is None:
            raise ModelError(f"{self.where} does not say {self.names.get(key, key)}.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.where} sets {self.names.get(key, key)} = {value!r}, which is no positive number.")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        self.positive(key, default)
        return self.whole(key, default)

    def table(self, key: str) -> dict[str, Any]:
        """An object, empty where it is left out."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.where} sets {self.names.get(key, key)} = {value!r}, which is no object.")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where} sets {self.names.get(key, key)} = {value!r}, which is neither true nor false.")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = default if self.get(key) is None else self[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value != int(value):
            raise ModelError(f"{self.where} sets {self.names.get(key, key)} = {value!r}, which is no whole number.")
        return int(value)


def _decoder(
    family: Family, fields: _Fields, vocab: int, tied: bool, divisors: Mapping[str, tuple[float, ...]]
) -> DecoderConfig:
    """`divisors` of the rotary frequencies by attention type, where a file holds them ready."""
    heads, head_dim = fields.count("num_attention_heads"), _head_dim(fields)
    layer_types, window = _attention(family, fields)
    hidden = fields.count("hidden_size")
    config = DecoderConfig(
        family=family.name, hidden=hidden, heads=heads, kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=head_dim, ffn=fields.count("intermediate_size"), vocab=vocab,
        context=fields.count("max_position_embeddings", 2048), rms_eps=fields.positive("rms_norm_eps", 1e-6), tied=tied,
        layer_types=layer_types, window=window, ropes=_ropes(family, fields, head_dim, divisors),
        attention_scale=fields.positive("query_pre_attn_scalar", head_dim) ** -0.5,
        final_softcap=fields.positive("final_logit_softcapping") if "final_logit_softcapping" in fields.values else None,
    )  # fmt: skip
    return _checked(config, fields.where)


def _head_dim(fields: _Fields) -> int:
    return fields.count("head_dim", fields.count("hidden_size") // fields.count("num_attention_heads"))


def _attention(family: Family, fields: _Fields) -> tuple[tuple[str, ...], int | None]:
    """Each layer's attention type, and the window of those that slide."""
    layers, slides, given = fields.count("num_hidden_layers"), family.slides, fields.get("layer_types")
    if layers > MOST_LAYERS:
        raise ModelError(f"{fields.where} sets num_hidden_layers = {layers}, more than the {MOST_LAYERS} that are served.")
    window, types = None, (FULL,) * layers
    if slides and fields.get("sliding_window") and (fields.get("use_sliding_window") or not family.window_is_opt_in):
        window = fields.count("sliding_window")
        for key in ("sliding_window_pattern", "max_window_layers"):
            fields.whole(key, 1)
        types = tuple(SLIDING if slides(fields.values, i) else FULL for i in range(layers))
    if given is not None:
        if not isinstance(given, list) or len(given) != layers or not set(given) <= {FULL, *((SLIDING,) if window else ())}:
            raise _not_implemented(fields.where, "layer_types", given)
        types = tuple(given)
    return types, window if SLIDING in types else None


def _ropes(family: Family, fields: _Fields, head_dim: int, divisors: Mapping[str, tuple[float, ...]]) -> dict[str, Rope]:
    """By attention type. transformers 5 writes `rope_parameters` (by type, where there are several kinds); before it were
    `rope_theta`, `rope_scaling` and, for sliding layers of families that tell them apart, `rope_local_base_freq`."""
    given = fields.table("rope_parameters")
    by_type = any(kind in given for kind in (FULL, SLIDING))
    if family.local_rope and given and not by_type:
        raise _not_implemented(fields.where, "rope_parameters", given)
    full = {"rope_theta": fields.positive("rope_theta", 10000.0), **fields.table("rope_scaling")}
    full |= _Fields(given, fields.where).table(FULL) if by_type else given
    ropes = {FULL: _rope(full, head_dim, fields.where, divisors.get(FULL, ()))}
    if family.local_rope:
        local = {"rope_theta": fields.positive("rope_local_base_freq", 10000.0), **_Fields(given, fields.where).table(SLIDING)}
        ropes[SLIDING] = _rope(local, head_dim, fields.where, divisors.get(SLIDING, ()))
    else:
        ropes[SLIDING] = ropes[FULL]
    return ropes


def _rope(rope: Mapping[str, Any], head_dim: int, where: Path, divisors: tuple[float, ...]) -> Rope:
    fields = _Fields(rope, where)
    theta, kind = fields.positive("rope_theta"), rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise _not_implemented(where, "partial_rotary_factor", rope["partial_rotary_factor"])
    if kind == "default":
        return Rope(theta, divisors)
    if kind == "linear":
        return Rope(theta, (fields.positive("factor"),) * (head_dim // 2))
    if kind == "llama3":
        return Rope(theta, _llama3_divisors(fields, theta, head_dim))
    raise ModelError(f"{where} asks for rope_type {kind!r}; implemented are default, linear and llama3.")


def _llama3_divisors(rope: _Fields, theta: float, head_dim: int) -> tuple[float, ...]:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended (Llama 3.1's scheme)."""
    factor, trained = rope.positive("factor"), rope.positive("original_max_position_embeddings")
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    divisors = []
    for i in range(head_dim // 2):
        turns = trained / (2 * math.pi * theta ** (2 * i / head_dim))
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - share) / factor + share))
    return tuple(divisors)


# ---------------------------------------------------------------- refusals

def _family(key: str, name: Any, where: Path) -> Family:
    if key == "model_type":
        known = {family.model_type: family for family in FAMILIES.values()}
    else:
        known = FAMILIES
    if not isinstance(name, str) or name not in known:
        raise ModelError(f"{where} is of the architecture {name!r}; served are {', '.join(known)}.")
    return known[name]


def _not_implemented(where: Path, key: str, value: Any) -> ModelError:
    return ModelError(f"{where} sets {key} = {value!r}, which this server does not implement.")


def _checked(c: DecoderConfig, where: Path) -> DecoderConfig:
    if c.heads % c.kv_heads:
        raise ModelError(f"{where} has {c.heads} attention heads, no multiple of its {c.kv_heads} KV heads.")
    if c.head_dim % 2:
        raise ModelError(f"{where} has head_dim {c.head_dim}; rotary embeddings need an even one.")
    for rope in c.ropes.values():
        if rope.divisors and len(rope.divisors) != c.head_dim // 2:
            raise ModelError(f"{where} has {len(rope.divisors)} rope divisors for head_dim {c.head_dim}.")
    return c
