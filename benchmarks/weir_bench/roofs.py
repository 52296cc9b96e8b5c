"""What this machine can do at most: bytes read from memory, float32 multiply-adds in registers, and the best matrix product.

    PYTHONPATH=benchmarks python -m weir_bench.roofs

Reading and multiplying are loops in C (roofs.c), compiled for this processor and run by all threads; the best pass counts,
since a roof is what nothing else took a share of. The matrix product is the fastest that is known here: torch's own, oneDNN's
with packed weights, and ours, on a large square and on a model's widest layer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weir_bench import results

SOURCE = Path(__file__).with_name("roofs.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC")
GEMM_SHAPES = ((2048, 2048, 2048), (1024, 3072, 576))
"""Rows, outputs, inputs."""


@dataclass(frozen=True, slots=True)
class Roofs:
    """`read`: bytes a second with `threads` threads; `fma`, `gemm`: float32 operations a second."""

    threads: int
    read: float
    fma: float
    gemm: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def vector_bytes(isa: Sequence[str]) -> int:
    """Of a register; `isa` as results.machine() names it."""
    return 64 if "avx512f" in isa else 32 if "avx2" in isa else 16


def build(folder: Path) -> Path | None:
    """The program of roofs.c in `folder`, or None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    width, program = vector_bytes(results.machine()["isa"]), folder / "roofs"
    command = [compiler, *FLAGS, f"-DVECTOR={width}", "-DROOFS_MAIN", SOURCE, "-o", program]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return program


def measure(program: Path, seconds: float = 1.0) -> Roofs:
    """`seconds` for each of both."""
    said = subprocess.run([program, str(seconds)], check=True, capture_output=True, text=True, timeout=60 + 4 * seconds).stdout
    threads, read, fma = said.split()
    return Roofs(int(threads), float(read), float(fma))


def best(measured: Sequence[Roofs], gemm: float | None = None) -> Roofs:
    """The roofs of a run in which they were measured several times."""
    return Roofs(measured[0].threads, max(m.read for m in measured), max(m.fma for m in measured), gemm)


class Beside:
    """Roofs before and after each cell of a run; the better of the two is the cell's (decision 147). None without a program."""

    def __init__(self, program: Path | None) -> None:
        self._program = program
        self._before = measure(program) if program else None

    def cell(self) -> Roofs | None:
        """Of what was measured since the last cell, or since the beginning."""
        before, self._before = self._before, measure(self._program) if self._program else None
        return best([before, self._before]) if before and self._before else None


def gemm_peak(seconds: float = 0.5) -> float:
    """Operations a second of the best product, from a process of its own: torch stays out of the caller."""
    command, found_in = [sys.executable, "-m", "weir_bench.roofs", "--gemm", str(seconds)], Path(__file__).resolve().parents[1]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=found_in).stdout)


def _gemm_peak(seconds: float) -> float:
    import torch

    from weir_server.exec.gemm import NativeKind
    from weir_server.exec.step import UnsupportedError

    def products(x: Any, weight: Any) -> list[Callable[[], Any]]:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        calls = [
            lambda: torch.nn.functional.linear(x, weight),
            lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        ]
        try:
            ours = NativeKind()(weight)
        except UnsupportedError:
            return calls
        return [*calls, lambda: ours(x)]

    peak = 0.0
    with torch.inference_mode():
        for rows, out, width in GEMM_SHAPES:
            for call in products(torch.randn(rows, width), torch.randn(out, width)):
                end = time.perf_counter() + seconds
                while (began := time.perf_counter()) < end:
                    call()
                    peak = max(peak, 2.0 * rows * out * width / (time.perf_counter() - began))
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.roofs", description=__doc__.split("\n")[0])
    parser.add_argument("--gemm", type=float, metavar="SECONDS", help="print the best matrix product alone")
    args = parser.parse_args()
    if args.gemm:
        print(_gemm_peak(args.gemm))
        return
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        if program is None:
            raise SystemExit("no C compiler, so no roofs")
        print(json.dumps(best([measure(program) for _ in range(3)], gemm_peak()).to_json()))


if __name__ == "__main__":
    main()
