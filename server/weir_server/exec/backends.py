"""What an attention backend is, and the choice of one: the fastest that can serve and that agrees with the oracle."""

from __future__ import annotations

import dataclasses
import logging
from typing import Protocol

import torch

from weir_server.exec.cpu import CpuBackend
from weir_server.exec.gather import GatherBackend
from weir_server.exec.interface import RowWork
from weir_server.exec.pool import KvPool
from weir_server.exec.step import Compiled, UnsupportedError, flatten
from weir_server.link.messages import Sampling
from weir_server.model.config import DecoderConfig
from weir_server.model.decoder import Decoder, Forward, Ops, T

log = logging.getLogger("weir.exec")


class Backend(Protocol):
    """The operations of a decoder, over one pool. `page_multiple` divides every page size it serves."""

    name: str
    page_multiple: int

    def __init__(self, *, config: DecoderConfig, pool: KvPool) -> None:
        """Raises UnsupportedError where it cannot serve this model, page size or machine."""
        ...

    def compile(self, forward: Forward, width: int) -> Compiled:
        """`forward` made ready for steps, its input of `width` features. Raises UnsupportedError."""
        ...


def choose_backend(decoder: Decoder, pool: KvPool) -> Backend:
    """`cpu` where it can serve this model and passes its self-test, else `gather` and a log line."""
    config = decoder.config
    try:
        self_test(CpuBackend, config, pool.page_size, pool.flat.dtype)
        backend = CpuBackend(config=config, pool=pool)
        backend.compile(decoder.hidden, config.hidden)
    except UnsupportedError as e:
        log.warning("attention backend: gather, because %s", e)
        return GatherBackend(config=config, pool=pool)
    log.info("attention backend: cpu")
    return backend


_STEPS = (
    (((0, 21), (2, 3)), ((0, 7), (4,))),  # two prompts
    (((21, 41), (2, 3, 5)), ((7, 8), (4,)), ((0, 5), (6,))),  # a prompt goes on, a row decodes, another prompt begins
)
"""Rows of the self-test's two steps: positions from … to, numbers of their blocks, of each type."""
_WINDOW = 11
"""Of the self-test: small enough to matter within its few tokens."""


_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far a backend may be from the oracle, by what KV is stored in: numbers that are all but equal may round apart."""


def self_test(
    make: type[Backend], config: DecoderConfig, page_size: int, dtype: torch.dtype = torch.float32
) -> None:
    """Raises UnsupportedError if a backend differs from `gather` in a layer of each type, over a prefill and a mixed step."""
    config = dataclasses.replace(
        config, layer_types=tuple(config.layers_of), context=min(config.context, 64), window=config.window and _WINDOW
    )
    builds: tuple[type[Backend], ...] = (GatherBackend, make)
    backends = [build(config=config, pool=KvPool(config, page_size, 7, dtype)) for build in builds]
    want, got = (_outputs(backend, config, page_size) for backend in backends)
    worst = max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True))
    if not worst < _CLOSE[dtype]:
        raise UnsupportedError(f"the backend {make.name} differs from the oracle by {worst:.1e}")


def _outputs(backend: Backend, config: DecoderConfig, page_size: int) -> list[torch.Tensor]:
    """All operations' results on fixed random inputs."""
    generator = torch.Generator().manual_seed(3)
    out = []

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    norms = [normal(config.head_dim) if config.traits.qk_norm else None for _ in "qk"]
    weight, bias = normal(config.hidden), normal(config.hidden)

    def attend(layer: int) -> Forward:
        return lambda ops, x: ops.attention(layer=layer, qkv=x, q_norm=norms[0], k_norm=norms[1])

    def small(ops: Ops[T], x: T) -> T:
        """Twice over, so that what was added to `x` in place is seen as well; and of the tokens picked alone."""
        y = ops.add_rms_norm(x=None, residual=x, weight=weight)
        y = ops.add_rms_norm(x=y, residual=x, weight=bias)
        return ops.add_rms_norm(x=ops.pick(x=y), residual=ops.pick(x=x), weight=weight)

    for rows in _STEPS:
        work = [
            RowWork(range(b - a), a, blocks, True, Sampling(max_tokens=1), 0, range(b), 1, ring=blocks)
            for (a, b), blocks in rows
        ]
        step = flatten(work, page_size, config)
        n = len(step.tokens)
        qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
        inputs: list[tuple[Forward, torch.Tensor]] = [
            *((attend(layer), normal(n, qkv)) for layer in range(config.layers)),
            (lambda ops, x: ops.gated(gate_up=x), normal(n, 2 * config.ffn) * 8),
            (lambda ops, x: ops.capped(x=x, cap=5.0), normal(n, config.ffn + 3) * 8),
            (small, normal(n, config.hidden)),
        ]
        for forward, x in inputs:
            out.append(backend.compile(forward, x.shape[1])(x, step).clone())
    return out
