"""Where the simulator's plant comes from: given, from a file of measurements, or regressed from a live server.

Measured tables (Splitwise's `perf_model.csv`, MIT; SageServe's of the same columns, MIT) are named by path and fitted here;
none is part of this repository.
"""

from __future__ import annotations

import asyncio
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weir_operator.io.scrape import ControlClient, Endpoint, OtherContract, Silent
from weir_operator.tuner import plant as regression
from weir_server.contract import STEP_PRODUCTS, STEP_SUMS, Plant, Window

MILLI = 1000.0
MIN_STEPS = 50


class PlantError(ValueError):
    """One sentence about what is wrong with what was given."""


def given(text: str, prefill_tokens: int) -> Plant:
    """From "a,b,c,p" in milliseconds per step, row, context token and prefill token."""
    try:
        a, b, c, p = (float(v) / MILLI for v in text.split(","))
    except ValueError:
        raise PlantError(f"{text!r} is not four numbers a,b,c,p, a file, or a server's address") from None
    if min(a, b, c, p) < 0 or a + b <= 0:
        raise PlantError("the numbers must not be negative, and a step must take time")
    return Plant(a, b, c, p, prefill_tokens)


def from_file(path: Path, prefill_tokens: int, machine: str = "") -> Plant:
    """A JSON object (a plant, or a server's state with one), a decision log, or a measured table. `machine`: of a table that
    has several, `model,hardware,tensor_parallel`. Raises PlantError, OSError."""
    if path.suffix == ".csv":
        return _fit_table(path, prefill_tokens, machine)
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]
        if len(lines) > 1:
            return regressed([Window.from_wire(line["window"]) for line in lines if line.get("window")], None)
        found: Mapping[str, Any] = lines[0].get("plant") or lines[0]
        return Plant(**{"prefill_tokens": prefill_tokens, **found})
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise PlantError(f"{path}: no plant in it ({type(e).__name__}: {e})") from None


def regressed(windows: Iterable[Window], prior: Plant | None) -> Plant:
    """The plant that explains what a server did between its first and last window, as the tuner would fit it."""
    ends: dict[str, list[Window]] = defaultdict(list)
    for window in windows:
        ends[window.instance].append(window)
    if not ends:
        raise PlantError("no window of a server was read")
    seen = max(ends.values(), key=lambda w: w[-1].step["steps"] - w[0].step["steps"])
    first, last = seen[0], seen[-1]
    sums = {k: last.step[k] - first.step[k] for k in STEP_SUMS}
    sums |= {k: last.products[k] - first.products[k] for k in STEP_PRODUCTS}
    if sums["steps"] < MIN_STEPS:
        raise PlantError(f"{sums['steps']:.0f} steps are too few to fit a plant: it takes {MIN_STEPS} and traffic that varies")
    found = regression.fit(sums, prior)
    if found is None:
        raise PlantError("the steps do not determine a plant")
    return found


def from_server(url: str, token: str, seconds: float) -> Plant:
    """Two windows of a live server, `seconds` apart, and what it measured of itself where its traffic leaves a choice."""
    async def read() -> tuple[Plant | None, list[Window]]:
        endpoint = Endpoint("server", url.rstrip("/"), token)
        async with ControlClient() as client:
            state = await client.state(endpoint)
            first = await client.window(endpoint)
            await asyncio.sleep(seconds)
            return state.plant, [first, await client.window(endpoint)]

    try:
        prior, windows = asyncio.run(read())
    except (Silent, OtherContract) as e:
        raise PlantError(f"{url}: {e}") from None
    return regressed(windows, prior)


# ---------------------------------------------------------------- measured tables

def _fit_table(path: Path, prefill_tokens: int, machine: str) -> Plant:
    """Decode: time per token on (1, rows, context). Prefill: time per prompt token beyond what a step costs anyway."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [_Measured(line) for line in csv.DictReader(file)]
    except (KeyError, ValueError, TypeError) as e:
        raise PlantError(f"{path}: no table of measured steps ({type(e).__name__}: {e})") from None
    machines = sorted({row.machine for row in rows})
    if not machine and len(machines) != 1:
        raise PlantError(f"{path}: name one of {'; '.join(machines)} (--machine)")
    rows = [row for row in rows if not machine or row.machine == machine]
    if not rows:
        raise PlantError(f"{path}: no {machine!r} in it, only {'; '.join(machines)}")
    if rows[0].whole:
        for row in rows:
            row.token /= row.tokens
    a, b, c = least_squares([(1.0, r.batch, r.batch * (r.prompt + r.tokens / 2)) for r in rows], [r.token for r in rows])
    _, p = least_squares([(1.0, r.batch * r.prompt) for r in rows], [r.prefill for r in rows])
    return Plant(a, b, c, p, prefill_tokens)


class _Measured:
    """One line, in seconds. `whole`: its token time is that of all tokens together (told from the end-to-end time)."""

    def __init__(self, line: Mapping[str, str]) -> None:
        self.machine = ",".join((line["model"], line["hardware"], line["tensor_parallel"]))
        self.prompt, self.batch, self.tokens = float(line["prompt_size"]), float(line["batch_size"]), float(line["token_size"])
        prefill, token, e2e = float(line["prompt_time"]), float(line["token_time"]), float(line["e2e_time"])
        self.whole = abs(e2e - prefill - token) < 0.1 * e2e
        unit = 1.0 if self.whole else MILLI
        self.prefill, self.token = prefill / unit, token / unit


def least_squares(xs: Sequence[Sequence[float]], ys: Sequence[float]) -> list[float]:
    """Coefficients ≥ 0 by dropping, one at a time, what would be negative."""
    width = len(xs[0])
    chosen = list(range(width))
    while True:
        normal = [[sum(x[i] * x[j] for x in xs) for j in chosen] for i in chosen]
        right = [sum(x[i] * y for x, y in zip(xs, ys, strict=True)) for i in chosen]
        found = regression.solve(normal, right)
        if found is None:
            raise PlantError("the measurements do not determine a plant")
        if min(found) >= 0:
            return [found[chosen.index(i)] if i in chosen else 0.0 for i in range(width)]
        chosen.pop(found.index(min(found)))
