"""What `weir-operator local` shows: one line for each tick, or a live table on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.table import Table

from weir_operator.tuner.types import PodView, Record, TunerSpec
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
    polls = [(p.at, p.window) for p in view.polls if p.window]
    if not polls:
        return None
    at, last = polls[-1]
    first = next(w for t, w in polls if at - t <= seconds + 0.5 and w.instance == last.instance)

    def both(name: str) -> tuple[float | None, float | None]:
        pair = first.histograms[name], last.histograms[name]
        return quantile(*pair, 0.5), quantile(*pair, 0.95)

    def rows(window: Window) -> int:
        return sum(sum(by_bound.values()) for by_bound in window.refused.values())

    finished = sum(last.finished.values()) - sum(first.finished.values())
    return Reading(last.running, last.waiting, rows(last) - rows(first), finished, both("ttft"), both("tpot"), last)


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


def table(title: str, pods: Mapping[str, tuple[Reading | None, Record | None]], spec: TunerSpec, history: Any) -> Table:
    """All pods and the last acts, for a terminal."""
    out = Table(title=title, expand=True, title_justify="left")
    for name in ("pod", "running", "waiting", "refused", "TTFT p50 / p95", "TPOT p50 / p95", "knobs", "tuner"):
        out.add_column(name, overflow="fold")
    for name, (seen, record) in pods.items():
        why = f"{record.outcome.value}: {record.reason}" if record else "no decision yet"
        if seen is None:
            out.add_row(name, "–", "–", "–", "–", "–", "no answer", why)
            continue
        ttft, tpot = (f"{_time(a)} / {_time(b)}" for a, b in (seen.ttft, seen.tpot))
        out.add_row(
            name, str(seen.running), str(seen.waiting), str(seen.refused), f"{ttft} (≤ {_time(spec.ttft)})",
            f"{tpot} (≤ {_time(spec.tpot)})", _knobs(seen.last), why,
        )
    for entry in list(history)[:5]:
        changes = ", ".join(f"{k} {a} → {b}" for k, (a, b) in entry.get("changes", {}).items())
        out.add_row(entry["time"][11:19], "", "", "", "", "", changes, f"{entry['outcome']}: {entry['reason']}", style="dim")
    return out
