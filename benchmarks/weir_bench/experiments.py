"""Every experiment on the engine, one after the other, each in a process of its own; one that fails does not stop the rest.

    PYTHONPATH=benchmarks python -m weir_bench.experiments [NAME …]

Run it on a quiet machine. The raw JSON goes to benchmarks/results/ and the figures in docs/benchmarks.md are made from it; what
each prints is shown, and the last table says which of them held. The status is 1 if one did not.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from weir_bench import results


class Experiment(NamedTuple):
    """`minutes`: what it takes on two quiet cores; it is ended after four times that."""

    minutes: float
    shows: str


EXPERIMENTS = {
    "overhead": Experiment(1.5, "what scheduler and cache cost without a model"),
    "steps": Experiment(1.5, "steps of decode alone, against the machine's roofs"),
    "attention": Experiment(0.7, "attention over pages in place against gathering them"),
    "prefix": Experiment(1.0, "a prefix of 1,024 tokens shared by eight requests"),
    "chunks": Experiment(1.5, "what steps cost for each size of a prefill chunk and of a page"),
    "streams": Experiment(2.5, "prefill chunks: time between four streams' tokens against a newcomer's first"),
    "watermark": Experiment(3.5, "the admission watermark under a tight budget"),
    "policies": Experiment(2.0, "orders of eviction and of victims"),
    "quality": Experiment(2.0, "what 8-bit weights change, on a fixed text"),
    "memory": Experiment(5.0, "memory given back, and 2,000 requests of random lengths"),
}


def main() -> None:
    parser = results.arguments("experiments", __doc__, model=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(EXPERIMENTS):
        parser.error(f"no experiment is called {sorted(unknown)[0]}")
    console, table, failed = Console(), Table("experiment", "minutes", "", title="Experiments"), 0
    for name in args.names or EXPERIMENTS:
        planned = EXPERIMENTS[name]
        console.rule(f"{name}: {planned.shows} (about {planned.minutes:g} min)")
        began, command = time.monotonic(), [sys.executable, "-m", f"weir_bench.{name}", f"--output={args.output}"]
        try:
            status = subprocess.run(command, timeout=240 * planned.minutes).returncode
            verdict = "held" if status == 0 else f"[red]did not hold, status {status}"
        except subprocess.TimeoutExpired:
            status, verdict = 1, "[red]took too long"
        failed += status != 0
        table.add_row(name, f"{(time.monotonic() - began) / 60:.1f}", verdict)
    subprocess.run([sys.executable, "-m", "weir_bench.tables", f"--output={args.output}"], check=False)  # docs/benchmarks.md
    console.print(table)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
