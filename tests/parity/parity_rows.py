"""Tiny random checkpoints, and a Runner driven by hand: rows with their own blocks, fed in pieces of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from weir_server.exec.backends import Backend
from weir_server.exec.cpu import CpuBackend
from weir_server.exec.gather import GatherBackend
from weir_server.exec.interface import RowWork
from weir_server.exec.pool import KvPool
from weir_server.exec.runner import LoadedModel, ModelRunner
from weir_server.exec.step import UnsupportedError, flatten
from weir_server.link.messages import Sampling

GREEDY = Sampling(max_tokens=1000, temperature=0)
BACKENDS = {"gather": GatherBackend, "cpu": CpuBackend}


def make_runner(loaded: LoadedModel, backend: str, page_size: int = 16, num_chunks: int = 40) -> ModelRunner:
    """A runner with the backend named, or a skip that says why this machine has none."""
    pool = KvPool(loaded.config, page_size, num_chunks)
    try:
        chosen: Backend = BACKENDS[backend](config=loaded.config, pool=pool)
    except UnsupportedError as e:
        pytest.skip(f"the {backend} backend cannot serve here: {e}")
    return ModelRunner(loaded.decoder, pool, chosen, loaded.geometry(page_size))


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """A transformers model whose answers differ from token to token (weights larger than at initialisation)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes), attn_implementation="eager")).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.15)
            else:
                p.uniform_(0.5, 1.5)
    return model


@dataclass
class Row:
    """`tokens`: prompt and what was generated; `done`: of them, how many have their KV in the blocks."""

    tokens: list[int]
    blocks: Sequence[int]
    sampling: Sampling = GREEDY
    choice: int = 0
    done: int = 0
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def work(self, count: int | None = None) -> RowWork:
        """The next `count` tokens (all that are left by default); samples when they are the last."""
        end = len(self.tokens) if count is None else min(self.done + count, len(self.tokens))
        context = self.tokens[:end]
        last = end == len(self.tokens)
        return RowWork(context[self.done :], self.done, self.blocks, last, self.sampling, self.choice, context, self.prompt_len)


def step(runner: ModelRunner, *parts: tuple[Row, int | None]) -> list[int | None]:
    """One forward over the parts; appends what was sampled."""
    works = [row.work(count) for row, count in parts]
    results = runner.execute(works)
    for (row, _), work, result in zip(parts, works, results, strict=True):
        assert result.error is None
        row.done += len(work.tokens)
        if result.token is not None:
            row.tokens.append(result.token)
    return [r.token for r in results]


def all_logits(runner: ModelRunner, works: Sequence[RowWork]) -> torch.Tensor:
    """Logits of every token of the step, not only of those that sample."""
    with torch.inference_mode():
        flat = flatten(works, runner.pool.page_size)
        flat = dataclasses.replace(flat, sample_at=torch.arange(len(flat.tokens)))
        return runner.decoder.forward(flat.tokens, flat.sample_at, runner.backend.bind(flat))
