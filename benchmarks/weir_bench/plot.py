"""One picture of a run: what the queue, the latencies, the knobs and the goodput did, part beside part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weir_bench.goodput import Interval, Objectives

INK, GRID, LINES = "#1b2733", "#d9dee4", ("#2f6f9f", "#c8553d", "#5a8f4e", "#8a5fa8")
OBJECTIVE = "#b3261e"
DRAWN_KNOBS = (("max_batch_size", "batch size"), ("max_queue_depth", "queue depth"))
STYLE = {
    "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "axes.titlesize": 10,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.color": INK, "ytick.color": INK,
}


@dataclass(slots=True)
class Sample:
    """The server at one moment: `at` seconds since the part began; knobs as they are in force."""

    at: float
    waiting: int
    running: int
    refused: int  # since the process started
    knobs: dict[str, Any]


@dataclass(slots=True)
class Move:
    """A knob that the tuner moved (or, where it only advises, would have)."""

    at: float
    knob: str
    before: Any
    after: Any
    reason: str


@dataclass(slots=True)
class Part:
    """One stretch of a run under one mode. Times within are seconds since its own beginning."""

    name: str
    seconds: float
    goodput: float | None
    intervals: list[Interval]
    samples: list[Sample] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


def picture(parts: Sequence[Part], objectives: Objectives, title: str, path: Path) -> Path:
    """Draws `parts` one after the other along one time axis into a PNG at `path`; what came after a part's end is left out."""
    import matplotlib  # here, since figures without pictures need none

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [replace(p, samples=[s for s in p.samples if s.at <= p.seconds]) for p in parts]
    with plt.rc_context(STYLE):
        heights = [1.25, 1, 0.8, 1, 1, 1.1]
        figure, axes = plt.subplots(6, 1, figsize=(11, 12.5), sharex=True, height_ratios=heights, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        begins = _begins(parts)
        _goodput(axes[0], parts, begins)
        _queue(axes[1], parts, begins)
        _refusals(axes[2], parts, begins)
        _latency(axes[3], parts, begins, "ttft", "time to first token, s", objectives.ttft, 1.0)
        _latency(axes[4], parts, begins, "tpot", "time per token, ms", objectives.tpot * 1000, 1000.0)
        _knobs(axes[5], parts, begins)
        for axis in axes:
            axis.grid(axis="y", color=GRID, linewidth=0.6)
            axis.set_axisbelow(True)
            for begin in begins[1:]:
                axis.axvline(begin, color=INK, linewidth=1.2)
        axes[-1].set_xlabel("seconds")
        axes[-1].set_xlim(0, begins[-1] + parts[-1].seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return path


def _begins(parts: Sequence[Part]) -> list[float]:
    begins, at = [], 0.0
    for part in parts:
        begins.append(at)
        at += part.seconds
    return begins


def _goodput(axis: Any, parts: Sequence[Part], begins: list[float]) -> None:
    axis.set_title("goodput: requests within both objectives, share of what was offered", loc="left")
    for color, part, begin in zip(LINES, parts, begins, strict=False):
        known = [i for i in part.intervals if i.goodput is not None]
        _bars(axis, begin, known, [i.goodput for i in known], color)
        label = part.name if part.goodput is None else f"{part.name}: {part.goodput:.0%}"
        axis.text(begin + part.seconds * 0.01, 1.04, label, fontweight="bold", color=color, va="bottom")
    axis.set_ylim(0, 1.25)
    axis.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])


def _queue(axis: Any, parts: Sequence[Part], begins: list[float]) -> None:
    axis.set_title("rows waiting and running", loc="left")
    for i, (part, begin) in enumerate(zip(parts, begins, strict=True)):
        at = [begin + s.at for s in part.samples]
        waiting, running = [s.waiting for s in part.samples], [s.running for s in part.samples]
        axis.fill_between(at, waiting, color=LINES[1], alpha=0.35, linewidth=0, label="" if i else "waiting")
        axis.plot(at, running, color=LINES[0], linewidth=1.3, label="" if i else "running")
    axis.legend(loc="upper right", frameon=False, ncols=2)
    axis.set_ylim(bottom=0)


def _refusals(axis: Any, parts: Sequence[Part], begins: list[float]) -> None:
    axis.set_title("refused (HTTP 503) per second", loc="left")
    for part, begin in zip(parts, begins, strict=True):
        _bars(axis, begin, part.intervals, [i.refused / i.length for i in part.intervals], LINES[1])
    axis.set_ylim(bottom=0)


def _bars(axis: Any, begin: float, intervals: Sequence[Interval], heights: Sequence[float | None], color: str) -> None:
    axis.bar([begin + i.at + i.length / 2 for i in intervals], heights, width=[i.length * 0.9 for i in intervals],
             color=color, alpha=0.75)


def _latency(
    axis: Any, parts: Sequence[Part], begins: list[float], name: str, title: str, objective: float, scale: float,
) -> None:
    axis.set_title(title, loc="left")
    top = 0.0
    for i, (part, begin) in enumerate(zip(parts, begins, strict=True)):
        for quantile, width, color in (("p50", 1.8, LINES[0]), ("p95", 1.1, LINES[3])):
            known = [(begin + v.at + v.length / 2, value * scale) for v in part.intervals
                     if (value := getattr(v, f"{name}_{quantile}")) is not None]
            if known:
                label = "" if i else quantile
                axis.plot(*zip(*known, strict=True), color=color, linewidth=width, marker=".", markersize=4, label=label)
                top = max(top, *(value for _, value in known))
    axis.axhline(objective, color=OBJECTIVE, linestyle="--", linewidth=1, label="objective")
    axis.set_ylim(0, max(top, objective) * 1.3)  # room for the legend
    axis.legend(loc="upper right", frameon=False, ncols=3)


def _knobs(axis: Any, parts: Sequence[Part], begins: list[float]) -> None:
    axis.set_title("knobs in force (dots: moves)", loc="left")
    for color, (knob, label) in zip(LINES, DRAWN_KNOBS, strict=False):
        for part, begin in zip(parts, begins, strict=True):
            axis.step([begin + s.at for s in part.samples], [s.knobs[knob] for s in part.samples], where="post", color=color,
                      linewidth=1.8, label=label)
            label = ""
            for move in part.moves:
                if move.knob == knob:
                    point = (begin + move.at, move.after)
                    axis.plot(*point, "o", color=color, markersize=6)
                    axis.annotate(f"{move.before} → {move.after}", point, textcoords="offset points", xytext=(4, 7), fontsize=8,
                                  color=color)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.legend(loc="upper right", frameon=False, ncols=2)
