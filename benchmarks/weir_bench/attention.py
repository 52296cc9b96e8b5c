"""Attention over paged KV in place: a decode step's, against gathering each row's pages first, and against the read roof.

    PYTHONPATH=benchmarks python -m weir_bench.attention

The kernel reads the pages where they lie. The rival does what a paged cache without such a kernel must: index_select of
each layer's pages into buffers that were allocated once (out=), then torch's own scaled_dot_product_attention over them, on a
pool laid out as it likes best. Both do every layer of the model once for each measurement, interleaved; before and after each
cell the rate at which this machine reads memory, and the better of the two counts (decision 147). Sixteen rows of 4,096 tokens
are measured in place alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

from weir_bench import results, roofs
from weir_bench.inprocess import boot, load, quiet

CELLS, PAGE = ((4, 512, True), (4, 4096, True), (16, 4096, False)), 16
"""Rows, tokens of each, and whether the rival takes part."""


def every_layer(layers: int) -> Any:
    """Attention of all layers over the same queries, as a forward."""
    return lambda ops, x: [ops.attention(layer=layer, qkv=x) for layer in range(layers)][-1]


def contenders(model: Any, batch: int, length: int, rival: bool) -> tuple[dict[str, Callable[[], Any]], int]:
    """What to time, by name: attention in all layers; and the bytes of KV that it must read."""
    import torch

    from weir_server.exec.backends import choose_backend
    from weir_server.exec.interface import RowWork
    from weir_server.exec.pool import KvPool
    from weir_server.exec.step import flatten
    from weir_server.link.messages import Sampling

    c, pages = model.config, -(-(length + 1) // PAGE)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
    tables = (order + 2).view(batch, pages)  # pages of a row lie apart, as after some hours of service
    pool = KvPool(c, PAGE, batch * pages + 2)
    pool.flat.uniform_(-1, 1)
    work = [
        RowWork([1], length, table.tolist(), True, Sampling(1), 0, [1] * (length + 1), length + 1) for table in tables
    ]
    backend = choose_backend(model.decoder, pool)
    results.moved({"paged kernel": backend.name == "cpu"})
    step = flatten(work, PAGE, c)
    qkv = torch.randn(batch, (c.heads + 2 * c.kv_heads) * c.head_dim)

    attend = backend.compile(every_layer(c.layers), qkv.shape[1])

    def paged() -> Any:
        return attend(qkv, step)

    size = c.layers * 2 * batch * (length + 1) * c.kv_heads * c.head_dim * 4
    if not rival:
        return {"paged": paged}, size
    shape = (c.layers, 2, batch * pages + 2, PAGE, c.kv_heads, c.head_dim)
    flat = torch.randn(shape)
    rows = [torch.empty(batch * pages, *shape[3:]) for _ in range(2)]
    q, index = qkv[:, : c.heads * c.head_dim].view(batch, c.heads, 1, c.head_dim), tables.flatten()

    def gather() -> Any:
        out = []
        for layer in range(c.layers):
            for half, buffer in enumerate(rows):
                torch.index_select(flat[layer, half], 0, index, out=buffer)
            k, v = (b.view(batch, pages * PAGE, c.kv_heads, c.head_dim)[:, : length + 1].transpose(1, 2) for b in rows)
            out.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        return out

    return {"paged": paged, "gather": gather}, size


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = results.arguments("attention", __doc__)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    quiet()
    import torch

    model, figures, raw = load(boot(args.model)), {}, {}
    with Progress() as progress, torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        beside = roofs.Beside(roofs.build(Path(folder)))
        for batch, length, rival in CELLS:
            name = f"{batch} x {length}"
            runs, size = contenders(model, batch, length, rival)
            times: dict[str, list[float]] = {kind: [] for kind in runs}
            for run in runs.values():
                run()
            for _ in progress.track(range(args.repeats), description=f"{name} tokens"):
                for kind, run in runs.items():
                    times[kind].append(timed(run))
            measured = beside.cell()
            roof = measured.read if measured else None
            medians = {kind: results.spread(values)["median"] for kind, values in times.items()}
            figures[name] = {
                **({"gather_against_paged": medians["gather"] / medians["paged"]} if rival else {}),
                "paged_bytes_per_second": size / medians["paged"],
                **{f"{kind}_seconds": seconds for kind, seconds in medians.items()},
                "read_roof": roof, "read_roof_share": size / medians["paged"] / roof if roof else None,
            }  # fmt: skip
            raw[name] = times
            del runs
    outcome = {"figures": figures, "page": PAGE, "seconds": raw}
    print(results.write("attention", outcome, args.output), figures)


if __name__ == "__main__":
    main()
