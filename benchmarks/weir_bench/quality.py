"""What 8-bit weights change: agreement of the most likely token, KL divergence and perplexity on a fixed text, against float32.

    PYTHONPATH=benchmarks python -m weir_bench.quality

The text is the beginning of Newton's Opticks (fourth edition, 1730; public domain; Project Gutenberg's transcription), fed in
windows of 512 tokens, each from an empty context; every token but a window's first is scored. `served` is the model as
`--quantize int8` serves it, kernels and all. The other rows tell what a scale for more weights would do: the float32 model with
its matrices rounded to 8 bits with one scale for each so many weights of a row, 0 meaning the whole row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from weir_bench import results
from weir_bench.inprocess import boot
from weir_server.exec.gemm import NativeKind
from weir_server.exec.interface import RowWork
from weir_server.exec.runner import LoadedModel, load
from weir_server.exec.step import flatten
from weir_server.link.messages import Sampling
from weir_server.model.decoder import Decoder
from weir_server.model.int8 import dense
from weir_server.model.loader import load_checkpoint
from weir_server.text.tokenizer import load_tokenizer

TEXT = Path(__file__).parent / "texts" / "opticks.txt"
WINDOW = 512
SCALES = (64, 0)
AGREE, PERPLEXITY = 0.97, 0.01


def rounded(weight: torch.Tensor, group: int) -> torch.Tensor:
    """`weight` [out, in] as the nearest multiples of the largest / 127 of each `group` of a row (0: of the row)."""
    parts = weight.unflatten(1, (-1, group)) if group else weight.unsqueeze(1)
    scales = parts.abs().amax(2, keepdim=True) / 127
    return (torch.where(scales > 0, parts / scales, 0).round() * scales).flatten(1)


def in_float32(loaded: LoadedModel, group: int | None) -> LoadedModel:
    """The model in float32, its matrices rounded with a scale for each `group` weights; None: as they are."""
    checkpoint = load_checkpoint(Path(loaded.boot.model), loaded.boot.cache_dir, "none")
    if group is not None:
        for name, weight in checkpoint.weights.items():
            if weight.ndim == 2:
                checkpoint.weights[name] = rounded(dense(weight), group)
    return LoadedModel(loaded.boot, Decoder(checkpoint, NativeKind()), NativeKind(), int8=False, mapped=False)


class Scorer:
    """Logits of every token of a window."""

    def __init__(self, loaded: LoadedModel) -> None:
        page = loaded.boot.page_size
        self.blocks = range(2, 2 + -(-WINDOW // page))
        self.runner = loaded.runner(self.blocks.stop)
        decoder = loaded.decoder
        self.hidden, self.head = (self.runner.backend.compile(f, decoder.config.hidden) for f in (decoder.hidden, decoder.head))

    def __call__(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities float32 [tokens, vocab]."""
        decoder, pool = self.runner.decoder, self.runner.pool
        work = RowWork(tokens, 0, self.blocks, True, Sampling(max_tokens=1), 0, tokens, len(tokens), ring=self.blocks)
        step = replace(flatten([work], pool.page_size, decoder.config), picked=torch.arange(len(tokens)))
        return self.head(self.hidden(decoder.embedded(step.tokens), step)).log_softmax(-1)


@dataclass(slots=True)
class Sums:
    """Over the tokens scored so far; KL in nats, of the float32 model's distribution of the next token from ours."""

    tokens: int = 0
    agree: float = 0.0
    kl: float = 0.0
    surprise: float = 0.0

    def add(self, want: torch.Tensor, got: torch.Tensor, said: torch.Tensor) -> None:
        """Log-probabilities [tokens, vocab] of both, and what the text goes on with, int64 [tokens]."""
        self.tokens += len(said)
        self.agree += float((want.argmax(1) == got.argmax(1)).sum())
        self.kl += float((want.exp() * (want - got)).sum())
        self.surprise -= float(got.gather(1, said[:, None]).sum())

    def told(self, float32: Sums) -> dict[str, float]:
        change = math.exp((self.surprise - float32.surprise) / self.tokens) - 1
        return {"argmax_agreement": self.agree / self.tokens, "mean_kl": self.kl / self.tokens,
                "perplexity": math.exp(self.surprise / self.tokens), "perplexity_change": change}


def measure(model: str, most: int | None) -> dict[str, Any]:
    loaded = load(boot(model, quantize="int8"))
    results.moved({"the product of 8-bit weights": loaded.weights == "int8"})
    ids = load_tokenizer(Path(loaded.boot.model)).encode(TEXT.read_text(encoding="utf-8"), add_special=False)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)][:most]
    with torch.inference_mode():
        float32, served = Scorer(in_float32(loaded, None)), Scorer(loaded)
        scorers = {"float32": float32, "served": served} | {str(group): Scorer(in_float32(loaded, group)) for group in SCALES}
        sums = {name: Sums() for name in scorers}
        for window in track(windows, description="windows"):
            said, want = torch.tensor(window[1:]), float32(window)[:-1].clone()
            for name, scorer in scorers.items():
                sums[name].add(want, want if scorer is float32 else scorer(window)[:-1], said)
    told = {name: s.told(sums["float32"]) for name, s in sums.items()}
    figures = {k: told["served"][k] for k in ("argmax_agreement", "mean_kl", "perplexity_change")}
    return {"figures": figures, "text": TEXT.name, "window": WINDOW, "tokens": sums["served"].tokens, "weights": told,
            "model": loaded.model}


def main() -> None:
    parser = results.arguments("quality", __doc__)
    parser.add_argument("--windows", type=int, help="of the text, from its beginning (default: all)")
    args = parser.parse_args()
    outcome = measure(args.model, args.windows)
    figures = outcome["figures"]
    print(results.write("quality", outcome, args.output), figures)
    if figures["argmax_agreement"] < AGREE or abs(figures["perplexity_change"]) > PERPLEXITY:
        raise SystemExit(f"8-bit weights change more than they may: {figures}")


if __name__ == "__main__":
    main()
