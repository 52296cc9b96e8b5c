"""A prefix of 1,024 tokens that eight requests share: stored once, and the answers are those of a cold run, byte for byte.

    PYTHONPATH=benchmarks python -m weir_bench.prefix

Both engines serve the same prompts on the real model, in turn: one has the prefix cache, the other has not. A first request
brings the prefix in; then eight come at once, each with words of its own behind it. Reported: KV bytes that rows hold at
their most, the time to the first token, and whether tokens and log-probabilities are equal to the last bit.
"""

from __future__ import annotations

import random
from typing import Any

from rich.progress import Progress

from weir_bench import results
from weir_bench.arrivals import prompt_ids
from weir_bench.inprocess import Bench, boot, load, quiet

PREFIX, OWN, OUTPUT, SHARERS = 1024, 24, 32, 8


def sharers(b: Bench, prefix: list[int], tails: list[list[int]]) -> dict[str, Any]:
    """The first request alone, then all others at once, step by step."""
    first = b.submit(prefix + tails[0], OUTPUT, logprobs=True)
    b.run()
    ids = [b.submit(prefix + tail, OUTPUT, logprobs=True) for tail in tails[1:]]
    most = 0
    while b.engine.busy:
        b.step()
        most = max(most, b.stats.kv_used_bytes)
    rows = [b.rows[id, 0] for id in (first, *ids)]
    return {
        "most_used_bytes": most, "cached_tokens": [row.cached for row in rows[1:]], "ttft": [row.ttft for row in rows[1:]],
        "said": [(row.tokens, row.logprobs) for row in rows],
    }  # fmt: skip


def main() -> None:
    parser = results.arguments("prefix", __doc__)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    quiet()
    values = {
        on: boot(
            args.model, max_batch_size=SHARERS, context_per_slot=2048, num_blocks=SHARERS * 80, prefix_cache=on,
            prefill_chunk=PREFIX,  # whole prompts: eight cold rows are in the batch at once
        )
        for on in (True, False)
    }
    model, runs = load(values[True]), {True: list[dict[str, Any]](), False: list[dict[str, Any]]()}
    with Progress() as progress:
        for repeat in progress.track(range(args.repeats), description="eight sharers, warm and cold"):
            rng = random.Random(repeat)
            prefix, tails = prompt_ids(PREFIX, rng), [prompt_ids(OWN, rng) for _ in range(SHARERS + 1)]
            for on in (True, False):
                b = Bench(values[on], model)
                runs[on].append(sharers(b, prefix, tails))
                if on:
                    results.moved({"prefix hits": b.stats.prefix_hits == SHARERS * PREFIX})
                else:
                    results.moved({"cold": b.stats.prefix_hits == 0})
                b.runner.release_chunks(range(2, b.sizing.num_chunks))
    geometry = b.runner.geometry
    token_bytes, size = geometry.chunk_bytes // geometry.block_tokens, geometry.block_tokens
    own = SHARERS * (-(-(PREFIX + OWN + OUTPUT - 1) // size) - PREFIX // size) * geometry.chunk_bytes
    warm, cold = runs[True], runs[False]
    same = [a.pop("said") == b.pop("said") for a, b in zip(warm, cold, strict=True)]
    shared, apart = (max(run["most_used_bytes"] for run in runs[on]) for on in (True, False))
    figures = {
        "prefix_bytes": PREFIX * token_bytes, "used_bytes_with_sharing": shared, "used_bytes_without": apart,
        "saved_bytes": apart - shared, "copies_of_the_prefix": (shared - own) / (PREFIX * token_bytes),
        "identical_to_cold": all(same),
        "ttft_seconds_with_sharing": results.spread([t for run in warm for t in run["ttft"]]),
        "ttft_seconds_without": results.spread([t for run in cold for t in run["ttft"]]),
    }  # fmt: skip
    print(results.write("prefix", {"figures": figures, "warm": warm, "cold": cold}, args.output))
    print(figures)
    if not all(same) or figures["copies_of_the_prefix"] != 1:
        raise SystemExit("the prefix was not stored once, or an answer differs from the cold one")


if __name__ == "__main__":
    main()
