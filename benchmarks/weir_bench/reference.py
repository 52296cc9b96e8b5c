"""transformers' model with the weights that our loader read: what our answers, and our speed, are held against."""

from __future__ import annotations

from typing import Any

import torch

from weir_server.contract import FULL
from weir_server.model.config import DecoderConfig
from weir_server.model.loader import Weights, hf_name, pieces, shapes


def llama(c: DecoderConfig, weights: Weights, attention: str) -> Any:
    """LlamaForCausalLM in float32, `weights` under its names; `attention`: eager or sdpa."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=c.hidden, num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, intermediate_size=c.ffn, vocab_size=c.vocab, max_position_embeddings=c.context,
        rms_norm_eps=c.rms_eps, rope_parameters={"rope_type": "default", "rope_theta": c.ropes[FULL].theta},
        tie_word_embeddings=c.tied, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    own = model.state_dict()
    with torch.no_grad():
        for name in shapes(c):
            theirs = [hf_name(c.traits, piece) for piece in pieces(name)]
            for part, piece in zip(theirs, weights[name].split([own[p].shape[0] for p in theirs]), strict=True):
                own[part].copy_(piece)
    return model
