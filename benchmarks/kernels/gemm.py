"""y = x · Wᵀ: our packed product beside oneDNN's prepacked linear and torch's F.linear, against this machine's roofs.

    python benchmarks/kernels/gemm.py                      # SmolLM2-135M's shapes, 1 … 128 rows, about a minute
    python benchmarks/kernels/gemm.py --model              # all linears of a step in the model's order
    python benchmarks/kernels/gemm.py --shapes 3072x576 --rows 1,8,32 --quantile 0.1

Weights come from memory, not from cache: each call takes the next of enough copies to exceed 64 MiB. What is compared runs in
turns, call by call; a cell is the median (or --quantile: a low one on a busy machine) of its calls. Roofs are measured in the
same turns: `read` streams the bytes of the same float32 copies with all threads; `fma` runs multiply-adds in registers alone.
On a machine that is busy with something else, --clock cpu counts the CPU time of all threads, divided by their number, which
a preempted thread does not add to; run it with OMP_WAIT_POLICY=passive, or waiting counts as work.
%read = time to read the weights' bytes at that speed / time; %fma likewise for 2·rows·out·in operations.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from weir_server.exec.gemm import NativeKind
from weir_server.model.int8 import Int8Matrix, quantize

SHAPES = "960x576,576x576,3072x576,576x1536,49152x576"  # qkv, out, gate_up, down, head
ROWS = "1,2,3,4,6,8,12,16,24,32,64,128"
LAYERS = 30
FMA_STEPS = 20000

ROOFS = Path(__file__).resolve().parents[1] / "weir_bench" / "roofs.c"


@dataclass(frozen=True)
class Roofs:
    """Compiled for this processor; OpenMP's symbols are torch's, so that all that is compared has the same threads."""

    library: ctypes.CDLL
    lanes: int

    @classmethod
    def build(cls) -> Roofs:
        lanes = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, "roofs.so")
            flags = ["-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", f"-DVECTOR={lanes * 4}"]
            subprocess.run(["cc", *flags, "-c", ROOFS, "-o", f"{built}.o"], check=True)
            subprocess.run(["cc", "-shared", f"{built}.o", "-o", built], check=True)
            library = ctypes.CDLL(str(built))
        library.read_floats.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        library.multiply_add.argtypes = [ctypes.c_size_t]
        return cls(library, lanes)

    def read(self, weight: torch.Tensor) -> None:
        self.library.read_floats(weight.data_ptr(), weight.numel(), 2)

    def fma(self) -> None:
        self.library.multiply_add(FMA_STEPS)

    @property
    def fma_flops(self) -> float:
        return 2 * 12 * self.lanes * FMA_STEPS * torch.get_num_threads()


Call = Callable[[], object]


def kernels(weight: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    onednn = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return {
        "ours": NativeKind()(weight),
        "ours int8": NativeKind()(Int8Matrix.of(quantize(weight))),
        "oneDNN": lambda x: torch.ops.mkldnn._linear_pointwise(x, onednn, None, "none", [], ""),
        "F.linear": lambda x: F.linear(x, weight),
    }


def clock(args: argparse.Namespace) -> Callable[[], float]:
    return time.perf_counter if args.clock == "wall" else lambda: time.process_time() / args.threads


def in_turns(calls: dict[str, Iterator[Call]], args: argparse.Namespace) -> dict[str, float]:
    """Seconds of one call of each. Twice each turn: the first call finds the threads asleep, and is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    now, end = clock(args), time.perf_counter() + args.seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, turns in calls.items():
            next(turns)()
            began = now()
            next(turns)()
            times[name].append(now() - began)
    return {name: float(np.quantile(t, args.quantile)) for name, t in times.items()}


def report(rows: int, flops: float, floats: int, took: dict[str, float], fma_flops: float) -> None:
    """One line a kernel. `floats`: weights that one call reads."""
    read, peak = floats * 4 / took["read"], fma_flops / took["fma"]
    for name in [n for n in took if n not in ("read", "fma")]:
        t, size = took[name], floats * (1.125 if "int8" in name else 4)
        print(
            f"{rows:5} {name:10} {t * 1e6:9.0f} us {size / t / 1e9:6.1f} GB/s {100 * size / t / read:4.0f} %read "
            f"{flops / t / 1e9:6.0f} GF/s {100 * flops / t / peak:4.0f} %fma  x{took['oneDNN'] / t:5.2f} oneDNN"
        )  # fmt: skip
    print(f"{'':5} (roofs: {read / 1e9:.1f} GB/s, {peak / 1e9:.0f} GF/s)", flush=True)


def one_shape(out: int, width: int, rows: list[int], args: argparse.Namespace, roofs: Roofs) -> None:
    copies = max(2, -(-(64 << 20) // (out * width * 4)))
    weights = [torch.randn(out, width) * 0.05 for _ in range(copies)]
    packed = [kernels(w) for w in weights]
    print(f"\n{out} x {width}, {copies} copies of {out * width * 4 / 1e6:.1f} MB")
    for n in rows:
        x = torch.randn(n, width)
        calls: dict[str, Iterator[Call]] = {
            name: itertools.cycle([lambda k=k, name=name, x=x: k[name](x) for k in packed]) for name in packed[0]
        }
        far = weights[copies // 2 :] + weights[: copies // 2]  # not what F.linear has just brought into the cache
        calls["read"] = itertools.cycle([lambda w=w: roofs.read(w) for w in far])
        calls["fma"] = itertools.repeat(roofs.fma)
        took = in_turns(calls, args)
        report(n, 2.0 * n * out * width, out * width, took, roofs.fma_flops)


def whole_model(shapes: list[tuple[int, int]], rows: list[int], args: argparse.Namespace, roofs: Roofs) -> None:
    """The last shape is the head, the others are a layer's; F.linear and int8 take part as everywhere."""
    order = [*shapes[:-1]] * LAYERS + [shapes[-1]]
    weights = [torch.randn(out, width) * 0.05 for out, width in order]
    packed = [kernels(w) for w in weights]
    floats = sum(w.numel() for w in weights)
    print(f"\nall {len(order)} linears in order, {floats * 4 / 1e6:.0f} MB")

    def step(name: str, inputs: dict[int, torch.Tensor]) -> None:
        for k, (_, width) in zip(packed, order, strict=True):
            k[name](inputs[width])

    for n in rows:
        inputs = {width: torch.randn(n, width) for _, width in shapes}
        calls: dict[str, Iterator[Call]] = {
            name: itertools.repeat(lambda name=name, inputs=inputs: step(name, inputs)) for name in packed[0]
        }
        calls["read"] = itertools.repeat(lambda: [roofs.read(w) for w in weights])
        calls["fma"] = itertools.repeat(roofs.fma)
        report(n, 2.0 * n * floats, floats, in_turns(calls, args), roofs.fma_flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="outxin,… (with --model the last is the head)")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each shape and row count")
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--model", action="store_true", help=f"{LAYERS} layers and the head, in order")
    args = parser.parse_args()
    shapes = [(int(a), int(b)) for a, b in (s.split("x") for s in args.shapes.split(","))]
    rows = [int(r) for r in args.rows.split(",")]
    torch.set_num_threads(args.threads)
    roofs = Roofs.build()
    print(f"torch {torch.__version__}, {NativeKind()}, {args.threads} threads, quantile {args.quantile} of {args.clock} time")
    with torch.inference_mode():
        if args.model:
            whole_model(shapes, rows, args, roofs)
            return
        for out, width in shapes:
            one_shape(out, width, rows, args, roofs)


if __name__ == "__main__":
    main()
