"""The decoder: RMSNorm, rotary grouped-query attention, SiLU-gated MLP, over tokens of many rows laid end to end.

Which row a token belongs to matters to attention alone, and attention is the backend's: to everything here a step is
[tokens, hidden]. Sources: Llama (arXiv 2302.13971) §2.2; RMSNorm (1910.07467); SwiGLU (2002.05202); GQA (2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from weir_server.model.config import DecoderConfig
from weir_server.model.linear import Linear, Products
from weir_server.model.loader import Checkpoint


class Ops(Protocol):
    """What a backend computes in one step; float32, tokens first."""

    def add_rms_norm(self, *, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """residual += x (in place; not where x is None), then residual / rms(residual) · weight, as a new tensor."""
        ...

    def attention(self, *, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate q and k, store k and v in the pages, attend causally. [tokens, (G+2K)·D] → [tokens, G·D]."""
        ...

    def silu_mul(self, *, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) · second half. [tokens, 2·ffn] → [tokens, ffn]."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights in compute layout. `embed` may be a view of a mapped file: its pages then are not anonymous memory."""

    def __init__(self, checkpoint: Checkpoint, products: Products) -> None:
        """Packs the weights and empties `checkpoint.weights`, so that the raw ones can go."""
        w = checkpoint.weights
        self.config: DecoderConfig = checkpoint.config
        self.embed = w.pop("embed")
        self.head = products(w.pop("head", self.embed))
        self.norm = w.pop("norm").clone()

        def norm(name: str) -> torch.Tensor:
            return w.pop(name).clone()

        def matrix(name: str) -> Linear:
            return products(w.pop(name))

        self.layers = [
            Layer(
                attn_norm=norm(f"layers.{i}.attn_norm"), qkv=matrix(f"layers.{i}.qkv"), out=matrix(f"layers.{i}.out"),
                mlp_norm=norm(f"layers.{i}.mlp_norm"), gate_up=matrix(f"layers.{i}.gate_up"), down=matrix(f"layers.{i}.down"),
            )
            for i in range(self.config.layers)
        ]  # fmt: skip

    def forward(self, tokens: torch.Tensor, sample_at: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Logits [len(sample_at), vocab] of the tokens at `sample_at`; `tokens` int64 [n], both on the CPU."""
        residual = self.embed[tokens]
        x = None
        for i, layer in enumerate(self.layers):
            h = ops.add_rms_norm(x=x, residual=residual, weight=layer.attn_norm)
            x = layer.out(ops.attention(layer=i, qkv=layer.qkv(h)))
            h = ops.add_rms_norm(x=x, residual=residual, weight=layer.mlp_norm)
            x = layer.down(ops.silu_mul(gate_up=layer.gate_up(h)))
        if not len(sample_at):
            return torch.empty(0, self.config.vocab)
        last = residual[sample_at]
        return self.head(ops.add_rms_norm(x=None if x is None else x[sample_at], residual=last, weight=self.norm))
