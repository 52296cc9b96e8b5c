"""Rule 4: each move of the batch is compared with what was predicted for it.

The window that counts is clean: batch, watermark and budget are in force, the queue has shrunk to its depth, no row in it is
from before the move (unless it is in time all the same), and the rows that were served meanwhile are through. A miss is an
error over 15 % in the time per token, unless more load explains a longer one or less a shorter one; or in goodput where it is
also over two standard errors of a count and the load was the same (within 25 %).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from weir_operator.tuner.types import Pending, TunerSpec
from weir_operator.tuner.window import LONGEST, MIN_COMPLETIONS, MIN_INTERVALS, Span, is_settled
from weir_server.contract import Window

ERROR = 0.15
SAME_LOAD = 0.25
STANDARD_ERRORS = 2.0
SETTLE_SECONDS = 600.0


class Finding(Enum):
    WAIT = "wait"
    OVERDUE = "overdue"
    KEPT = "kept"
    MISSED = "missed"
    WORSE = "worse"
    UNUSED = "unused"


@dataclass(frozen=True)
class Verdict:
    finding: Finding
    why: str
    observed: Mapping[str, float]


def judge(
    pending: Pending, windows: Sequence[Window], row_seconds: float, chunk: int | None, spec: TunerSpec, now: float,
    drift: float = 1.0,
) -> Verdict:
    """`row_seconds`: how long a row is served, for those that were in the batch when the queue had drained. `drift`: how the
    pods beside a canary fared meanwhile."""
    last, age = windows[-1], now - pending.at
    if not is_settled(last, chunk):
        overdue = age > max(SETTLE_SECONDS, 2 * row_seconds)
        return Verdict(Finding.OVERDUE if overdue else Finding.WAIT, "the new value is not in force yet", {})
    start = _clean_start(windows, row_seconds, spec)
    span = Span(start, last) if start else None
    patience = max(spec.tick_seconds / 2, spec.tick_seconds - 1.5 * spec.poll_seconds)
    counted = sum(last.settled["tpot"].counts)
    long_enough = span is not None and span.seconds >= patience and span.completed >= MIN_COMPLETIONS
    if span is None or not long_enough or counted < MIN_INTERVALS:
        if age > LONGEST + row_seconds:
            return Verdict(Finding.UNUSED, "five minutes brought no clean window to judge it by", {})
        return Verdict(Finding.WAIT, "the move has no clean window behind it yet", {})
    observed = {
        "goodput": span.good / span.seconds,
        "interval": last.settled["tpot"].sum / counted,
        "offered": span.offered / span.seconds,
        "running": span.mean_running,
    }
    if ended := span.total("slo_total"):
        observed["attainment"] = span.good / ended
        observed["attainment_low"], observed["attainment_high"] = wilson(span.good, ended)
    return _compare(pending, observed, span, windows, drift)


def _clean_start(windows: Sequence[Window], row_seconds: float, spec: TunerSpec) -> Window | None:
    """The first reading after the move from which on nothing of the time before it is left."""
    settled_at = windows[-1].settled_at
    drained = None
    for w in windows:
        places = w.target.max_queue_depth + max(0, w.target.max_batch_size - w.running)
        no_leftover = w.oldest_wait <= max(spec.ttft or 0.0, w.monotonic - settled_at)
        if drained is None and w.monotonic >= settled_at and w.waiting <= places and no_leftover:
            drained = w.monotonic
        if drained is not None and w.monotonic >= drained + row_seconds:
            return w
    return None


def wilson(good: float, total: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share, 95 % by default: between 0 and 1, and never of no width."""
    if total <= 0:
        return 0.0, 1.0
    share, z2 = min(1.0, max(0.0, good / total)), z * z
    middle, half = share + z2 / (2 * total), z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, (middle - half) / (1 + z2 / total)), min(1.0, (middle + half) / (1 + z2 / total))


def _compare(
    pending: Pending, observed: Mapping[str, float], span: Span, windows: Sequence[Window], drift: float
) -> Verdict:
    old, new = pending.before.get("max_batch_size", 0), pending.after.get("max_batch_size", 0)
    if new > old and not _used(windows, span.old.monotonic, old):
        return Verdict(Finding.UNUSED, "the added slots were in use for less than half of the window", observed)
    same_load = abs(observed["offered"] / pending.offered - 1) <= SAME_LOAD if pending.offered else False
    error = math.sqrt(max(span.good, 1.0)) / span.seconds
    before = pending.goodput_before * drift if pending.goodput_before is not None else None
    if before is not None and same_load and observed["goodput"] < 0.96 * before - 2 * STANDARD_ERRORS * error:
        return Verdict(Finding.WORSE, f"goodput fell from {before:.2f} to {observed['goodput']:.2f} rows/s", observed)
    if pending.predicted_interval and abs(longer := observed["interval"] / pending.predicted_interval - 1) > ERROR:
        if not same_load and (longer > 0) == (observed["offered"] > pending.offered):
            return Verdict(Finding.UNUSED, "the time per token is off as another load explains", observed)
        return Verdict(Finding.MISSED, "the time per token is off by more than 15 %", observed)
    predicted = pending.predicted_goodput
    if predicted is not None and same_load:
        off, chance = abs(observed["goodput"] - predicted), math.sqrt(predicted / span.seconds)  # of a count with that mean
        if off > ERROR * predicted and off > STANDARD_ERRORS * max(error, chance):
            return Verdict(Finding.MISSED, "goodput is off by more than 15 % and two standard errors", observed)
    return Verdict(Finding.KEPT, "it came out as predicted", observed)


def _used(windows: Sequence[Window], since: float, old: float) -> bool:
    running = [w.running for w in windows if w.monotonic >= since]
    return sum(r > old for r in running) * 2 >= len(running)
