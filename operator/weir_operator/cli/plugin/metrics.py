"""A server's /metrics, read twice: what `top` shows and `explain` falls back on. The port is the clients' one: no token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name → labels → value. ValueError: it is no exposition."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@dataclass(frozen=True, slots=True)
class Reading:
    """One server over the time between two readings. None: not measured, or nothing happened."""

    running: int
    waiting: int
    bound: str | None
    kv: float | None  # share of the pool
    refused: float  # rows a second
    finished: float  # rows a second
    ttft: tuple[float | None, float | None]  # median and 95th percentile, seconds
    tpot: tuple[float | None, float | None]
    knobs: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "running": self.running, "waiting": self.waiting, "bound": self.bound, "kv": self.kv,
            "refusedPerSecond": self.refused, "finishedPerSecond": self.finished,
            "ttft": dict(zip(("p50", "p95"), self.ttft, strict=True)),
            "tpot": dict(zip(("p50", "p95"), self.tpot, strict=True)), "knobs": dict(self.knobs),
        }


def reading(before: Samples, after: Samples, seconds: float) -> Reading:
    """KeyError: it lacks what every server exports."""
    if _one(after, "weir_process_start_time_seconds") != _one(before, "weir_process_start_time_seconds"):
        before = {}  # another process: all of its totals are new, but for how long is not known
        seconds = math.inf

    def total(name: str) -> float:
        return (sum(after[name].values()) - sum(before.get(name, {}).values())) / seconds

    bounds = {dict(labels)["bound"]: v for labels, v in after["weir_requests_waiting_by_bound"].items()}
    return Reading(
        running=int(_one(after, "weir_requests_running")), waiting=int(_one(after, "weir_requests_waiting")),
        bound=next((b for b, rows in bounds.items() if rows), None), kv=_one(after, "weir_kv_usage_ratio"),
        refused=total("weir_requests_rejected_total"), finished=total("weir_requests_finished_total"),
        ttft=_quantiles(before, after, "weir_time_to_first_token_seconds"),
        tpot=_quantiles(before, after, "weir_time_per_output_token_seconds"),
        knobs={dict(labels)["knob"]: v for labels, v in after["weir_knob_effective"].items()},
    )


def _one(samples: Samples, name: str) -> float:
    return next(iter(samples[name].values()))


def _quantiles(before: Samples, after: Samples, name: str) -> tuple[float | None, float | None]:
    return quantile(before, after, name, 0.5), quantile(before, after, name, 0.95)


def quantile(before: Samples, after: Samples, name: str, share: float) -> float | None:
    """Of what was observed between the readings, even within a bucket, as Prometheus has it; the open one ends at its start."""
    counts = [
        (float(dict(labels)["le"]), value - before.get(f"{name}_bucket", {}).get(labels, 0.0))
        for labels, value in after[f"{name}_bucket"].items()
    ]
    counts.sort()
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    low = seen = 0.0
    for edge, count in counts:
        if count >= share * total:
            return low if math.isinf(edge) else low + (edge - low) * (share * total - seen) / (count - seen)
        low, seen = edge, count
    return low
