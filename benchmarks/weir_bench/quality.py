"""What 8-bit weights change: agreement of the most likely token, KL divergence and perplexity on a fixed text, against float32.

    PYTHONPATH=benchmarks python -m weir_bench.quality

The text is the beginning of Newton's Opticks (fourth edition, 1730; public domain; Project Gutenberg's transcription), fed in
windows of 512 tokens, each from an empty context; every token but a window's first is scored. `served` is the model as
`--quantize int8` serves it, kernels and all. The other rows tell what a scale for more weights would do: the float32 model with
its matrices rounded to 8 bits with one scale for each so many weights of a row, 0 meaning the whole row.
"""

from __future__ import annotations

import math
from dataclasses import replace
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
SCALES = (32, 64, 128, 0)
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


def compare(want: Scorer, got: Scorer, windows: list[list[int]], name: str) -> dict[str, float]:
    """`got` against `want`; KL in nats, of their distributions of the next token."""
    agree = kl = 0.0
    surprise, tokens = [0.0, 0.0], 0
    for window in track(windows, description=name):
        next_ones = torch.tensor(window[1:])[:, None]
        p, q = (score(window)[:-1] for score in (want, got))
        agree += float((p.argmax(1) == q.argmax(1)).sum())
        kl += float((p.exp() * (p - q)).sum())
        for i, logs in enumerate((p, q)):
            surprise[i] -= float(logs.gather(1, next_ones).sum())
        tokens += len(next_ones)
    before, after = (math.exp(s / tokens) for s in surprise)
    return {"argmax_agreement": agree / tokens, "mean_kl": kl / tokens, "perplexity_float32": before, "perplexity": after,
            "perplexity_change": after / before - 1, "tokens": tokens}


def measure(model: str) -> dict[str, Any]:
    loaded = load(boot(model, quantize="int8"))
    results.moved({"the product of 8-bit weights": loaded.weights == "int8"})
    ids = load_tokenizer(Path(loaded.boot.model)).encode(TEXT.read_text(encoding="utf-8"), add_special=False)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)]
    with torch.inference_mode():
        want = Scorer(in_float32(loaded, None))
        served = compare(want, Scorer(loaded), windows, "served")
        scales = {str(g): compare(want, Scorer(in_float32(loaded, g)), windows, f"a scale for {g or 'a row'}") for g in SCALES}
    figures = {k: served[k] for k in ("argmax_agreement", "mean_kl", "perplexity_change")}
    return {"figures": figures, "text": TEXT.name, "window": WINDOW, "served": served, "scales": scales, "model": loaded.model}


def main() -> None:
    args = results.arguments("quality", __doc__).parse_args()
    outcome = measure(args.model)
    figures = outcome["figures"]
    print(results.write("quality", outcome, args.output), figures)
    if figures["argmax_agreement"] < AGREE or abs(figures["perplexity_change"]) > PERPLEXITY:
        raise SystemExit(f"8-bit weights change more than they may: {figures}")


if __name__ == "__main__":
    main()
