"""Loading a model for serving, and the Runner over it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from weir_server.contract import Geometry
from weir_server.exec.backends import Backend, choose_backend
from weir_server.exec.gemm import NativeKind
from weir_server.exec.interface import FULL, RowResult, RowWork
from weir_server.exec.pool import KvPool, geometry
from weir_server.exec.step import UnsupportedError, flatten
from weir_server.link.messages import Boot
from weir_server.model.config import DecoderConfig
from weir_server.model.decoder import Decoder
from weir_server.model.files import ModelError
from weir_server.model.int8 import Matrix
from weir_server.model.linear import Products, agrees, probe
from weir_server.model.loader import load_checkpoint, read_headers, weights_bytes
from weir_server.model.sampler import NOT_FINITE, Draw, logprobs_of, sample

log = logging.getLogger("weir.exec")


def load(boot: Boot) -> LoadedModel:
    """Load boot.model, choose how to multiply and attend, and measure nothing. Raises ModelError (the user's mistake)."""
    _check_dtype(boot.dtype)
    torch.set_num_threads(boot.threads)
    started = time.monotonic()
    checkpoint = load_checkpoint(Path(boot.model), boot.cache_dir, boot.quantize)
    with torch.inference_mode():
        products = choose_products([checkpoint.weights[name] for name in _SHAPES])
        if boot.deterministic and not products.row_independent:
            raise ModelError("--deterministic cannot be kept here: this machine's matrix products depend on the row count.")
        if not products.row_independent:
            log.warning("matrix products depend on the row count here: batching and prefix hits may flip near-ties")
        if checkpoint.int8 and not products.keeps_int8:
            log.warning("the 8-bit weights are held in float32, since these products have no other: they save no memory")
        loaded = LoadedModel(boot, Decoder(checkpoint, products), products, checkpoint.int8, checkpoint.mapped)
    log.info("loaded %s in %.2f s, matrix products: %s", boot.model, time.monotonic() - started, loaded.linear)
    return loaded


def _check_dtype(dtype: str) -> None:
    if dtype != "float32":
        raise ModelError(f"--dtype {dtype} is not served on this device; float32 is.")


_SHAPES = ("layers.0.qkv", "layers.0.out", "layers.0.gate_up", "layers.0.down", "embed")
"""One weight of each shape."""


def choose_products(weights: Sequence[Matrix]) -> Products:
    """Our own products where they were built and give the right values for `weights`, else torch's and a log line."""
    try:
        products = NativeKind()
    except UnsupportedError as e:
        log.warning("matrix products: torch's, because %s", e)
        return probe(weights)
    of_widths = {w.shape[1]: w for w in reversed(weights)}.values()
    if all(agrees(NativeKind(), weight) for weight in of_widths):  # packed aside: what is tried is not kept
        return products
    log.warning("matrix products: torch's, because ours differ from them")
    return probe(weights)


NATIVE = "native batched forward"
PER_ROW = "per-row fallback (aggregate decode throughput will not scale with --parallel)"
"""How rows that decode together run; the words of the start-up line."""

HEAD_ROWS = 64
"""Most rows that the head multiplies at a time for prompt logprobs: their logits are the largest tensor of a step."""


KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ModelSizes:
    """What a model takes, by its config alone. `int8`: its matrices are multiplied in 8 bits. `weights_bytes`: memory that its
    weights hold, fewer where they are `mapped` from the weight cache."""

    def __init__(self, config: DecoderConfig, int8: bool, mapped: bool, kv_dtype: str) -> None:
        self.config, self.kv_dtype = config, KV_DTYPES[kv_dtype]
        self.context_length, self.window = config.context, config.window
        self.weights_bytes = weights_bytes(config, int8, mapped)

    def chunk_bytes(self, page_size: int) -> int:
        return self.geometry(page_size).chunk_bytes

    def geometry(self, page_size: int) -> Geometry:
        return geometry(self.config, page_size, self.kv_dtype)

    def activation_bytes(self, max_tokens: int) -> int:
        """Most memory that a step of `max_tokens` tokens needs beside weights and pool, its logits included."""
        c = self.config
        widest = 4 * c.hidden + 2 * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 2 * 3 * c.ffn
        rotary = len(c.layers_of) * c.context * c.head_dim
        return 4 * (max_tokens * widest + 4 * min(max_tokens, HEAD_ROWS) * c.vocab + 2 * rotary)


def describe(boot: Boot) -> ModelSizes:
    """From the headers of boot.model, as if its weights could be mapped. Raises ModelError."""
    _check_dtype(boot.dtype)
    config, int8 = read_headers(Path(boot.model), boot.quantize)
    return ModelSizes(config, int8 and _has_kernels(), mapped=True, kv_dtype=boot.kv_dtype)


def _has_kernels() -> bool:
    try:
        return NativeKind().keeps_int8
    except UnsupportedError:
        return False


class LoadedModel(ModelSizes):
    """A model in memory, not yet given a pool."""

    def __init__(self, boot: Boot, decoder: Decoder, products: Products, int8: bool, mapped: bool) -> None:
        super().__init__(decoder.config, int8 and products.keeps_int8, mapped, boot.kv_dtype)
        held = "int8" if products.keeps_int8 else "int8 held in float32"
        self.weights = held if int8 else "float32"
        self.boot, self.decoder, self.linear = boot, decoder, f"{self.weights}, {products}"
        self.settle = products.settle
        self.decode_path = NATIVE if decoder.batched else PER_ROW

    @property
    def model(self) -> dict[str, str | int | float | bool | None]:
        """For Ready.model."""
        c = self.config
        return {
            "family": c.family, "layers": c.layers, "hidden": c.hidden, "heads": c.heads, "kv_heads": c.kv_heads,
            "vocab_size": c.vocab, "context_length": c.context, "window": c.window, "weights_bytes": self.weights_bytes,
            "dtype": "float32", "weights": self.weights, "kv_dtype": self.boot.kv_dtype,
            "decode_path": self.decode_path, "linear": self.linear,
            "isa": torch.backends.cpu.get_cpu_capability(),
        }  # fmt: skip

    def runner(self, num_chunks: int, swap_chunks: int = 0) -> ModelRunner:
        """A Runner over a pool of `num_chunks` chunks, pages of boot.page_size tokens, and a swap pool of `swap_chunks`.
        Chunks 0 and 1 of the first are reserved for padding: rows own blocks of chunks 2 … num_chunks-1."""
        pool = KvPool(self.config, self.boot.page_size, num_chunks, self.kv_dtype)
        swap = KvPool(self.config, self.boot.page_size, swap_chunks, self.kv_dtype) if swap_chunks else None
        return ModelRunner(self.decoder, pool, choose_backend(self.decoder, pool), swap)


class ModelRunner:
    """See exec.interface.Runner."""

    supports_batching = True

    def __init__(self, decoder: Decoder, pool: KvPool, backend: Backend, swap: KvPool | None = None) -> None:
        self.decoder, self.pool, self.backend, self.swap = decoder, pool, backend, swap
        self.geometry, self.window = pool.geometry, decoder.config.window
        self.vocab_size = decoder.config.vocab
        self._hidden, self._head = (backend.compile(f, decoder.config.hidden) for f in (decoder.hidden, decoder.head))

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        if len(rows) > 1 and not self.decoder.batched:
            return [self.execute([row])[0] for row in rows]
        results = [RowResult() for _ in rows]
        if not rows:
            return results
        with torch.inference_mode():
            states, scored = self._forward(rows)
            sampling = [i for i, row in enumerate(rows) if row.sample]
            draws = [Draw(r.sampling, r.choice, r.context, r.prompt_len) for r in (rows[i] for i in sampling)]
            logits = self._head(states[: len(sampling)])
            for i, drawn in zip(sampling, sample(logits, draws), strict=True):
                results[i] = RowResult(drawn.token, drawn.logprobs, drawn.error)
            for i, at in scored.items():
                self._score(rows[i], states[at], results[i])
        return results

    def logits(self, rows: Sequence[RowWork]) -> torch.Tensor:
        """The forward pass alone: logits [rows that sample, vocab], in the order of `rows`."""
        with torch.inference_mode():
            states, _ = self._forward(rows)
            return self._head(states[: sum(row.sample for row in rows)]).clone()

    def _forward(self, rows: Sequence[RowWork]) -> tuple[torch.Tensor, dict[int, slice]]:
        """What the head reads: first of each row that samples, then of the tokens that prompt logprobs are asked of; and
        where each such row's lie."""
        step, scored = flatten(rows, self.pool.page_size, self.decoder.config), dict[int, slice]()
        picked, end = [step.picked], len(step.picked)
        for i, row in enumerate(rows):
            if n := _scored(row):
                picked.append(torch.arange(int(step.starts[i]), int(step.starts[i]) + n))
                scored[i] = slice(end, end + n)
                end += n
        if scored:
            step = replace(step, picked=torch.cat(picked))
        return self._hidden(self.decoder.embedded(step.tokens), step), scored

    def _score(self, row: RowWork, states: torch.Tensor, result: RowResult) -> None:
        """Logprobs of the prompt tokens that follow those fed, in tiles: nothing of the size [prompt, vocab] is held."""
        result.prompt_logprobs = []
        for begin in range(0, len(states), HEAD_ROWS):
            logits = self._head(states[begin : begin + HEAD_ROWS])
            if not bool(torch.isfinite(logits).all()):
                result.error = NOT_FINITE
                return
            first = row.start + begin + 1
            result.prompt_logprobs += logprobs_of(logits, row.context[first : first + len(logits)], row.prompt_logprobs)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: str = FULL) -> None:
        self.pool.copy(pairs, kind)

    def swap_out(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._swap().fetch(self.pool, pairs)

    def swap_in(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self.pool.fetch(self._swap(), pairs)

    def _swap(self) -> KvPool:
        if self.swap is None:
            raise ValueError("this runner was made without a swap pool")
        return self.swap

    def release_chunks(self, chunks: Sequence[int]) -> None:
        self.pool.release(chunks)


def _scored(row: RowWork) -> int:
    """How many of the fed tokens another prompt token follows, where logprobs of those are asked for. Raises ValueError
    where the context ends before the last of them."""
    if row.prompt_logprobs < 0:
        return 0
    scored = max(0, min(len(row.tokens), row.prompt_len - 1 - row.start))
    if scored and len(row.context) < row.start + scored + 1:
        raise ValueError("prompt logprobs need the whole prompt as context")
    return scored
