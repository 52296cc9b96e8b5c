"""A search for the load under which the law does worst against the untouched defaults: `make law-fuzz`.

A load is six phases of (seconds, rate, prompt, output). The search mutates what is worst so far and keeps what is worse still;
the worst finds are written down with their figures, and a test replays them. Its measure is O8: good rows of the defaults ×
0.98 less those of the law, beyond one queue's worth for each change of load.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

from weir_operator.simulate.load import Phase, arrivals
from weir_operator.simulate.port import PodSetup
from weir_operator.simulate.run import static, tuned
from weir_operator.tuner.types import TunerSpec
from weir_server.contract import Knobs, Plant, Slo

PLANT = Plant(0.042, 0.0032, 1e-7, 0.002, 64)
SLO = Slo(4.0, 0.12)
BOOT = Knobs(4, None, 0.01, 32)
PHASES, KEPT = 6, 5
FILE = Path(__file__).resolve().parent.parent / "results" / "tuner-worst-loads.json"
Genome = list[list[float]]
RANGES = ((20.0, 300.0), (0.02, 4.0), (8.0, 1500.0), (4.0, 300.0))


def harm(genome: Genome, seed: int) -> dict[str, Any]:
    """Good rows of both, and how many the law lacks beyond what O8 allows (negative: it gained)."""
    phases, at = [], 0.0
    for seconds, rate, prompt, output in genome:
        at += seconds
        phases.append(Phase(at, rate, prompt, output, 0.6))
    rows = list(arrivals(phases, seed, 4096))
    setup = PodSetup(PLANT, SLO, BOOT, context=4096, seed=seed)
    law, default = tuned(setup, rows, at, TunerSpec(SLO.ttft, SLO.tpot)), static(setup, rows, at)
    allowed = BOOT.max_queue_depth * len(genome)
    lacks = 0.98 * len(default.good) - len(law.good)
    return {
        "seconds": at, "rows": len(rows), "law": len(law.good), "defaults": len(default.good), "lacks": round(lacks, 1),
        "beyond": round(lacks - allowed, 1), "reversals": law.reversals, "seed": seed,
        "phases": [[round(v, 3) for v in phase] for phase in genome],
    }


def drawn(rng: random.Random) -> Genome:
    return [[math.exp(rng.uniform(math.log(a), math.log(b))) for a, b in RANGES] for _ in range(PHASES)]


def mutated(genome: Genome, rng: random.Random) -> Genome:
    new = [list(phase) for phase in genome]
    for _ in range(rng.randint(1, 3)):
        i, j = rng.randrange(PHASES), rng.randrange(len(RANGES))
        low, high = RANGES[j]
        new[i][j] = min(high, max(low, new[i][j] * math.exp(rng.gauss(0, 0.7))))
    return new


def search(seconds: float, seed: int) -> list[dict[str, Any]]:
    rng, began, worst = random.Random(seed), time.monotonic(), [harm(drawn(random.Random(seed)), seed)]
    count = 1
    while time.monotonic() - began < seconds:
        parent = rng.choice(worst)["phases"]
        found = harm(mutated(parent, rng) if rng.random() < 0.8 else drawn(rng), rng.randrange(100))
        worst = sorted([*worst, found], key=lambda w: -w["lacks"])[:KEPT]
        count += 1
        if count % 20 == 0:
            print(f"{count} loads, worst lacks {worst[0]['lacks']} rows", file=sys.stderr, flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(prog="weir_bench.worst_loads", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    known = json.loads(FILE.read_text()) if FILE.exists() else []
    again = [harm(w["phases"], w["seed"]) for w in known]  # the law may have changed since
    worst = sorted([*again, *search(options.seconds, options.seed)], key=lambda w: -w["lacks"])[:KEPT]
    FILE.write_text(json.dumps(worst, indent=1) + "\n")
    print(json.dumps(worst, indent=1))


if __name__ == "__main__":
    main()
