"""`kubectl infd top`: the pods' own figures, read again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from weir_operator.api import names
from weir_operator.cli.plugin.api import Api, proxied
from weir_operator.cli.plugin.metrics import Reading, Samples, parsed, reading
from weir_operator.cli.plugin.texts import condition, duration
from weir_operator.io.kube import ApiError, Unreachable

CONCURRENT = 16
COLUMNS = (
    "POD", "RUN", "WAIT", "FOR", "KV", "503/S", "DONE/S", "TTFT", "P95", "TPOT", "P95", "BATCH", "QUEUE", "MARK", "BUDGET",
)


async def pods_of(api: Api, namespace: str, name: str) -> list[dict[str, Any]]:
    """The pods that run, by name."""
    found = await api.list("Pod", namespace, f"{names.OWNER_LABEL}={name}")
    running = (pod for pod in found if (pod.get("status") or {}).get("phase") == "Running")
    return sorted(running, key=lambda pod: str(pod["metadata"]["name"]))


class Watched:
    """One deployment's pods, remembered between two readings."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._before: dict[str, tuple[float, Samples]] = {}
        self._turns = asyncio.Semaphore(CONCURRENT)

    async def read(self) -> dict[str, Reading | str | None]:
        """Pod → its reading since the last call, a sentence where it does not answer, None at its first. Raises ApiError."""
        pods = await pods_of(self._api, self._namespace, self._name)
        answers = await asyncio.gather(*(self._one(pod) for pod in pods))
        found = {pod["metadata"]["name"]: answer for pod, answer in zip(pods, answers, strict=True)}
        self._before = {name: kept for name, kept in self._before.items() if name in found}
        return found

    async def _one(self, pod: Mapping[str, Any]) -> Reading | str | None:
        name = pod["metadata"]["name"]
        try:
            async with self._turns:
                now, after = time.monotonic(), parsed(await self._api.text(proxied(pod, "http", "metrics")))
            kept, self._before[name] = self._before.get(name), (now, after)
            return reading(kept[1], after, now - kept[0]) if kept else None
        except (ApiError, Unreachable) as e:
            return str(getattr(e, "message", e))
        except (ValueError, KeyError) as e:
            return f"its metrics cannot be read: {e}"


def table(rows: Mapping[str, Reading | str | None], raw: Mapping[str, Any]) -> Table:
    """With a line above it where the number of pods is not the spec's."""
    owner = condition(raw.get("status") or {}, "AutoscalerOwned")
    title = owner["message"] if owner.get("status") == "True" else None
    out = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left", title_style="")
    for name in COLUMNS:
        out.add_column(name, justify="left" if name in ("POD", "FOR") else "right", no_wrap=True)
    for pod, seen in rows.items():
        if isinstance(seen, Reading):
            out.add_row(pod, *cells(seen))
        else:
            out.add_row(pod, seen or "reading …", style="dim" if seen is None else "red")
    if not rows:
        out.add_row("no pod runs", style="dim")
    return out


def cells(seen: Reading) -> Sequence[str]:
    knob = seen.knobs
    budget = f"{knob['kv_cache_budget'] / 2**20:.0f}Mi" if "kv_cache_budget" in knob else "–"
    times = [duration(t) for t in (*seen.ttft, *seen.tpot)]
    sizes = (f"{knob[name]:.0f}" for name in ("max_batch_size", "max_queue_depth"))
    return (
        str(seen.running), str(seen.waiting), seen.bound or "", f"{seen.kv:.0%}" if seen.kv is not None else "–",
        f"{seen.refused:.1f}", f"{seen.finished:.1f}", *times, *sizes,
        f"{knob['admission_watermark']:.0%}", budget,
    )
