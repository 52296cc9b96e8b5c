"""Weights from GGUF files and safetensors directories, in the decoder's own layout, and the cache of them on disk.

Dequantising SmolLM2 takes seconds, mapping the result a tenth of one: so the fused tensors are written once to
`<cache>/<key>.safetensors` and mapped from then on. The key is the identity of the source files (name, size, modification
time), the layout's version and the format of its matrices.

The layout (float32, matrices perhaps in 8 bits; shapes outermost first; D = head_dim, G = heads, K = kv_heads; norms as they
multiply):
  embed [vocab, hidden] · norm [hidden] · head [vocab, hidden] unless tied
  layers.i: attn_norm [hidden] · qkv [(G + 2K)·D, hidden] · out [hidden, G·D] · mlp_norm [hidden] · gate_up [2·ffn, hidden]
  · down [hidden, ffn]; where the family has them: qkv_bias [(G + 2K)·D] · q_norm, k_norm [D] · post_attn_norm,
  post_mlp_norm [hidden]
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from weir_server.model import config as model_config
from weir_server.model import int8, weight_cache
from weir_server.model.config import DecoderConfig
from weir_server.model.families import Family
from weir_server.model.files import (
    GGML_TYPES,
    GgufHeader,
    ModelError,
    TensorInfo,
    read_gguf_metadata,
    safetensors_files,
)
from weir_server.model.int8 import Blocks, Int8Matrix, Matrix

log = logging.getLogger("weir.model")

LAYOUT_VERSION = 1

Weights = dict[str, Matrix]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's config and weights. `int8`: its matrices are Int8Matrix, the embedding and the head too. `mapped`: the weights
    are views of the cache file, not anonymous memory."""

    config: DecoderConfig
    weights: Weights
    int8: bool
    mapped: bool
    key: str  # identity of the source, for logs and prefix hashes


def read_config(path: Path) -> DecoderConfig:
    """Of a model (as `files.resolve` gives it), from its headers. Raises ModelError."""
    return _source(path).config


def read_headers(path: Path, quantize: str) -> tuple[DecoderConfig, bool]:
    """Its config, and whether its matrices get 8 bits. Raises ModelError."""
    source = _source(path)
    return source.config, _in_int8(source, quantize)


def _source(path: Path) -> _Source:
    return _Directory(path) if path.is_dir() else _Gguf(path)


def _in_int8(source: _Source, quantize: str) -> bool:
    """All matrices or none: a model of float32 with a few of 8 bits would be neither small nor what was asked for."""
    if quantize != "auto":
        return quantize == "int8"
    matrices = [name for name, shape in shapes(source.config).items() if len(shape) == 2]
    return all(source.is_int8(piece) for name in matrices for piece in pieces(name))


def load_checkpoint(path: Path, cache_dir: str | None = None, quantize: str = "auto") -> Checkpoint:
    """Load `path` (as `files.resolve` gives it). `quantize`: auto (matrices of 8 bits where the file's own are that, to the
    bit), int8 (whatever the file has) or none (float32). Raises ModelError."""
    source = _source(path)
    config, in_int8 = source.config, _in_int8(source, quantize)
    key = weight_cache.key_of(f"weir weights {LAYOUT_VERSION}{' int8' if in_int8 else ''}", source.files)
    places = [directory / f"{key}.safetensors" for directory in weight_cache.directories(cache_dir)]
    for place in places:
        if (mapped := _mapped(place, config, in_int8)) is not None:
            return Checkpoint(config, mapped, in_int8, mapped=True, key=key)
    weights = _fused(source, in_int8)
    source.check_nothing_left()
    stored = {name: w.lines if isinstance(w, Int8Matrix) else w for name, w in weights.items()}
    for place in places:
        if weight_cache.write(place, stored) and (mapped := _mapped(place, config, in_int8)) is not None:
            return Checkpoint(config, mapped, in_int8, mapped=True, key=key)
    log.warning("no weight cache: the next start will be as slow as this one")
    return Checkpoint(config, weights, in_int8, mapped=False, key=key)


def _mapped(place: Path, c: DecoderConfig, in_int8: bool) -> Weights | None:
    """The weights from the cache at `place`, if they are there."""
    of = shapes(c)
    stored = weight_cache.read(place, {name: _stored(shape, in_int8) for name, shape in of.items()})
    if stored is None:
        return None
    return {name: Int8Matrix(t, of[name]) if t.dtype is torch.int32 else t for name, t in stored.items()}


def _stored(shape: tuple[int, ...], in_int8: bool) -> tuple[torch.dtype, tuple[int, ...]]:
    """How a tensor of the layout lies in memory and in the cache."""
    return (torch.int32, int8.lines_shape(shape)) if in_int8 and len(shape) == 2 else (torch.float32, shape)


# ---------------------------------------------------------------- the layout

def shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the layout."""
    family, attention, kv = c.traits, c.heads * c.head_dim, c.kv_heads * c.head_dim
    out: dict[str, tuple[int, ...]] = {"embed": (c.vocab, c.hidden), "norm": (c.hidden,)}
    if not c.tied:
        out["head"] = (c.vocab, c.hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.hidden,), "qkv": (attention + 2 * kv, c.hidden), "out": (c.hidden, attention),
        "mlp_norm": (c.hidden,), "gate_up": (2 * c.ffn, c.hidden), "down": (c.hidden, c.ffn),
    }  # fmt: skip
    if family.qkv_bias:
        layer["qkv_bias"] = (attention + 2 * kv,)
    if family.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    if family.post_norms:
        layer |= {"post_attn_norm": (c.hidden,), "post_mlp_norm": (c.hidden,)}
    return out | {f"layers.{i}.{name}": shape for i in range(c.layers) for name, shape in layer.items()}


_STACKED = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "gate_up": ("gate", "up")}
"""Our tensor → the pieces that files hold it in; others are one piece of the same name."""

HF_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
HF_LAYER = {
    "attn_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight", "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight", "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
GGUF_TOP = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
GGUF_LAYER = {
    "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight", "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias", "v_bias": "attn_v.bias", "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight", "post_attn_norm": "post_attention_norm.weight", "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight", "post_mlp_norm": "post_ffw_norm.weight",
}  # fmt: skip


def hf_name(family: Family, piece: str) -> str:
    """The tensor of a Hugging Face directory that holds `piece`: "norm", "layers.3.q_bias" …"""
    if not piece.startswith("layers."):
        return HF_TOP[piece]
    _, index, short = piece.split(".")
    return f"model.layers.{index}.{family.hf_names.get(short) or HF_LAYER[short]}"


def gguf_name(piece: str) -> str:
    """The tensor of a GGUF file that holds `piece`."""
    if not piece.startswith("layers."):
        return GGUF_TOP[piece]
    _, index, short = piece.split(".")
    return f"blk.{index}.{GGUF_LAYER[short]}"


def pieces(name: str) -> list[str]:
    """What `name` of the layout is stacked from, in order."""
    layer, dot, short = name.rpartition(".")
    return [layer + dot + piece for piece in _STACKED.get(short, (short,))]


def weights_bytes(c: DecoderConfig, in_int8: bool, mapped: bool) -> int:
    """What the weights hold of memory that nothing can take away. In float32 products are packed, and the embedding is besides
    only where it is not `mapped`; in 8 bits one tensor is embedding, tied head and cache file, and is wanted in every step."""
    of = {name: 4 * math.prod(_stored(shape, in_int8)[1]) for name, shape in shapes(c).items()}
    return sum(of.values()) + (0 if in_int8 else of["embed"] * (c.tied - mapped))


def _fused(source: _Source, in_int8: bool) -> Weights:
    """Build the layout from a source's tensors. Raises ModelError for a missing or misshapen one."""
    c = source.config
    attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = {"q": attention, "k": kv, "v": kv, "q_bias": attention, "k_bias": kv, "v_bias": kv, "gate": c.ffn, "up": c.ffn}
    weights: Weights = {}
    for name, shape in shapes(c).items():
        expected = [(piece, (rows.get(piece.rpartition(".")[2], shape[0]), *shape[1:])) for piece in pieces(name)]
        if in_int8 and len(shape) == 2:
            weights[name] = Int8Matrix.of(Blocks.joined([_blocks(source, piece, wanted) for piece, wanted in expected]))
        else:
            parts = [_checked(source, piece, source.tensor(piece), wanted).to(torch.float32) for piece, wanted in expected]
            weights[name] = torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()
    return weights


def _blocks(source: _Source, piece: str, wanted: tuple[int, ...]) -> Blocks:
    """A piece in 8 bits: the source's own where it has them."""
    if not source.is_int8(piece):
        return int8.quantize(_checked(source, piece, source.tensor(piece), wanted))
    blocks = source.blocks(piece)
    _checked(source, piece, blocks.q, wanted)
    return blocks


def _checked(source: _Source, piece: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != wanted:
        what = f"{source.name_of(piece)} of {source.path} has shape {list(tensor.shape)}"
        raise ModelError(f"{what}, the config asks for {list(wanted)}.")
    return tensor


# ---------------------------------------------------------------- sources

class _Source(Protocol):
    """Where weights come from. `files`: what the identity of the model hangs on."""

    path: Path
    files: list[Path]
    config: DecoderConfig

    def name_of(self, piece: str) -> str: ...

    def tensor(self, piece: str) -> torch.Tensor:
        """A piece as the decoder computes with it. Raises ModelError where it is missing or cannot be read."""
        ...

    def is_int8(self, piece: str) -> bool:
        """Whether `blocks` has the piece, bit for bit."""
        ...

    def blocks(self, piece: str) -> Blocks:
        """A matrix that the source has in 8 bits or fewer. Raises ModelError as `tensor` does."""
        ...

    def check_nothing_left(self) -> None:
        """Raises ModelError where the source has a tensor that the decoder has no use for."""
        ...


class _Directory:
    """A directory in the Hugging Face layout."""

    def __init__(self, path: Path) -> None:
        config = model_config.of_directory(path)
        self.path, self.files = path, [path / "config.json", *safetensors_files(path)]
        self.where = {name: file for file in self.files[1:] for name in _names(file)}
        # like transformers: an absent tie_word_embeddings means untied, and a head that the file has is redundant where tied
        if not config.tied and "lm_head.weight" not in self.where:
            raise ModelError(f"{path} has no tensor lm_head.weight, and its config does not tie the head to the embedding.")
        self.config = config

    def name_of(self, piece: str) -> str:
        return hf_name(self.config.traits, piece)

    def tensor(self, piece: str) -> torch.Tensor:
        name = self.name_of(piece)
        if name not in self.where:
            raise ModelError(f"{self.path} has no tensor {name}.")
        with safe_open(self.where[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{name} of {self.path} has type {tensor.dtype}; quantised safetensors are not read.")
        if piece.endswith("norm") and (offset := self.config.traits.norm_offset):
            return tensor.to(torch.float32) + offset
        return tensor

    def is_int8(self, piece: str) -> bool:
        return False

    def blocks(self, piece: str) -> Blocks:
        raise ValueError(f"{self.name_of(piece)} of {self.path} is not in 8 bits")

    def check_nothing_left(self) -> None:
        known = {self.name_of(p) for name in [*shapes(self.config), "head"] for p in pieces(name)}
        extra = sorted(n for n in self.where if n not in known and not n.endswith(".rotary_emb.inv_freq"))
        if extra:
            raise ModelError(f"{self.path} has the tensor {extra[0]}, which a {self.config.family} decoder has no use for.")


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as f:
            return list(f.keys())
    except (SafetensorError, OSError) as e:
        raise ModelError(f"Cannot read the weights {file}: {e}.") from None


class _Gguf:
    """A GGUF file."""

    _ROPE = "rope_freqs.weight"

    def __init__(self, path: Path) -> None:
        self.path, self.files, self.used = path, [path], {self._ROPE}
        self.header: GgufHeader = read_gguf_metadata(path)
        divisors = tuple(self._read(self._ROPE).tolist()) if self._ROPE in self.header.tensors else ()
        self.config = model_config.from_gguf(self.header, divisors)

    def name_of(self, piece: str) -> str:
        return gguf_name(piece)

    def tensor(self, piece: str) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(self._read(self.name_of(piece))))
        return tensor if (order := self._order(piece, len(tensor))) is None else tensor[order]

    def is_int8(self, piece: str) -> bool:
        info = self.header.tensors.get(self.name_of(piece))
        return info is not None and GGML_TYPES[info.type][0] in int8.EXACT

    def blocks(self, piece: str) -> Blocks:
        info, raw = self._raw(self.name_of(piece))
        blocks = int8.of_gguf(raw, GGML_TYPES[info.type][0])
        return blocks if (order := self._order(piece, len(blocks.q))) is None else blocks.rows(order)

    def _order(self, piece: str, rows: int) -> torch.Tensor | None:
        """Where our rows of a piece lie among the file's, if elsewhere: llama.cpp stores q and k with the halves of each head
        interleaved (its rope turns neighbours)."""
        heads = {"q": self.config.heads, "k": self.config.kv_heads}.get(piece.rpartition(".")[2])
        if heads is None or not self.config.traits.interleaved:
            return None
        if rows % (2 * heads):
            raise ModelError(f"{self.name_of(piece)} has {rows} rows, which {heads} heads cannot share.")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def _raw(self, name: str) -> tuple[TensorInfo, np.ndarray]:
        """One tensor's bytes [rows, bytes of a row] of a quantised type, and of others; read (not mapped: a file that is cut
        while we read is an error, not a bus error)."""
        info = self.header.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path} has no tensor {name}.")
        self.used.add(name)
        try:
            with self.path.open("rb") as file:
                file.seek(info.offset)
                raw = file.read(info.nbytes)
        except OSError as e:
            raise ModelError(f"Cannot read the model file {self.path}: {e.strerror}.") from None
        if len(raw) < info.nbytes:
            raise ModelError(f"{self.path} is truncated: {name} has {len(raw)} of its {info.nbytes} bytes.")
        return info, np.frombuffer(raw, np.uint8).reshape(*info.shape[:-1], _row_bytes(info, self.path))

    def _read(self, name: str) -> np.ndarray:
        """One tensor as float32."""
        from gguf import GGMLQuantizationType  # here, because a start from the cache has no need of it
        from gguf.quants import dequantize

        info, raw = self._raw(name)
        if GGML_TYPES[info.type][0] in ("F32", "F16"):
            return raw.view(np.float32 if info.type == 0 else np.float16).astype(np.float32)
        return dequantize(raw, GGMLQuantizationType(info.type)).astype(np.float32, copy=False)

    def check_nothing_left(self) -> None:
        if extra := sorted(set(self.header.tensors) - self.used):
            raise ModelError(
                f"{self.path} has the tensor {extra[0]}, which a {self.config.family} decoder has no use for."
            )


def _row_bytes(info: TensorInfo, where: Path) -> int:
    _, block, block_bytes = GGML_TYPES[info.type]
    if info.shape[-1] % block:
        raise ModelError(f"The rows of {info.name} of {where} are {info.shape[-1]} long, no multiple of {block}.")
    return info.shape[-1] // block * block_bytes
