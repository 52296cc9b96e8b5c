"""Attention over paged KV in place, against gathering each row's pages first: a decode step of four rows.

    PYTHONPATH=benchmarks python -m weir_bench.attention

The kernel reads the pages where they lie. The rival does what a paged cache without such a kernel must: index_select of
each layer's pages into buffers that were allocated once (out=), then torch's own scaled_dot_product_attention over them, on a
pool laid out as it likes best. Both do every layer of the model once for each measurement, interleaved; beside them the rate
at which this machine reads memory, in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.progress import Progress

from weir_bench import results
from weir_bench.inprocess import boot, load, quiet

LENGTHS, BATCH, PAGE = (512, 4096), 4, 16


def every_layer(layers: int) -> Any:
    """Attention of all layers over the same queries, as a forward."""
    return lambda ops, x: [ops.attention(layer=layer, qkv=x) for layer in range(layers)][-1]


def contenders(model: Any, length: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """What to time, by name: attention in all layers; and the bytes of KV that it must read."""
    import torch

    from weir_server.exec.backends import choose_backend
    from weir_server.exec.interface import RowWork
    from weir_server.exec.pool import KvPool
    from weir_server.exec.step import flatten
    from weir_server.link.messages import Sampling

    c, pages = model.config, -(-(length + 1) // PAGE)
    order = torch.randperm(BATCH * pages, generator=torch.Generator().manual_seed(1))
    tables = (order + 2).view(BATCH, pages)  # pages of a row lie apart, as after some hours of service
    pool = KvPool(c, PAGE, BATCH * pages + 2)
    pool.flat.normal_()
    work = [
        RowWork([1], length, table.tolist(), True, Sampling(1), 0, [1] * (length + 1), length + 1) for table in tables
    ]
    backend = choose_backend(model.decoder, pool)
    results.moved({"paged kernel": backend.name == "cpu"})
    step = flatten(work, PAGE, c)
    qkv = torch.randn(BATCH, (c.heads + 2 * c.kv_heads) * c.head_dim)

    paged = backend.compile(every_layer(c.layers), qkv.shape[1])
    shape = (c.layers, 2, BATCH * pages + 2, PAGE, c.kv_heads, c.head_dim)
    flat = torch.randn(shape)
    rows = [torch.empty(BATCH * pages, *shape[3:]) for _ in range(2)]
    q, index = qkv[:, : c.heads * c.head_dim].view(BATCH, c.heads, 1, c.head_dim), tables.flatten()

    def gather() -> Any:
        out = []
        for layer in range(c.layers):
            for half, buffer in enumerate(rows):
                torch.index_select(flat[layer, half], 0, index, out=buffer)
            k, v = (b.view(BATCH, pages * PAGE, c.kv_heads, c.head_dim)[:, : length + 1].transpose(1, 2) for b in rows)
            out.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        return out

    size = c.layers * 2 * BATCH * (length + 1) * c.kv_heads * c.head_dim * 4
    return {"paged": lambda: paged(qkv, step), "gather": gather}, size


def read_roof(seconds: float = 1.0) -> float:
    """Bytes a second that summing a large array reads with all threads."""
    import torch

    data, best, end = torch.ones(64 << 20), 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best


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
    with Progress() as progress, torch.inference_mode():
        for length in LENGTHS:
            runs, size = contenders(model, length)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for run in runs.values():
                run()
            for _ in progress.track(range(args.repeats), description=f"{length} tokens, batch {BATCH}"):
                for name, run in runs.items():
                    times[name].append(timed(run))
            medians = {name: results.spread(values)["median"] for name, values in times.items()}
            figures[str(length)] = {
                "gather_against_paged": medians["gather"] / medians["paged"],
                "paged_gigabytes_per_second": size / medians["paged"] / 1e9,
                **{f"{name}_seconds": seconds for name, seconds in medians.items()},
            }
            raw[str(length)] = times
    figures["read_roof_gigabytes_per_second"] = read_roof() / 1e9
    print(results.write("attention", {"figures": figures, "batch": BATCH, "page": PAGE, "seconds": raw}, args.output))
    print(figures)


if __name__ == "__main__":
    main()
