"""What the demo shows while it runs: a live panel on a terminal, one line for each tick where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weir_bench.goodput import Objectives, quantile, share
from weir_bench.load import Outcome
from weir_bench.plot import Part

BARS = " ▁▂▃▄▅▆▇█"
RECENT = 30.0
"""Seconds that live quantiles look back."""


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The last `width` values as a row of bars, the highest at full height."""
    shown = values[-width:]
    top = max(shown, default=0)
    return "".join(BARS[round(v / top * (len(BARS) - 1))] if top else BARS[1] for v in shown)


class View:
    """A part as it stands now."""

    def __init__(self, part: Part, outcomes: Sequence[Outcome], objectives: Objectives, now: float, tuner: str) -> None:
        self.part, self.outcomes, self.objectives, self.now, self.tuner = part, outcomes, objectives, now, tuner
        self.last = part.samples[-1] if part.samples else None
        recent = [o for o in outcomes if o.ended >= now - RECENT]
        self.ttft = [quantile([o.ttft for o in recent if o.ttft is not None], q) for q in (0.5, 0.95)]
        self.tpot = [quantile([o.tpot for o in recent if o.tpot is not None], q) for q in (0.5, 0.95)]
        self.refused = sum(o.status == 503 for o in outcomes)
        self.refused_rate = sum(o.status == 503 for o in recent) / max(1.0, min(RECENT, now))
        self.goodput = share(outcomes, objectives)

    def line(self) -> str:
        """For logs and pipes."""
        waiting, running = (self.last.waiting, self.last.running) if self.last else ("–", "–")
        return (
            f"{self.part.name} {self.now:4.0f} s · waiting {waiting} running {running} · 503s {self.refused} · "
            f"TTFT {_pair(self.ttft, 1, 's', 2)} (≤ {self.objectives.ttft:g} s) · "
            f"TPOT {_pair(self.tpot, 1000, 'ms', 0)} (≤ {self.objectives.tpot * 1000:.0f} ms) · "
            f"goodput {_percent(self.goodput)} · {self._knobs()} · {self.tuner}"
        )

    def panel(self) -> Panel:
        """For terminals."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", min_width=14)
        rows.add_column(min_width=22)
        rows.add_column(overflow="fold")
        waiting = [s.waiting for s in self.part.samples]
        refused = [b.refused - a.refused for a, b in zip(self.part.samples, self.part.samples[1:], strict=False)]
        rows.add_row("queue", f"{waiting[-1] if waiting else 0} waiting", Text(sparkline(waiting), style="red"))
        rows.add_row("503s", f"{self.refused}  ({self.refused_rate:.1f}/s)", Text(sparkline(refused), style="red"))
        for name, values, objective, scale, unit, digits in (
            ("first token", self.ttft, self.objectives.ttft, 1, "s", 2),
            ("per token", self.tpot, self.objectives.tpot, 1000, "ms", 0),
        ):
            met = values[1] is not None and values[1] <= objective
            style = "" if values[1] is None else "green" if met else "red"
            rows.add_row(name, Text(_pair(values, scale, unit, digits), style=style), f"≤ {objective * scale:g} {unit}")
        rows.add_row("goodput", Text(_percent(self.goodput), style="bold"), f"of {len(self.outcomes)} requests that have ended")
        rows.add_row("running", f"{self.last.running if self.last else '–'} rows", "")
        rows.add_row("knobs", "", self._knobs())
        rows.add_row("tuner", "", self.tuner)
        bar = ProgressBar(total=self.part.seconds, completed=min(self.now, self.part.seconds))
        title = f"[b]{self.part.name}[/b]  {self.now:.0f} of {self.part.seconds:.0f} s"
        return Panel(Group(bar, rows), title=title, title_align="left")

    def _knobs(self) -> str:
        if self.last is None:
            return "knobs not read yet"
        k = self.last.knobs
        return f"batch {k['max_batch_size']} · queue {k['max_queue_depth']} · watermark {k['admission_watermark']:.0%}"


def _pair(values: Sequence[float | None], scale: float, unit: str, digits: int) -> str:
    if values[0] is None:
        return "–"
    return " / ".join(f"{(v or 0) * scale:.{digits}f}" for v in values) + f" {unit} p50 / p95"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def tuner_line(status: dict[str, Any]) -> str:
    """The tuner's last word in a deployment's status: what it did, or why it did nothing."""
    history = status.get("status", {}).get("tuning", {}).get("history", [])
    return f"{history[0]['outcome']}: {history[0]['reason']}" if history else "no decision yet"
