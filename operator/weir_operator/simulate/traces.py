"""Recorded traffic as rows of a simulation. Traces are named by path; none is part of this repository.

Formats, told apart by content:

- Azure LLM inference 2023 (CSV `TIMESTAMP,ContextTokens,GeneratedTokens`; CC-BY-4.0, Patel et al., Splitwise, ISCA'24), and
  the same with other heads: `arrived_at,num_prefill_tokens,num_decode_tokens` (Vidur), `timestamp,input_length,output_length`;
- Mooncake (JSON lines with `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks; Apache-2.0).
  Its times are rounded to three seconds: rows of one time are spread over the gap to the next one, by the seed, or a trace
  that is stretched would consist of batches that nobody has recorded;
- ServeGen (`NAME-trace.csv` without a head: window start, rate, cv, family, shape, scale, beside `NAME-dataset.json` with the
  lengths; Apache-2.0, arXiv 2505.09999): a generator, so arrivals follow from a seed.

`Shape` says what part of it is used and how it is scaled: the structure of the arrivals stays, time is divided by `speed`.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from typing import Any

from weir_operator.simulate.load import Arrival

WINDOW_SECONDS = 600.0
"""Of one rate in a ServeGen trace."""


class TraceError(ValueError):
    """The file is no trace that is known here: says which file, which line, and what was expected."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`start` and `seconds` in the trace's own time, before `speed`. Lengths are divided by `prompt_by` and `output_by`, then
    capped; a row is never longer than `context` in all."""

    start: float = 0.0
    seconds: float = math.inf
    speed: float = 1.0
    prompt_by: float = 1.0
    output_by: float = 1.0
    prompt_cap: int = 1 << 30
    output_cap: int = 1 << 30
    context: int = 8192


def read(path: Path, shape: Shape, seed: int = 0) -> list[Arrival]:
    """Rows in order of time, the first part's start at 0. Raises TraceError, OSError."""
    rows = sorted(_rows(path, seed), key=lambda row: row.at)
    if not rows:
        raise TraceError(f"{path}: no rows in it")
    zero = rows[0].at + shape.start
    return [_shaped(row, zero, shape) for row in rows if 0 <= row.at - zero < shape.seconds]


def with_rate(rows: Sequence[Arrival], rate: float, seconds: float) -> list[Arrival]:
    """The same arrivals at a mean of `rate` rows per second for `seconds`: time is stretched or squeezed, and what a trace
    lacks in length is not made up."""
    span = rows[-1].at if rows else 0.0
    factor = rate / (len(rows) / span) if span else 1.0
    return [replace(row, at=row.at / factor) for row in rows if row.at / factor < seconds]


def _shaped(row: Arrival, zero: float, shape: Shape) -> Arrival:
    prompt = max(1, min(round(row.prompt / shape.prompt_by), shape.prompt_cap, shape.context - 2))
    output = max(1, min(round(row.output / shape.output_by), shape.output_cap, shape.context - prompt - 1))
    return replace(row, at=(row.at - zero) / shape.speed, prompt=prompt, output=output)


def _rows(path: Path, seed: int) -> Iterator[Arrival]:
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.readline()
    if head.lstrip().startswith("{"):
        return _spread_out(_json_lines(path), random.Random(seed))
    names = [name.strip() for name in head.rstrip("\n").split(",")]
    for columns, clock in _HEADS.items():
        if set(columns) <= set(names):
            return _table(path, columns, clock)
    if len(names) == 6 and _number(names[0]) is not None:
        return _servegen(path, seed)
    raise TraceError(f"{path}: neither JSON lines nor a table with one of the heads {', '.join('/'.join(h) for h in _HEADS)}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _stamp(text: str) -> float:
    return datetime.fromisoformat(text.strip()[:26]).timestamp()


_HEADS: Mapping[tuple[str, str, str], Callable[[str], float]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _stamp,
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"): float,
    ("timestamp", "input_length", "output_length"): float,
}


def _table(path: Path, columns: tuple[str, str, str], clock: Callable[[str], float]) -> Iterator[Arrival]:
    at, prompt, output = columns
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                yield Arrival(clock(line[at]), int(float(line[prompt])), int(float(line[output])))
            except (ValueError, TypeError) as e:
                raise TraceError(f"{path}:{number}: {e}") from None


def _json_lines(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                parts = tuple(int(part) for part in line.get("hash_ids", ()))
                yield Arrival(line["timestamp"] / 1000.0, int(line["input_length"]), int(line["output_length"]), parts)
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise TraceError(f"{path}:{number}: {type(e).__name__} {e}") from None


def _spread_out(rows: Iterable[Arrival], rng: random.Random) -> Iterator[Arrival]:
    """Rows of one time, anywhere in the gap to the next one; those of the last time stay."""
    groups = [list(group) for _, group in groupby(sorted(rows, key=lambda row: row.at), key=lambda row: row.at)]
    for group, after in zip_longest(groups, groups[1:]):
        gap = after[0].at - group[0].at if after else 0.0
        yield from sorted((replace(row, at=row.at + gap * rng.random()) for row in group), key=lambda row: row.at)


# ---------------------------------------------------------------- ServeGen: a generator

@dataclass(frozen=True)
class _Lengths:
    """Token counts with their cumulated probabilities."""

    counts: tuple[int, ...]
    upto: tuple[float, ...]

    @classmethod
    def of(cls, literal: str) -> _Lengths | None:
        """From "{count: probability, …}"; None where a window has none."""
        table = ast.literal_eval(literal)
        if not table:
            return None
        return cls(tuple(int(k) for k in table), tuple(accumulate(table.values())))

    def draw(self, rng: random.Random) -> int:
        return self.counts[min(bisect_left(self.upto, rng.random() * self.upto[-1]), len(self.counts) - 1)]


def _servegen(path: Path, seed: int) -> Iterator[Arrival]:
    """Gamma or Weibull gaps whose shape and scale are given for each window of ten minutes."""
    lengths, rng = _dataset(path), random.Random(seed)
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(csv.reader(file), start=1):
            try:
                start, rate, family = float(line[0]), float(line[1]), line[3]
                shape, scale = (float(line[4]), float(line[5])) if rate > 0 else (1.0, 0.0)
            except (ValueError, IndexError) as e:
                raise TraceError(f"{path}:{number}: {e}") from None
            if rate <= 0:
                continue
            prompts, outputs = _current(lengths, start)
            at = start + _gap(rng, family, shape, scale) * rng.random()
            while at < start + WINDOW_SECONDS:
                yield Arrival(at, max(1, prompts.draw(rng)), max(1, outputs.draw(rng)))
                at += _gap(rng, family, shape, scale)


def _gap(rng: random.Random, family: str, shape: float, scale: float) -> float:
    return rng.weibullvariate(scale, shape) if family.startswith("W") else rng.gammavariate(shape, scale)


def _dataset(path: Path) -> list[tuple[float, _Lengths, _Lengths]]:
    beside = path.with_name(path.name.replace("-trace.csv", "-dataset.json"))
    try:
        windows: dict[str, dict[str, Any]] = json.loads(beside.read_text(encoding="utf-8"))
        found = [
            (float(start), prompts, outputs) for start, fields in windows.items()
            if (prompts := _Lengths.of(fields["input_tokens"])) and (outputs := _Lengths.of(fields["output_tokens"]))
        ]
    except OSError:
        raise TraceError(f"{path}: its lengths are expected in {beside}, which cannot be read") from None
    except (ValueError, KeyError, SyntaxError, TypeError, AttributeError) as e:
        raise TraceError(f"{beside}: {type(e).__name__} {e}") from None
    if not found:
        raise TraceError(f"{beside}: no window with lengths")
    return sorted(found, key=lambda window: window[0])


def rates(paths: Sequence[Path]) -> list[float]:
    """Rows per second in each window of WINDOW_SECONDS, of several ServeGen clients together. Raises TraceError, OSError."""
    total: list[float] = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        try:
            found = [float(line[1]) for line in lines]
        except (ValueError, IndexError) as e:
            raise TraceError(f"{path}: {e}") from None
        total = [a + b for a, b in zip_longest(total, found, fillvalue=0.0)]
    return total


def _current(lengths: Sequence[tuple[float, _Lengths, _Lengths]], at: float) -> tuple[_Lengths, _Lengths]:
    """Those of the last window that had any, else of the first one to come."""
    before = [window for window in lengths if window[0] <= at]
    _, prompts, outputs = before[-1] if before else lengths[0]
    return prompts, outputs
