"""Pictures of a simulation: goodput over time beside the knobs that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weir_operator.simulate.run import Result
from weir_server.contract import Knobs

BIN_SECONDS = 30.0


class NoMatplotlib(RuntimeError):
    """matplotlib is not installed: it is an extra that serving and tuning do without."""


def draw(path: Path, end: float, offered: Sequence[float], runs: Mapping[str, Result], boot: Knobs) -> None:
    """`offered`: when each row was offered. The last of `runs` is the tuned one, whose knobs are shown."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib("plots need matplotlib: pip install 'weir[demo]'") from None
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    top.plot(*_rate(offered, end), color="0.7", label="offered")
    for name, run in runs.items():
        top.plot(*_rate(run.good, end), label=f"{name}: {run.goodput:.0%}")
    top.set_ylabel("rows/s that met both objectives")
    top.legend(loc="upper right")
    tuned = list(runs.values())[-1]
    for knob, label in (("max_batch_size", "batch"), ("max_queue_depth", "queue depth")):
        times, values = _steps(tuned, knob, getattr(boot, knob), end)
        bottom.step(times, values, where="post", label=label)
    bottom.set_yscale("log", base=2)
    bottom.set_xlabel("seconds")
    bottom.legend(loc="upper right")
    figure.savefig(path, dpi=120)


def _rate(times: Sequence[float], end: float) -> tuple[list[float], list[float]]:
    bins = [0] * max(1, int(end / BIN_SECONDS))
    for t in times:
        if (i := int(t / BIN_SECONDS)) < len(bins):
            bins[i] += 1
    return [(i + 0.5) * BIN_SECONDS for i in range(len(bins))], [n / BIN_SECONDS for n in bins]


def _steps(run: Result, knob: str, first: float, end: float) -> tuple[list[float], list[float]]:
    times, values = [0.0], [first]
    for t, move in run.moves:
        if knob in move.knobs:
            times.append(t)
            values.append(move.knobs[knob])
    return [*times, end], [*values, values[-1]]
