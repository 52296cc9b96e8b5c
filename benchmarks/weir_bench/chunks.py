"""Prompt tokens of a step and tokens of a page: what policy.limits' CHUNK_IDLE and CHUNK_DECODING and --page-size rest on.

    OMP_WAIT_POLICY=passive PYTHONPATH=benchmarks python -m weir_bench.chunks [--rounds 5] [--model package://…]

Three tables, each from steps of the real model through its runner, kinds interleaved in every round, medians over the rounds:

- alone: a prompt in pieces of each size while nothing decodes. The larger the piece, the fewer times the weights are read;
  a newcomer waits for the piece under way.
- beside decodes: one step of ROWS decoding rows and a piece. What a piece adds to everybody's interval between tokens, and
  how fast prompts get through.
- pages: a decode step of many rows and a large piece, for each page size. Half a page of every row is never used.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

import msgspec

from weir_bench import results
from weir_server.exec.interface import RowWork
from weir_server.exec.runner import LoadedModel, ModelRunner, load
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.link.messages import Boot, Sampling
from weir_server.model.files import resolve

PROMPT, ROWS, CONTEXT = 1024, 4, 256
ALONE = (32, 64, 128, 256, 512, 1024)
BESIDE = (0, 16, 32, 64, 128, 256, 512)
PAGES, PAGE_ROWS, PAGE_CONTEXT = (16, 32, 64), 8, 1024
SAMPLING = Sampling(max_tokens=1 << 20, temperature=0.0)


class Bench:
    """A runner with pages of one size. Its pool is filled with noise: untouched memory would be read from one page of zeros."""

    def __init__(self, loaded: LoadedModel, page: int, tokens: int, rows: int) -> None:
        loaded.boot = msgspec.structs.replace(loaded.boot, page_size=page)
        self.per_row = -(-tokens // page)
        self.runner: ModelRunner = loaded.runner(RESERVED_CHUNKS + self.per_row * rows)
        self.runner.pool.flat.uniform_(-1, 1)

    def row(self, place: int, start: int, count: int) -> RowWork:
        """`count` tokens at `start` of the `place`-th row."""
        begin, context = RESERVED_CHUNKS + place * self.per_row, [1] * (start + count)
        return RowWork(
            context[start:], start, range(begin, begin + self.per_row), True, SAMPLING, place, context, len(context)
        )

    def seconds(self, rows: list[RowWork]) -> float:
        begin = time.perf_counter()
        self.runner.execute(rows)
        return time.perf_counter() - begin

    def prefill(self, piece: int) -> float:
        """Seconds of a whole prompt in pieces."""
        return sum(self.seconds([self.row(0, at, min(piece, PROMPT - at))]) for at in range(0, PROMPT, piece))

    def beside(self, piece: int) -> float:
        """Seconds of a step in which ROWS rows decode and a prompt is fed a piece from its middle on."""
        decoding = [self.row(i, CONTEXT, 1) for i in range(ROWS)]
        return self.seconds(decoding + ([self.row(ROWS, PROMPT // 2, piece)] if piece else []))


def measure(loaded: LoadedModel, rounds: int) -> dict[str, Any]:
    """Medians of all kinds of steps, in seconds, and what follows from them."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    one = Bench(loaded, PAGES[0], PROMPT + max(BESIDE), ROWS + 1)
    paged = {page: Bench(loaded, page, PAGE_CONTEXT + page, PAGE_ROWS) for page in PAGES}
    for _ in range(rounds + 1):
        for piece in ALONE:
            times["alone", piece].append(one.prefill(piece))
        for piece in BESIDE:
            times["beside", piece] += [one.beside(piece) for _ in range(3)]
        for page, bench in paged.items():
            decoding = [bench.row(i, PAGE_CONTEXT, 1) for i in range(PAGE_ROWS)]
            times["decode", page] += [bench.seconds(decoding) for _ in range(3)]
            times["prefill", page].append(bench.seconds([bench.row(0, PAGE_CONTEXT // 2, PAGE_CONTEXT // 2)]))
    of = {key: median(values[len(values) // (rounds + 1) :]) for key, values in times.items()}  # the first round warms up
    best, plain = min(of["alone", piece] for piece in ALONE), of["beside", 0]
    return {
        "alone": [
            {
                "piece": piece, "prompt_tokens_per_s": PROMPT / of["alone", piece], "of_best": best / of["alone", piece],
                "step_s": of["alone", piece] * piece / PROMPT,
            }
            for piece in ALONE
        ],
        "beside": [
            {
                "piece": piece, "interval_s": of["beside", piece], "of_plain": of["beside", piece] / plain,
                "prompt_tokens_per_s": piece / of["beside", piece], "decode_tokens_per_s": ROWS / of["beside", piece],
            }
            for piece in BESIDE
        ],
        "pages": [
            {
                "page": page, "decode_step_s": of["decode", page], "prefill_step_s": of["prefill", page],
                "unused_share_of_256_tokens": (page - 1) / 2 / 256,
            }
            for page in PAGES
        ],
        "setting": {
            "prompt": PROMPT, "rows": ROWS, "context": CONTEXT, "page_rows": PAGE_ROWS, "page_context": PAGE_CONTEXT,
            "rounds": rounds,
        },
    }  # fmt: skip


def main() -> None:
    parser = results.arguments("chunks", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    outcome = measure(load(Boot(model=str(resolve(args.model)), threads=args.threads)), args.rounds)
    for table in ("alone", "beside", "pages"):
        print(table)
        for line in outcome[table]:
            print("  " + "  ".join(f"{k} {v:.4g}" for k, v in line.items()))
    print(results.write("chunks", outcome, args.output))


if __name__ == "__main__":
    main()
