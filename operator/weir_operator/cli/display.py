"""What `weir-operator local` shows: one line for each tick, or a live screen on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from weir_operator.tuner.types import PodView, Record, TunerSpec
from weir_operator.tuner.window import refusals
from weir_server.contract import HIST_FACTOR, Histogram, Window, hist_edge


@dataclass(frozen=True, slots=True)
class Reading:
    """One pod over the last tick. Seconds; None where nothing was measured."""

    running: int
    waiting: int
    refused: int
    finished: int
    ttft: tuple[float | None, float | None]  # median and 95th percentile
    tpot: tuple[float | None, float | None]
    last: Window


def quantile(before: Histogram, after: Histogram, share: float) -> float | None:
    """A quantile of what was observed between two readings, as the middle of its bucket (5 % wide); None if nothing was."""
    counts = [b - a for a, b in zip(before.counts, after.counts, strict=True)]
    total = sum(counts)
    if total <= 0:
        return None
    seen = 0
    for i, count in enumerate(counts):
        seen += count
        if seen >= share * total:
            return min(hist_edge(i), hist_edge(len(counts) - 2)) / math.sqrt(HIST_FACTOR)
    return None


def reading(view: PodView, seconds: float) -> Reading | None:
    """Of the last `seconds` of a pod's polls; None where it did not answer."""
    windows = [p.window for p in view.polls if p.window and view.polls[-1].at - p.at <= seconds + 0.5]
    if not windows:
        return None
    last = windows[-1]
    first = next(w for w in windows if w.instance == last.instance)

    def both(name: str) -> tuple[float | None, float | None]:
        pair = first.histograms[name], last.histograms[name]
        return quantile(*pair, 0.5), quantile(*pair, 0.95)

    finished = sum(last.finished.values()) - sum(first.finished.values())
    return Reading(last.running, last.waiting, refusals(last) - refusals(first), finished, both("ttft"), both("tpot"), last)


def _time(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _knobs(window: Window) -> str:
    k = window.effective
    budget = f"{k.kv_cache_budget / 2**20:.0f} MiB" if k.kv_cache_budget is not None else "–"
    return f"batch {k.max_batch_size} · queue {k.max_queue_depth} · watermark {k.admission_watermark:.0%} · KV {budget}"


def line(pod: str, seen: Reading | None, spec: TunerSpec, record: Record | None) -> str:
    """One tick of one pod in one line."""
    clock = datetime.now().strftime("%H:%M:%S")
    why = f"{record.outcome.value}: {record.reason}" if record else "no decision yet"
    if seen is None:
        return f"{clock} {pod} does not answer · {why}"
    return (
        f"{clock} {pod} running {seen.running} waiting {seen.waiting} refused {seen.refused} finished {seen.finished} · "
        f"ttft {_time(seen.ttft[1])} of {_time(spec.ttft)} · tpot {_time(seen.tpot[1])} of {_time(spec.tpot)} · "
        f"{_knobs(seen.last)} · {why}"
    )


def screen(title: str, pods: Mapping[str, tuple[Reading | None, Record | None]], spec: TunerSpec, history: Any) -> Group:
    """All pods, what the tuner says of each, and its last acts: for a terminal, 80 columns are enough."""
    out = Table(title=title, title_justify="left", title_style="bold")
    for name in ("pod", "running", "waiting", "refused", f"TTFT ≤ {_time(spec.ttft)}", f"TPOT ≤ {_time(spec.tpot)}"):
        out.add_column(name, justify="left" if name == "pod" else "right", no_wrap=True)
    words = []
    for name, (seen, record) in pods.items():
        words.append(Text(f"{name}: {_knobs(seen.last)}" if seen else f"{name} does not answer", style="cyan"))
        words.append(Text(f"  {record.outcome.value}: {record.reason}" if record else "  no decision yet"))
        numbers = (str(seen.running), str(seen.waiting), str(seen.refused)) if seen else ("–",) * 3
        times = [f"{_time(pair[1])}" for pair in (seen.ttft, seen.tpot)] if seen else ["–", "–"]
        out.add_row(name, *numbers, *times)
    for entry in list(history)[:5]:
        changes = "".join(f", {knob} {a} → {b}" for knob, (a, b) in entry.get("changes", {}).items())
        text = f"{entry['time'][11:19]} {entry['pod']} {entry['outcome']}{changes}: {entry['reason']}"
        words.append(Text(text, style="dim", overflow="ellipsis", no_wrap=True))
    caption = Text("refused and latencies (95th percentile) over the last tick; Ctrl-C ends everything", style="dim")
    return Group(out, caption, *words)
