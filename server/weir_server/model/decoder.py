"""The decoder: RMSNorm, rotary grouped-query attention, gated MLP, over tokens of many rows laid end to end.

Which row a token belongs to matters to attention alone, and attention is the backend's: to everything here a step is
[tokens, hidden]. What families add to Llama (model/families.py) is an absent weight or a factor of one where they do not.
Sources: Llama (arXiv 2302.13971) §2.2; RMSNorm (1910.07467); gated MLPs (2002.05202); GQA (2305.13245); Gemma 3 (2503.19786).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from weir_server.model.config import DecoderConfig
from weir_server.model.int8 import Matrix, dense
from weir_server.model.linear import Linear, Products
from weir_server.model.loader import Checkpoint

T = TypeVar("T")
"""What operations work on: tensors, or what stands for them while a backend writes down what it will do."""


class Ops(Protocol[T]):
    """What a backend computes in one step; float32, [tokens, features]."""

    def add_rms_norm(self, *, x: T | None, residual: T, weight: torch.Tensor) -> T:
        """residual += x (in place; not where x is None), then residual / rms(residual) · weight, as a new value."""
        ...

    def linear(self, *, x: T, weight: Linear, bias: torch.Tensor | None = None) -> T:
        """x · Wᵀ + bias."""
        ...

    def attention(self, *, layer: int, qkv: T, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None) -> T:
        """Normalise each head of q and k where there are weights [D] for it, rotate them, store k and v in the pages of the
        layer's attention type, attend causally within its window. [tokens, (G+2K)·D] (overwritten) → [tokens, G·D]."""
        ...

    def gated(self, *, gate_up: T) -> T:
        """activation(first half) · second half. [tokens, 2·ffn] → [tokens, ffn]."""
        ...

    def pick(self, *, x: T) -> T:
        """The tokens that the head reads: [tokens, features] → [picked, features]."""
        ...

    def capped(self, *, x: T, cap: float) -> T:
        """cap · tanh(x / cap), in place."""
        ...


class Forward(Protocol):
    """Equations over a backend's operations. The input may be overwritten."""

    def __call__(self, ops: Ops[T], x: T, /) -> T: ...


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: torch.Tensor
    qkv: Linear
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_attn_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """Weights in compute layout. Those that may be views of a mapped file, whose pages are not anonymous memory: `embed`, and
    all matrices of 8 bits."""

    batched = True
    """Whether one forward serves many rows; where not, the runner gives each row a forward of its own."""

    def __init__(self, checkpoint: Checkpoint, products: Products) -> None:
        """Packs the weights and empties the checkpoint, so that the raw ones can go."""
        w = checkpoint.weights
        self.config: DecoderConfig = checkpoint.config
        self.embed: Matrix = w.pop("embed")
        self.embed_scale = self.config.hidden**0.5 if self.config.traits.scaled_embedding else 1.0
        self._head = products(w.pop("head", self.embed))

        def norm(name: str) -> torch.Tensor:
            return dense(w.pop(name)).clone()

        def vector(name: str) -> torch.Tensor | None:
            return norm(name) if name in w else None

        def matrix(name: str) -> Linear:
            return products(w.pop(name))

        self.norm = norm("norm")
        self.layers = [
            Layer(
                attn_norm=norm(f"layers.{i}.attn_norm"), qkv=matrix(f"layers.{i}.qkv"), qkv_bias=vector(f"layers.{i}.qkv_bias"),
                q_norm=vector(f"layers.{i}.q_norm"), k_norm=vector(f"layers.{i}.k_norm"), out=matrix(f"layers.{i}.out"),
                post_attn_norm=vector(f"layers.{i}.post_attn_norm"), mlp_norm=norm(f"layers.{i}.mlp_norm"),
                gate_up=matrix(f"layers.{i}.gate_up"), down=matrix(f"layers.{i}.down"),
                post_mlp_norm=vector(f"layers.{i}.post_mlp_norm"),
            )
            for i in range(self.config.layers)
        ]  # fmt: skip

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer, of `tokens` int64 [n]."""
        rows = self.embed[tokens]
        return rows if self.embed_scale == 1.0 else rows.mul_(self.embed_scale)

    def hidden(self, ops: Ops[T], residual: T) -> T:
        """One forward of embedded tokens; what the head reads, of the tokens picked."""
        x = None
        for i, layer in enumerate(self.layers):
            h = ops.add_rms_norm(x=x, residual=residual, weight=layer.attn_norm)
            qkv = ops.linear(x=h, weight=layer.qkv, bias=layer.qkv_bias)
            attended = ops.attention(layer=i, qkv=qkv, q_norm=layer.q_norm, k_norm=layer.k_norm)
            if i + 1 == len(self.layers):  # of the other tokens nothing is wanted any more but the keys and values just stored
                attended, residual = ops.pick(x=attended), ops.pick(x=residual)
            x = ops.linear(x=attended, weight=layer.out)
            if layer.post_attn_norm is not None:
                x = ops.add_rms_norm(x=None, residual=x, weight=layer.post_attn_norm)
            h = ops.add_rms_norm(x=x, residual=residual, weight=layer.mlp_norm)
            x = ops.linear(x=ops.gated(gate_up=ops.linear(x=h, weight=layer.gate_up)), weight=layer.down)
            if layer.post_mlp_norm is not None:
                x = ops.add_rms_norm(x=None, residual=x, weight=layer.post_mlp_norm)
        return ops.add_rms_norm(x=x, residual=residual, weight=self.norm)

    def head(self, ops: Ops[T], hidden: T) -> T:
        """Logits [rows, vocab] of rows of `hidden`."""
        logits = ops.linear(x=hidden, weight=self._head)
        return logits if (cap := self.config.final_softcap) is None else ops.capped(x=logits, cap=cap)
