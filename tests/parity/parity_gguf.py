"""GGUF files as llama.cpp's converter writes them. Tensors' names are the gguf library's: ours are held against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize


def write_gguf(
    path: Path, model: Any, arch: str = "llama", kind: GGMLQuantizationType = GGMLQuantizationType.F32, drop: str = "",
    extra: str = "", **sets: Any,
) -> None:
    """Matrices quantised as `kind`; the quantised values are put back into `model`, so that it stays the reference. Of llama, q
    and k with each head's halves interleaved; of gemma3, norms with the one that they are short of."""
    c = model.config
    writer = GGUFWriter(path, arch)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    numbers = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": head_dim, "rope.dimension_count": head_dim,
    }  # fmt: skip
    if arch == "gemma3":
        numbers["attention.sliding_window"] = c.sliding_window
    for key, value in {**numbers, **{k.replace("__", "."): v for k, v in sets.items()}}.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    rope = c.rope_parameters
    writer.add_float32(f"{arch}.rope.freq_base", rope.get("full_attention", rope)["rope_theta"])
    if getattr(c, "final_logit_softcapping", None):
        writer.add_float32(f"{arch}.final_logit_softcapping", c.final_logit_softcapping)
    _write_tensors(writer, model, arch, kind, drop)
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tensors(writer: GGUFWriter, model: Any, arch: str, kind: GGMLQuantizationType, drop: str) -> None:
    c = model.config
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if ours == drop or (name == "lm_head.weight" and c.tie_word_embeddings):
            continue
        data = tensor.numpy()
        heads = {"q_proj.weight": c.num_attention_heads, "k_proj.weight": c.num_key_value_heads}
        interleaved = heads.get(".".join(name.split(".")[-2:])) if arch == "llama" else None
        if interleaved:
            data = data.reshape(interleaved, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if data.ndim == 1:
            writer.add_tensor(ours, data + np.float32(arch == "gemma3" and name.endswith("norm.weight")))
            continue
        blocks = quantize(data, kind)
        writer.add_tensor(ours, blocks, raw_dtype=kind)
        data = dequantize(blocks, kind).astype(np.float32)
        if interleaved:
            data = data.reshape(interleaved, -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(data)))
