"""Steps of decode alone, in this process: what share of the machine's roofs a forward reaches where nothing else takes a part.

    PYTHONPATH=benchmarks python -m weir_bench.steps

Rows that hold CONTEXT tokens each generate one token a step, in float32 and in 8 bits. A step reads the weights once and each
row's KV (the read roof) and computes each row (the fma roof); the roofs are measured before and after each cell, and the better
of the two counts, since what memory gives here changes within minutes (decision 147). Over HTTP a step also carries pieces of
prompts; `weir_bench.serving` has those.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.progress import Progress

from weir_bench import results, roofs
from weir_bench.attention import timed
from weir_bench.inprocess import boot, load, quiet
from weir_bench.serving.figures import Shape
from weir_bench.serving.peers import shape_of

WEIGHTS, ROWS, CONTEXT = ("float32", "int8"), (1, 2, 4, 8, 16, 32), 160
"""As long as a request of 128 tokens in and 64 out is halfway."""


def rows_of(count: int, page: int) -> list[Any]:
    """Greedy rows in the middle of their answers, each with blocks of its own."""
    from weir_server.exec.interface import RowWork
    from weir_server.kv.pool import RESERVED_CHUNKS
    from weir_server.link.messages import Sampling

    per_row, held = -(-(CONTEXT + 1) // page), [1] * (CONTEXT + 1)
    blocks = range(RESERVED_CHUNKS, RESERVED_CHUNKS + count * per_row)
    greedy = Sampling(1 << 20, temperature=0.0)
    return [
        RowWork([1], CONTEXT, list(blocks[i * per_row : (i + 1) * per_row]), True, greedy, i, held, 1) for i in range(count)
    ]


def step_seconds(runner: Any, count: int, page: int, repeats: int) -> dict[str, float]:
    """The first three warm up."""
    work = rows_of(count, page)
    return results.spread([timed(lambda: runner.execute(work)) for _ in range(repeats + 3)][3:])


def cell(
    seconds: dict[str, float], count: int, model: Any, page: int, shape: Shape, roof: roofs.Roofs | None,
) -> dict[str, Any]:
    """A step's figures. `read_share`, `fma_share`: None where no roof could be measured."""
    read, flops = shape.step(count, CONTEXT, model.weights_bytes, model.chunk_bytes(page) / page)
    return {
        "seconds": seconds, "tokens_per_second": count / seconds["median"],
        "read_share": read / seconds["median"] / roof.read if roof else None,
        "fma_share": flops / seconds["median"] / roof.fma if roof else None, "roofs": roof.to_json() if roof else None,
    }


def main() -> None:
    parser = results.arguments("steps", __doc__)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    quiet()
    figures: dict[str, dict[str, Any]] = {}
    with Progress() as progress, tempfile.TemporaryDirectory() as folder:
        program = roofs.build(Path(folder))
        task = progress.add_task("steps", total=len(WEIGHTS) * len(ROWS))
        for weights in WEIGHTS:
            values = boot(args.model, quantize="none" if weights == "float32" else weights)
            model, shape, page = load(values), shape_of(Path(values.model)), values.page_size
            runner = model.runner(2 + max(ROWS) * -(-(CONTEXT + 1) // page))
            results.moved({"own kernels": "own" in model.linear})
            beside = roofs.Beside(program)
            for count in ROWS:
                seconds = step_seconds(runner, count, page, args.repeats)
                figures.setdefault(weights, {})[str(count)] = cell(seconds, count, model, page, shape, beside.cell())
                progress.advance(task)
            del runner, model
    print(results.write("steps", {"figures": figures, "context": CONTEXT}, args.output))
    for weights, cells in figures.items():
        print(weights, {n: (round(c["seconds"]["median"] * 1e3, 2), c["read_share"], c["fma_share"]) for n, c in cells.items()})


if __name__ == "__main__":
    main()
