"""The admission watermark under a tight KV budget: what it costs in waiting, and what it saves in preemptions.

    PYTHONPATH=benchmarks python -m weir_bench.watermark [--null]

Three conversations of three turns go on at the same time, each turn sent when the last answer is there and with all that was
said before it. The budget holds two thirds of what they come to together, so a batch that is filled to the last block must
give rows up. For each watermark: preemptions, how often cached prefixes were given up for running rows, turns completed, time.

Counts follow from steps alone and not from the machine. So they are taken from many sets of conversations over the model that
computes nothing, and the real model then shows the times of those with the most preemptions; its counts must be the same.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import Progress

from weir_bench import results
from weir_bench.arrivals import prompt_ids
from weir_bench.inprocess import Bench, boot, load, null_boot, quiet
from weir_server.engine.child import Model

WATERMARKS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.15)
CONVERSATIONS, TURNS, SAID, ANSWER = 3, 3, 40, 200
TOGETHER = CONVERSATIONS * TURNS * (SAID + ANSWER)
SHARE = 0.65
PAGE = 16


class Talk:
    """One conversation: `tokens` is all that was said, both sides."""

    def __init__(self, seed: int) -> None:
        self.rng, self.tokens, self.turn = random.Random(seed), list[int](), 0

    def say(self, b: Bench) -> int:
        self.tokens += prompt_ids(SAID, self.rng)
        self.turn += 1
        return b.submit(list(self.tokens), round(ANSWER * self.rng.uniform(0.5, 1.5)))


def setup() -> dict[str, Any]:
    """Boot values of the tight budget."""
    return {
        "max_batch_size": CONVERSATIONS + 1, "context_per_slot": TURNS * (SAID + 2 * ANSWER), "page_size": PAGE,
        "num_blocks": int(SHARE * TOGETHER / PAGE), "max_requests_per_batch": CONVERSATIONS + 1,
    }  # fmt: skip


def converse(b: Bench, seed: int) -> dict[str, Any]:
    """One set of conversations to its end."""
    talks, reclaims, began = [Talk(CONVERSATIONS * seed + n) for n in range(CONVERSATIONS)], 0, time.monotonic()
    speaking = {talk.say(b): talk for talk in talks}
    while b.engine.busy:
        evicted, admitted = b.stats.prefix_evictions, sum(row.admitted is not None for row in b.rows.values())
        ended = b.step()
        grew = sum(row.admitted is not None for row in b.rows.values()) == admitted
        reclaims += grew and b.stats.prefix_evictions > evicted
        for id, _ in ended:
            talk = speaking.pop(id)
            talk.tokens += b.rows[id, 0].tokens
            if talk.turn < TURNS:
                speaking[talk.say(b)] = talk
    s = b.stats
    return {
        "preemptions": s.preempted, "reclaims_by_decodes": reclaims, "turns": sum(talk.turn for talk in talks),
        "seconds": time.monotonic() - began, "steps": s.step["steps"], "recomputed_tokens": s.recomputed_tokens,
        "prefix_hits": s.prefix_hits,
    }  # fmt: skip


def measure(model: Model, make: Any, sets: Sequence[int], progress: Progress, name: str) -> list[dict[str, Any]]:
    cells = []
    for seed in progress.track(sets, description=f"{len(sets)} sets of conversations, {name}"):
        for watermark in WATERMARKS:
            b = Bench(make(admission_watermark=watermark), model)
            cells.append({"watermark": watermark, "set": seed, **converse(b, seed)})
            b.runner.release_chunks(range(2, b.sizing.num_chunks))
    return cells


def hardest(counted: Sequence[Mapping[str, Any]], sets: int) -> list[int]:
    """The sets of conversations with the most preemptions: those are worth a run of the real model."""
    of: dict[int, int] = defaultdict(int)
    for cell in counted:
        of[cell["set"]] += cell["preemptions"]
    return sorted(of, key=lambda seed: -of[seed])[:sets]


def table(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each watermark, totals over the sets."""
    names = ("preemptions", "reclaims_by_decodes", "turns", "seconds", "steps", "recomputed_tokens")
    return {f"{w:g}": {name: sum(c[name] for c in cells if c["watermark"] == w) for name in names} for w in WATERMARKS}


def main() -> None:
    parser = results.arguments("watermark", __doc__)
    parser.add_argument("--sets", type=int, default=20, help="sets of conversations that are counted")
    parser.add_argument("--timed", type=int, default=1, help="of which the real model runs the hardest")
    args = parser.parse_args()
    quiet()
    values = setup()

    def null(**more: Any) -> Any:
        return null_boot(**values, **more)

    def real(**more: Any) -> Any:
        return boot(args.model, **values, **more)

    with Progress() as progress:
        counted = measure(load(null()), null, range(args.sets), progress, "counted")
        timed = measure(load(real()), real, hardest(counted, args.timed), progress, "timed") if args.timed else []
    figures = {"counted": table(counted), "timed": table(timed)}
    for w, row in figures["counted"].items():
        print(f"watermark {w:>4}: {row['preemptions']:3} preemptions, {row['reclaims_by_decodes']:4} reclaims by decodes, "
              f"{row['turns']} of {args.sets * CONVERSATIONS * TURNS} turns, {row['steps']:.0f} steps, "
              f"timed {figures['timed'][w]['seconds']:.0f} s")
    print(results.write("watermark", {"figures": figures, **values, "counted": counted, "timed": timed}, args.output))
    judge(counted, timed)


def judge(counted: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    """Ends the run where it shows nothing, or not what it should."""
    of = {w: sum(c["preemptions"] for c in counted if c["watermark"] == w) for w in WATERMARKS}
    results.moved({"preemptions without a watermark": of[0.0]})
    if any(c["turns"] < CONVERSATIONS * TURNS for c in counted + timed):
        raise SystemExit("turns were lost")
    if of[0.10] >= of[0.0]:
        raise SystemExit("the watermark saved no preemption")
    count = {(c["set"], c["watermark"]): (c["preemptions"], c["steps"]) for c in counted}
    if any(count[c["set"], c["watermark"]] != (c["preemptions"], c["steps"]) for c in timed):
        raise SystemExit("the real model was scheduled otherwise than the one that computes nothing")


if __name__ == "__main__":
    main()
