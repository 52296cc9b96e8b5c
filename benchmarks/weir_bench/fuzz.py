"""Random walks of the whole engine against an oracle, as the unit test does them, but a million steps of them.

    PYTHONPATH=benchmarks:tests/unit python -m weir_bench.fuzz [--steps N] [--seed S]

One process a core, each taking rounds of walks with seeds of their own. The first round that fails ends the run and is shown
as the calls that repeat it; `--seed THAT --steps 1 --shrink` makes them few, to be kept in tests/unit/test_fuzz_engine.py.
"""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from weir_bench import results
from weir_bench.process import die_with_parent

WALKS = 50
"""Of one round."""


def round_of(seed: int, shrink: bool) -> tuple[int, Counter[str], str | None]:
    """A round with this seed, in a worker: what its walks came to, and what went wrong."""
    import test_fuzz_engine as fuzz  # from tests/unit

    fuzz.total.clear()
    try:
        fuzz.walk(WALKS, seed, shrink)
    except AssertionError as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        said = [f"{type(e).__name__}: {e} ({where.filename}:{where.lineno})", *getattr(e, "__notes__", [])]
        return seed, fuzz.total.copy(), "\n".join(said)
    except Exception as e:
        return seed, fuzz.total.copy(), "".join(traceback.format_exception(e))
    return seed, fuzz.total.copy(), None


def walks(steps: int, first: int, processes: int, shrink: bool) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Rounds until there are `steps`, or until one fails."""
    total: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    with Progress(*columns) as progress, ProcessPoolExecutor(processes, context, die_with_parent) as pool:
        bar, seed = progress.add_task("steps", total=steps), first
        running: set[Future[tuple[int, Counter[str], str | None]]] = set()
        while running or (total["steps"] < steps and not failures):
            while len(running) < processes and total["steps"] < steps and not failures:
                running.add(pool.submit(round_of, seed, shrink))
                seed += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                at, counted, failure = future.result()
                total.update(counted)
                total["rounds"] += 1
                if failure:
                    failures.append({"seed": at, "failure": failure})
                    progress.console.print(f"round {at}:\n{failure}", markup=False, highlight=False)
            progress.update(bar, completed=min(total["steps"], steps))
            if not progress.console.is_terminal and total["rounds"] % 20 == 0:
                print(f"{total['steps']:,} of {steps:,} steps", flush=True)
    return total, failures


def main() -> None:
    parser = results.arguments("fuzz", __doc__, model=False)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="of the first round (default: a random one, printed)")
    parser.add_argument("--processes", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--shrink", action="store_true", help="look for the shortest walk that fails likewise (minutes)")
    args = parser.parse_args()
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    print(f"seed {seed}, {args.processes} processes")
    began = time.monotonic()
    total, failures = walks(args.steps, seed, args.processes, args.shrink)
    figures = {
        "steps": total["steps"], "walks": total["walks"], "seed": seed, "failures": len(failures),
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    still = sorted(name for name, count in total.items() if not count)
    print(results.write("fuzz", {"figures": figures, "counters": dict(sorted(total.items())), "failed": failures}, args.output))
    print(figures)
    if failures:
        raise SystemExit(1)
    results.moved(dict.fromkeys(still, 0))


if __name__ == "__main__":
    main()
