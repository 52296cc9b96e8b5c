"""The `gather` backend: plain torch, any device, any page size. The oracle that other backends are held against.

Each row's pages are gathered into contiguous keys and values, then attended to by two matrix products. It copies the whole
context in every layer and step, so it is slow where contexts are long; it serves where the C kernels are missing.
"""

from __future__ import annotations

import torch

from weir_server.exec.pool import KvPool
from weir_server.exec.step import Step
from weir_server.model.config import DecoderConfig


def rotary_table(config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position and frequency, float32 [context, head_dim / 2]."""
    frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
    angles = torch.arange(config.context, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


class GatherBackend:
    name = "gather"
    page_multiple = 1

    def __init__(self, *, config: DecoderConfig, pool: KvPool) -> None:
        self.config, self.pool = config, pool
        self.cos, self.sin = rotary_table(config)

    def bind(self, step: Step) -> GatherOps:
        return GatherOps(self, step)


class GatherOps:
    """See model.decoder.Ops."""

    def __init__(self, backend: GatherBackend, step: Step) -> None:
        self.config, self.pool = backend.config, backend.pool
        positions = torch.from_numpy(step.positions).long()
        self.cos, self.sin = backend.cos[positions][:, None], backend.sin[positions][:, None]
        page = self.pool.page_size
        row_of = torch.repeat_interleave(torch.from_numpy(step.starts).diff().long())
        self.block, self.slot = torch.from_numpy(step.tables).long()[row_of, positions // page], positions % page
        self.rows = []  # (first token, end token, blocks, mask [tokens, context])
        for r, (begin, end) in enumerate(zip(step.starts[:-1].tolist(), step.starts[1:].tolist(), strict=True)):
            length = int(step.positions[end - 1]) + 1
            mask = torch.arange(length)[None, :] > positions[begin:end, None]
            self.rows.append((begin, end, torch.from_numpy(step.tables[r, : -(-length // page)]).long(), mask))

    def add_rms_norm(self, *, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x is not None:
            residual += x
        return residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + self.config.rms_eps) * weight

    def silu_mul(self, *, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def attention(self, *, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        c = self.config
        qkv = qkv.view(len(qkv), c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        keys, values = self.pool.keys[:, layer], self.pool.values[:, layer]
        keys[self.block, :, :, self.slot] = self._rotated(k)
        values[self.block, :, self.slot] = v
        q = self._rotated(q)
        out = torch.empty(len(qkv), c.heads * c.head_dim)
        for begin, end, blocks, mask in self.rows:
            length = mask.shape[1]
            row_keys = keys[blocks].permute(1, 2, 0, 3).reshape(c.kv_heads, 1, c.head_dim, -1)[..., :length]
            row_values = values[blocks].permute(1, 0, 2, 3).reshape(c.kv_heads, 1, -1, c.head_dim)[:, :, :length]
            queries = q[begin:end].view(end - begin, c.kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)
            scores = (queries @ row_keys) * c.head_dim**-0.5
            weights = scores.masked_fill_(mask, -torch.inf).softmax(-1)
            out[begin:end] = (weights @ row_values).permute(2, 0, 1, 3).reshape(end - begin, -1)
        return out

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate halves (i, i + D/2) of each head. x [tokens, heads, D]."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1)
