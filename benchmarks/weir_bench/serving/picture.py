"""Pictures of a table, from its raw JSON, beside it: figures against clients, the roofline, the frontier of chunk sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weir_bench.plot import GRID, INK, STYLE
from weir_bench.serving import figures
from weir_bench.serving.record import Document

COLORS = {"weir": "#2f6f9f", "llama.cpp": "#c8553d", "transformers": "#5a8f4e", "openvino-genai": "#8a5fa8"}
DASHES = ("-", "--", ":")


def against_clients(path: Path) -> Path:
    """Throughput, ITL p50 and p95 against clients, and each server's place under the roofs."""
    doc = msgspec.json.decode(path.read_bytes(), type=Document)
    panels: list[tuple[str, str, float]] = [
        ("tokens_per_second", "tokens a second", 1.0), ("itl_p50", "between tokens, p50, ms", 1e3),
        ("itl_p95", "between tokens, p95, ms", 1e3),
    ]  # fmt: skip

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(1, 4, figsize=(17, 4.4), layout="constrained")
        for axis, (name, title, scale) in zip(axes, panels, strict=False):
            axis.set_title(title, loc="left")
            _lines(axis, doc, name, scale)
        axes[0].legend(frameon=False, fontsize=8)
        _roofline(axes[3], doc)
        return figure

    return _drawn(draw, path)


def _style(doc: Document, server: str) -> dict[str, Any]:
    system = next(s.system for s in doc.servers if s.name == server)
    alike = [s.name for s in doc.servers if s.system == system]
    return {"color": COLORS.get(system, INK), "linestyle": DASHES[alike.index(server) % len(DASHES)]}


def _lines(axis: Any, doc: Document, name: str, scale: float) -> None:
    """The median and, as bars, the least and the most."""
    counts = sorted({c.clients for c in doc.cells if c.output > 1})
    for server in doc.servers:
        by = {n: figures.series(doc.cells, server.name, n, name, doc.work["output"]) for n in counts}
        of = {n: figures.of(values.values()) for n, values in by.items() if values}
        y = [of[n].median * scale for n in of]
        spread = [[(of[n].median - of[n].least) * scale for n in of], [(of[n].most - of[n].median) * scale for n in of]]
        style = _style(doc, server.name)
        axis.errorbar(list(of), y, yerr=spread, marker="o", markersize=4, capsize=2, label=server.name, **style)
    axis.set_xlabel("clients")
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(n) for n in counts])
    axis.set_ylim(bottom=0)


def _roofline(axis: Any, doc: Document) -> None:
    """Decode and prefill: operations a second against operations for each byte read."""
    axis.set_title("roofline, Gflop/s", loc="left")
    if doc.roofs is None:
        axis.text(0.5, 0.5, "no roofs were measured", ha="center", transform=axis.transAxes)
        return
    left, right, read, fma = 0.2, 2000.0, doc.roofs.read / 1e9, doc.roofs.fma / 1e9
    axis.plot([left, fma / read, right], [read * left, fma, fma], color=INK)
    axis.text(left * 1.3, read * left * 3, f"read {read:.1f} GB/s", fontsize=8, rotation=38)
    axis.text(fma / read, fma * 1.08, f"multiply-add {fma:.0f}", fontsize=8)
    if doc.roofs.gemm:
        axis.axhline(doc.roofs.gemm / 1e9, color=INK, linewidth=0.8, linestyle=":")
        axis.text(left * 1.3, doc.roofs.gemm / 1e9 * 1.05, f"best product {doc.roofs.gemm / 1e9:.0f}", fontsize=8)
    for server in doc.servers:
        points = [s for s in doc.shares if s.server == server.name and s.roof != "read" and s.intensity]
        fill = "full" if server == doc.servers[0] else "none"
        axis.plot([p.intensity for p in points], [p.flops_per_second / 1e9 for p in points], "o", markersize=5,
                  color=_style(doc, server.name)["color"], fillstyle=fill)  # fmt: skip
        for p in points if server == doc.servers[0] else []:
            axis.annotate(f"{p.clients}" if p.phase == "decode" else "prefill", (p.intensity, p.flops_per_second / 1e9),
                          textcoords="offset points", xytext=(4, -10), fontsize=8)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations for each byte read")


def frontier(path: Path) -> Path:
    """What a chunk's size trades: ITL p95 against TTFT p50, under the same arrivals."""
    doc = json.loads(path.read_text())

    def draw(plt: Any) -> Any:
        figure, axis = plt.subplots(figsize=(6.5, 4.4), layout="constrained")
        axis.set_title(f"prefill chunk: {doc['work']['load']:.0%} load, Poisson arrivals", loc="left")
        for size, of in doc["figures"].items():
            x, y = of["ttft_p50"], of["itl_p95"]
            bars = [[[(v["median"] - v["least"]) * 1e3], [(v["most"] - v["median"]) * 1e3]] for v in (x, y)]
            axis.errorbar(
                [x["median"] * 1e3], [y["median"] * 1e3], xerr=bars[0], yerr=bars[1], marker="o",
                color=COLORS["weir" if size == "adaptive" else "llama.cpp"],
            )  # fmt: skip
            axis.annotate(f"{size} (p50 {of['itl_p50']['median'] * 1e3:.0f})", (x["median"] * 1e3, y["median"] * 1e3),
                          textcoords="offset points", xytext=(6, 5), fontsize=8)  # fmt: skip
        axis.set_xlabel("time to the first token, p50, ms")
        axis.set_ylabel("between tokens, p95, ms")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        return figure

    return _drawn(draw, path)


def _drawn(draw: Callable[[Any], Any], path: Path) -> Path:
    """The figure that `draw` makes, as a PNG beside the raw JSON at `path`."""
    import matplotlib  # here, since figures without pictures need none

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({**STYLE, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True}):
        figure = draw(plt)
        figure.savefig(path.with_suffix(".png"), dpi=110)
        plt.close(figure)
    return path.with_suffix(".png")
