"""Weights from GGUF files and safetensors directories, in the decoder's own layout, and the cache of them on disk.

Dequantising SmolLM2 takes seconds, mapping the result a tenth of one: so the fused fp32 tensors are written once to
`<cache>/<key>.safetensors` and mapped from then on. The key is the identity of the source files (name, size, modification
time) and the layout's version. A cache that cannot be written costs one log line and the time, nothing else.

The layout (float32; shapes outermost first; D = head_dim, G = heads, K = kv_heads; norms as they multiply):
  embed [vocab, hidden] · norm [hidden] · head [vocab, hidden] unless tied
  layers.i: attn_norm [hidden] · qkv [(G + 2K)·D, hidden] · out [hidden, G·D] · mlp_norm [hidden] · gate_up [2·ffn, hidden]
  · down [hidden, ffn]; where the family has them: qkv_bias [(G + 2K)·D] · q_norm, k_norm [D] · post_attn_norm,
  post_mlp_norm [hidden]
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weir_server.model import config as model_config
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

log = logging.getLogger("weir.model")

LAYOUT_VERSION = 1

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's config and weights. `mapped`: the weights are views of the cache file, not anonymous memory."""

    config: DecoderConfig
    weights: Weights
    mapped: bool
    key: str  # identity of the source, for logs and prefix hashes


def read_config(path: Path) -> DecoderConfig:
    """Of a model (as `files.resolve` gives it), from its headers. Raises ModelError."""
    return _source(path).config


def _source(path: Path) -> _Source:
    return _Directory(path) if path.is_dir() else _Gguf(path)


def load_checkpoint(path: Path, cache_dir: str | None = None) -> Checkpoint:
    """Load `path` (as `files.resolve` gives it). Raises ModelError."""
    source = _source(path)
    key = _key(source.files)
    for directory in _cache_directories(cache_dir):
        cached = directory / f"{key}.safetensors"
        if (weights := _map(cached, source.config)) is not None:
            return Checkpoint(source.config, weights, mapped=True, key=key)
    weights = _fused(source.config, source)
    source.check_nothing_left()
    for directory in _cache_directories(cache_dir):
        cached = directory / f"{key}.safetensors"
        if _write(cached, weights) and (mapped := _map(cached, source.config)) is not None:
            return Checkpoint(source.config, mapped, mapped=True, key=key)
    log.warning("no weight cache: the next start will be as slow as this one")
    return Checkpoint(source.config, weights, mapped=False, key=key)


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


def _fused(c: DecoderConfig, source: _Source) -> Weights:
    """Build the layout from a source's tensors. Raises ModelError for a missing or misshapen one."""
    attention, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = {"q": attention, "k": kv, "v": kv, "q_bias": attention, "k_bias": kv, "v_bias": kv, "gate": c.ffn, "up": c.ffn}
    weights = {}
    for name, shape in shapes(c).items():
        parts = []
        for piece in pieces(name):
            tensor, expected = source.tensor(piece), (rows.get(piece.rpartition(".")[2], shape[0]), *shape[1:])
            if tuple(tensor.shape) != expected:
                what = f"{source.name_of(piece)} of {source.path} has shape {list(tensor.shape)}"
                raise ModelError(f"{what}, the config asks for {list(expected)}.")
            parts.append(tensor.to(torch.float32))
        weights[name] = torch.cat(parts).contiguous() if len(parts) > 1 else parts[0].contiguous()
    return weights


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
        name = self.name_of(piece)
        array = self._read(name)
        heads = {"q": self.config.heads, "k": self.config.kv_heads}.get(piece.rpartition(".")[2])
        if heads is not None and self.config.traits.interleaved:
            array = _unpermuted(array, heads, name)
        return torch.from_numpy(np.ascontiguousarray(array))

    def _read(self, name: str) -> np.ndarray:
        """One tensor as float32, read (not mapped: a file that is cut while we read is an error, not a bus error)."""
        from gguf import GGMLQuantizationType  # here, because a start from the cache has no need of it
        from gguf.quants import dequantize

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
        if GGML_TYPES[info.type][0] in ("F32", "F16"):
            dtype = np.float32 if info.type == 0 else np.float16
            return np.frombuffer(raw, dtype).reshape(info.shape).astype(np.float32)
        blocks = np.frombuffer(raw, np.uint8).reshape(*info.shape[:-1], _row_bytes(info, self.path))
        return dequantize(blocks, GGMLQuantizationType(info.type)).astype(np.float32, copy=False)

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


def _unpermuted(array: np.ndarray, heads: int, name: str) -> np.ndarray:
    """llama.cpp stores q and k with the halves of each head interleaved (its rope turns neighbours); undo it."""
    rows, columns = array.shape
    if rows % (2 * heads):
        raise ModelError(f"{name} has {rows} rows, which {heads} heads cannot share.")
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


# ---------------------------------------------------------------- the cache

def _key(files: list[Path]) -> str:
    digest = hashlib.sha256(f"weir weights {LAYOUT_VERSION}".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"\0{file.name}\0{stat.st_size}\0{int(stat.st_mtime)}".encode())  # layers of images keep whole seconds
    return digest.hexdigest()[:32]


def _cache_directories(explicit: str | None) -> Iterator[Path]:
    """Where a cache may lie, best first: what was asked for, else the user's cache, else the temporary directory."""
    if explicit is not None:
        yield Path(explicit)
        return
    if base := os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME"):
        yield Path(base) / ("weir" if os.environ.get("XDG_CACHE_HOME") else ".cache/weir")
    shared = Path(tempfile.gettempdir()) / f"weir-{os.getuid()}"
    if not shared.exists() or shared.stat().st_uid == os.getuid():  # anybody may create a name in the temporary directory
        yield shared


def _map(path: Path, c: DecoderConfig) -> Weights | None:
    """The cached tensors, or None where there is no whole cache of this layout."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        log.warning("weight cache %s is damaged (%s): loading from the source", path, e)
        return None
    if {n: tuple(w.shape) for n, w in weights.items()} != shapes(c):
        log.warning("weight cache %s has another layout: loading from the source", path)
        return None
    return weights


def _write(path: Path, weights: Mapping[str, torch.Tensor]) -> bool:
    """Write the cache so that it appears whole or not at all. False where the file system does not let us."""
    temporary, size = path.with_suffix(f".{os.getpid()}.tmp"), sum(w.nbytes for w in weights.values())
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (free := shutil.disk_usage(path.parent).free) < size + (1 << 20):
            raise OSError(f"it needs {size} bytes and {free} are free")  # and a small /tmp is not to be filled
        save_file(dict(weights), temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        log.warning("cannot write the weight cache %s: %s", path, e)
        return False
    return True
