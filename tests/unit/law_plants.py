"""O4 over as many random plants as one likes: `python tests/unit/law_plants.py --count 100000 --jobs 2` (`make law-plants`).

The law exactly as shipped (choose, the error of a gain, the rule for a change of direction), with an exact model and a steady
mix, from any start. Reference: every setting of the envelope by the same chain.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise

from weir_operator.tuner.chain import Model, goodputs
from weir_operator.tuner.law import REVERSAL_GAIN
from weir_operator.tuner.setpoint import NIL, TIE, Reach, certain, choose
from weir_operator.tuner.types import Mix
from weir_server.contract import Plant, hist_index

MOST = 64
MOVES = math.ceil(math.log2(MOST)) + 2


@dataclass(frozen=True)
class Walk:
    seed: int
    path: list[tuple[int, int]]
    predicted: list[float]
    best: float
    offered: float

    @property
    def reversals(self) -> int:
        steps = [b[0] - a[0] for a, b in pairwise(self.path) if a[0] != b[0]]
        return sum(x * y < 0 for x, y in pairwise(steps))

    @property
    def of_best(self) -> float:
        return self.predicted[-1] / self.best

    @property
    def fell(self) -> bool:
        """By more than what counts as a tie: a setting that stands more load may be that much worse now."""
        return any(b < a * TIE * (1 - 1e-9) for a, b in pairwise(self.predicted))

    @property
    def counts(self) -> bool:
        """Whether anything at all can be had: else the batch is left where it is, by rule."""
        return self.best >= 1.1 * NIL * self.offered


def walk(seed: int) -> Walk:
    rng = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    plant = Plant(
        between(0.002, 0.08), between(1e-4, 0.01), rng.choice([0.0, between(1e-8, 2e-6)]),
        rng.choice([0.0, between(1e-5, 3e-3)]), rng.choice([64, 512]),
    )
    offered = between(0.1, 20)
    output, prefill, context = between(8, 400), between(0.05, 8), between(10, 3000)
    mix = Mix(offered, (offered,), output, prefill, context, clump=rng.choice([1.0, between(1, 20)]))
    spread = rng.choice([{1.0: 100.0}, {0.85: 10.0, 0.95: 30.0, 1.0: 30.0, 1.1: 20.0, 1.3: 10.0}])
    model = Model(plant, mix, {hist_index(v): 1e6 * w for v, w in spread.items()}, {hist_index(2.0): 100.0})
    ttft, tpot = between(0.3, 10), rng.uniform(1.05, 4) * model.interval(4)
    path, predicted, direction = [(rng.randint(1, MOST), rng.randint(1, MOST))], [], 0
    for _ in range(4 * MOVES):
        choice = _next(model, ttft, tpot, Reach(*path[-1], (1, MOST), (1, MOST)), direction)
        predicted.append(goodputs(model, ttft, tpot, *path[-1])[-1])
        if (choice.batch, choice.depth) == path[-1] or not choice.gains:
            break
        direction = (choice.batch > path[-1][0]) - (choice.batch < path[-1][0]) or direction
        path.append((choice.batch, choice.depth))
    best = max(max(goodputs(model, ttft, tpot, n, MOST)[1:]) for n in range(1, MOST + 1))
    return Walk(seed, path, predicted, best, offered)


def _next(model: Model, ttft: float, tpot: float, reach: Reach, direction: int):
    choice = choose(model, ttft, tpot, reach)
    turns = (choice.batch - reach.batch) * direction < 0
    doubtful = choice.batch != reach.batch and choice.gains and not certain(model, ttft, tpot, reach, choice, turns)
    small = turns and choice.goodput < REVERSAL_GAIN * choice.present
    return choose(model, ttft, tpot, reach.held()) if small or doubtful else choice


def wrong(w: Walk, share: float) -> str | None:
    """What of O4 this walk breaks."""
    if len(w.path) - 1 > MOVES:
        return f"{len(w.path) - 1} moves"
    if w.reversals:
        return "a reversal"
    if w.fell:
        return "a prediction fell"
    return f"ends at {w.of_best:.3f} of the best" if w.counts and w.of_best < share else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0, help="the first one's seed: 100,000 may be walked in parts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--share", type=float, default=0.95)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, and say how far it came")
    options = parser.parse_args()
    worst, below, failed, seen, walked, began = 1.0, 0, [], 0, 0, time.monotonic()
    seeds = range(options.start, options.start + options.count)
    with multiprocessing.Pool(options.jobs, initializer=os.nice, initargs=(15,)) as pool:
        for w in pool.imap(walk, seeds, chunksize=50):
            walked += 1
            if w.counts:
                seen, worst, below = seen + 1, min(worst, w.of_best), below + (w.of_best < 0.98)
            if why := wrong(w, options.share):
                failed.append({"why": why, **asdict(w)})
            if walked % 1000 == 0:
                print(f"{walked} plants: worst {worst:.4f}, {below} of {seen} under 0.98, {len(failed)} wrong", file=sys.stderr)
            if time.monotonic() - began > options.seconds:
                pool.terminate()
                break
    print(json.dumps({
        "start": options.start, "plants": walked, "with_goodput": seen, "worst": worst, "under_98_percent": below,
        "wrong": failed[:20], "wrong_count": len(failed),
    }, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
