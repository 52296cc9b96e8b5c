"""Loading a model for serving, and the Runner over it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from weir_server.contract import Geometry
from weir_server.exec.backends import Backend, choose_backend
from weir_server.exec.gemm import NativeKind
from weir_server.exec.interface import FULL, RowResult, RowWork
from weir_server.exec.pool import KvPool, chunk_bytes
from weir_server.exec.step import UnsupportedError, flatten
from weir_server.link.messages import Boot
from weir_server.model.decoder import Decoder
from weir_server.model.files import ModelError
from weir_server.model.linear import Products, agrees, probe
from weir_server.model.loader import load_checkpoint
from weir_server.model.sampler import Draw, sample

log = logging.getLogger("weir.exec")


def load(boot: Boot) -> LoadedModel:
    """Load boot.model, choose how to multiply and attend, and measure nothing. Raises ModelError (the user's mistake)."""
    torch.set_num_threads(boot.threads)
    if boot.dtype != "float32":
        raise ModelError(f"dtype {boot.dtype!r} is not served on this device; float32 is.")
    started = time.monotonic()
    checkpoint = load_checkpoint(Path(boot.model), boot.cache_dir)
    with torch.inference_mode():
        products = choose_products([checkpoint.weights[name] for name in _SHAPES])
        if boot.deterministic and not products.row_independent:
            raise ModelError("--deterministic cannot be kept here: this machine's matrix products depend on the row count.")
        if not products.row_independent:
            log.warning("matrix products depend on the row count here: batching and prefix hits may flip near-ties")
        loaded = LoadedModel(boot, Decoder(checkpoint, products), str(products), mapped=checkpoint.mapped)
    log.info("loaded %s in %.2f s, matrix products: %s", boot.model, time.monotonic() - started, products)
    return loaded


_SHAPES = ("layers.0.qkv", "layers.0.out", "layers.0.gate_up", "layers.0.down", "embed")
"""One weight of each shape."""


def choose_products(weights: Sequence[torch.Tensor]) -> Products:
    """Our own products where they were built and give the right values for `weights`, else torch's and a log line."""
    try:
        products = NativeKind()
    except UnsupportedError as e:
        log.warning("matrix products: torch's, because %s", e)
        return probe(weights)
    if all(agrees(products, weight) for weight in weights):
        return products
    log.warning("matrix products: torch's, because ours differ from them")
    return probe(weights)


class LoadedModel:
    """A model in memory, not yet given a pool. `weights_bytes`: anonymous memory that its weights hold."""

    decode_path = "native batched forward"
    window: int | None = None  # tokens that a sliding layer sees, as exec.interface.Runner says

    def __init__(self, boot: Boot, decoder: Decoder, linear: str, mapped: bool) -> None:
        self.boot, self.decoder, self.config = boot, decoder, decoder.config
        self.context_length = self.config.context
        c = self.config
        layer = (c.heads + 2 * c.kv_heads + c.heads) * c.head_dim * c.hidden + 3 * c.ffn * c.hidden + 2 * c.hidden
        self.weights_bytes = 4 * (c.layers * layer + c.hidden + c.vocab * c.hidden * (1 if mapped else 2))
        self.linear = linear

    @property
    def model(self) -> dict[str, str | int | float | bool | None]:
        """For Ready.model."""
        c = self.config
        return {
            "family": c.family, "layers": c.layers, "hidden": c.hidden, "heads": c.heads, "kv_heads": c.kv_heads,
            "vocab_size": c.vocab, "context_length": c.context, "weights_bytes": self.weights_bytes, "dtype": "float32",
            "decode_path": self.decode_path, "linear": self.linear, "isa": torch.backends.cpu.get_cpu_capability(),
        }  # fmt: skip

    def chunk_bytes(self, page_size: int) -> int:
        return chunk_bytes(self.config, page_size)

    def geometry(self, page_size: int) -> Geometry:
        return Geometry(self.chunk_bytes(page_size), page_size, {"full_attention": 1})

    def activation_bytes(self, max_tokens: int) -> int:
        """Most memory that a step of `max_tokens` tokens needs beside weights and pool, its logits included."""
        c = self.config
        widest = 4 * c.hidden + 2 * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 2 * 3 * c.ffn
        return 4 * (max_tokens * widest + 4 * min(max_tokens, 64) * c.vocab + 2 * c.context * c.head_dim)

    def runner(self, num_chunks: int, swap_chunks: int = 0) -> ModelRunner:
        """A Runner over a pool of `num_chunks` chunks of boot.page_size tokens. Chunks 0 and 1 are reserved for padding:
        a block's id is its chunk's index, so rows own blocks 2 … num_chunks-1."""
        pool = KvPool(self.config, self.boot.page_size, num_chunks)
        return ModelRunner(self.decoder, pool, choose_backend(self.config, pool), self.geometry(self.boot.page_size))


class ModelRunner:
    """See exec.interface.Runner."""

    supports_batching = True
    window: int | None = None

    def __init__(self, decoder: Decoder, pool: KvPool, backend: Backend, geometry: Geometry) -> None:
        self.decoder, self.pool, self.backend, self.geometry = decoder, pool, backend, geometry
        self.vocab_size = decoder.config.vocab

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        results = [RowResult() for _ in rows]
        if not rows:
            return results
        logits = self.logits(rows)
        sampling = [i for i, row in enumerate(rows) if row.sample]
        draws = [Draw(r.sampling, r.choice, r.context, r.prompt_len) for r in (rows[i] for i in sampling)]
        with torch.inference_mode():
            for i, drawn in zip(sampling, sample(logits, draws), strict=True):
                results[i] = RowResult(drawn.token, drawn.logprobs, drawn.error)
        return results

    def logits(self, rows: Sequence[RowWork]) -> torch.Tensor:
        """The forward pass alone: logits [rows that sample, vocab], in the order of `rows`."""
        with torch.inference_mode():
            step = flatten(rows, self.pool.page_size)
            return self.decoder.forward(step.tokens, step.sample_at, self.backend.bind(step))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: str = FULL) -> None:
        self.pool.copy(pairs)

    def swap_out(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        raise NotImplementedError

    def swap_in(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        raise NotImplementedError

    def release_chunks(self, chunks: Sequence[int]) -> None:
        self.pool.release(chunks)
