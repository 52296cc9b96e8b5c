"""The `gather` backend: plain torch, any device, any page size. The oracle that other backends are held against.

Each row's pages are gathered into contiguous keys and values, then attended to by two matrix products. It copies what is seen
of the context in every layer and step, so it is slow where contexts are long; it serves where the C kernels are missing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weir_server.contract import SLIDING
from weir_server.exec.pool import KvPool
from weir_server.exec.step import NO_STEP, Compiled, Step
from weir_server.model.config import DecoderConfig
from weir_server.model.decoder import Forward
from weir_server.model.linear import Linear


def rotary_table(config: DecoderConfig, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position and frequency in layers of an attention type, float32 [context, head_dim / 2]."""
    frequencies = torch.tensor(config.ropes[kind].inverse_frequencies(config.head_dim), dtype=torch.float32)
    angles = torch.arange(config.context, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class GatherBackend:
    name = "gather"
    page_multiple = 1

    def __init__(self, *, config: DecoderConfig, pool: KvPool) -> None:
        self.config, self.pool = config, pool
        self.ordinals = config.ordinals
        self.rotary = {kind: rotary_table(config, kind) for kind in config.layers_of}

    def compile(self, forward: Forward, width: int) -> Compiled:
        return lambda x, step=NO_STEP: forward(GatherOps(self, step), x)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [chunk, block, head, D, slot] and V [chunk, block, head, slot, D] of a layer, views of the pool."""
        kind, ordinal = self.ordinals[layer]
        pool, c = self.pool, self.config
        n, dim, page = pool.geometry.blocks_per_chunk[kind], c.head_dim, pool.page_size
        outer = (pool.chunk, c.layers_of[kind] * pool.page, dim * page)
        sizes, start = (pool.num_chunks, n, c.kv_heads), ordinal * pool.page
        keys = pool.flat.as_strided((*sizes, dim, page), (*outer, page, 1), start)
        return keys, pool.flat.as_strided((*sizes, page, dim), (*outer, dim, 1), start + pool.half)


class _Row(NamedTuple):
    """Tokens begin … end-1 of the step see `length` positions from the first of `blocks` on, but for `hidden` ones."""

    begin: int
    end: int
    length: int
    blocks: torch.Tensor
    hidden: torch.Tensor  # bool [tokens, length]


class GatherOps:
    """See model.decoder.Ops."""

    def __init__(self, backend: GatherBackend, step: Step) -> None:
        self.backend, self.config, self.step = backend, backend.config, step
        self.positions = torch.from_numpy(step.positions).long()
        self.row_of = torch.repeat_interleave(torch.from_numpy(step.starts).diff().long())
        self.tables = {kind: torch.from_numpy(table).long() for kind, table in step.tables.items()}
        self.rows = {kind: self._rows(kind) for kind in step.tables}

    def add_rms_norm(self, *, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x is not None:
            residual += x
        return rms_norm(residual, weight, self.config.rms_eps)

    def linear(self, *, x: torch.Tensor, weight: Linear, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weight(x) if bias is None else weight(x).add_(bias)

    def gated(self, *, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.config.traits.activation == "gelu_tanh":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up

    def capped(self, *, x: torch.Tensor, cap: float) -> torch.Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def pick(self, *, x: torch.Tensor) -> torch.Tensor:
        return x[self.step.picked]

    def _rows(self, kind: str) -> list[_Row]:
        page, rows = self.backend.pool.page_size, []
        window = self.config.window if kind == SLIDING else None
        for r, (begin, end) in enumerate(zip(self.step.starts[:-1].tolist(), self.step.starts[1:].tolist(), strict=True)):
            positions = self.positions[begin:end, None]
            length = int(positions[-1]) + 1
            first = max(0, int(positions[0]) + 1 - window) // page if window else 0
            at = torch.arange(first * page, length)[None, :]
            hidden = at > positions
            if window:
                hidden |= at <= positions - window
            rows.append(_Row(begin, end, length - first * page, self.tables[kind][r, first : -(-length // page)], hidden))
        return rows

    def attention(
        self, *, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        c, (kind, _) = self.config, self.backend.ordinals[layer]
        n, page = self.backend.pool.geometry.blocks_per_chunk[kind], self.backend.pool.page_size
        q, k, v = qkv.view(len(qkv), -1, c.head_dim).split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        keys, values = self.backend.pages(layer)
        block, slot = self.tables[kind][self.row_of, self.positions // page], self.positions % page
        keys[block // n, block % n, :, :, slot] = self._rotated(k, k_norm, kind).to(keys.dtype)
        values[block // n, block % n, :, slot] = v.to(values.dtype)
        q = self._rotated(q, q_norm, kind)
        out = torch.empty(len(qkv), c.heads * c.head_dim)
        for begin, end, length, blocks, hidden in self.rows[kind]:
            row_keys = keys[blocks // n, blocks % n].float().permute(1, 2, 0, 3).reshape(c.kv_heads, 1, c.head_dim, -1)
            row_values = values[blocks // n, blocks % n].float().permute(1, 0, 2, 3).reshape(c.kv_heads, 1, -1, c.head_dim)
            queries = q[begin:end].view(end - begin, c.kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)
            scores = (queries @ row_keys[..., :length]) * c.attention_scale
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            out[begin:end] = (weights @ row_values[:, :, :length]).permute(2, 0, 1, 3).reshape(end - begin, -1)
        return out

    def _rotated(self, x: torch.Tensor, weight: torch.Tensor | None, kind: str) -> torch.Tensor:
        """Rotate halves (i, i + D/2) of each head, normalised first where there is a weight. x [tokens, heads, D]."""
        if weight is not None:
            x = rms_norm(x, weight, self.config.rms_eps)
        cos, sin = (table[self.positions][:, None] for table in self.backend.rotary[kind])
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
