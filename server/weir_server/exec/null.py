"""A runner that computes nothing: token ids from hash(seed, choice, position), no logits, a prompt's logprobs −1, −2, …

Behind the same scheduler, cache, commit and link it shows what the engine itself costs, and it makes the right output of any
request known in advance. `NullModel` stands where a loaded model does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weir_server.contract import Geometry
from weir_server.exec.interface import FULL, RowResult, RowWork
from weir_server.link.messages import TokenLogprobs

VOCAB = 32000
CONTEXT = 8192
BYTES_PER_TOKEN = 256
_MASK = (1 << 64) - 1


def null_token(seed: int, choice: int, position: int, vocab_size: int = VOCAB) -> int:
    """The token at `position` of a row (splitmix64 of the three numbers)."""
    x = (seed * 0x9E3779B97F4A7C15 + choice * 0xD1B54A32D192ED03 + position * 0x8CB92BA72F3D8DD7) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) % vocab_size


class NullRunner:
    """See exec.interface.Runner."""

    supports_batching = True

    def __init__(self, geometry: Geometry, vocab_size: int = VOCAB, window: int | None = None) -> None:
        self.geometry, self.window = geometry, window
        self.vocab_size = vocab_size

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        results = [
            RowResult(null_token(row.sampling.seed, row.choice, row.start + len(row.tokens), self.vocab_size))
            if row.sample else RowResult()
            for row in rows
        ]  # fmt: skip
        for row, result in zip(rows, results, strict=True):
            if row.prompt_logprobs >= 0:
                told = min(row.start + len(row.tokens), row.prompt_len - 1) - row.start
                result.prompt_logprobs = [TokenLogprobs(-float(row.start + i + 1), []) for i in range(told)]
        return results

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: str = FULL) -> None:
        pass

    def swap_out(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        pass

    def swap_in(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        pass

    def release_chunks(self, chunks: Sequence[int]) -> None:
        pass


class NullModel:
    """What exec.runner.load returns, without a model."""

    context_length = CONTEXT
    weights_bytes = 0
    window: int | None = None
    decode_path = "null"
    model: dict[str, str | int | float | bool | None] = {"family": "null", "vocab_size": VOCAB, "decode_path": decode_path}

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def chunk_bytes(self, page_size: int) -> int:
        return page_size * BYTES_PER_TOKEN

    def geometry(self, page_size: int) -> Geometry:
        return Geometry(self.chunk_bytes(page_size), page_size, {"full_attention": 1})

    def activation_bytes(self, max_tokens: int) -> int:
        return 0

    def settle(self) -> None:
        pass

    def runner(self, num_chunks: int, swap_chunks: int = 0) -> NullRunner:
        return NullRunner(self.geometry(self.page_size))
