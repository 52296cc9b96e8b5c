"""The last round of each deployment, kept so that one may ask why.

Bound: one Round for each deployment that was polled within KEEP_SECONDS; its readings are those that the tuner holds anyway.
"""

from __future__ import annotations

from typing import Any

from weir_operator.loops.steering import Subject
from weir_operator.loops.tuner import Round
from weir_operator.tuner.explain import explain
from weir_operator.tuner.types import Record

KEEP_SECONDS = 300.0


class Rounds:
    """Fed by a Sink, asked by whoever explains."""

    def __init__(self) -> None:
        self._last: dict[str, Round] = {}  # the longest unheard of first
        self._records: dict[str, dict[str, Record]] = {}

    def heard(self, subject: Subject, round_: Round) -> None:
        self._last.pop(subject.key, None)
        self._last[subject.key] = round_
        known = {**self._records.get(subject.key, {}), **{r.pod: r for r in round_.records}}
        self._records[subject.key] = {pod: r for pod, r in known.items() if pod in round_.pods}
        while (oldest := next(iter(self._last))) and self._last[oldest].now < round_.now - KEEP_SECONDS:
            del self._last[oldest], self._records[oldest]

    def explained(self, key: str) -> dict[str, Any] | None:
        """`{"now", "mode", "slo", "pods": [...]}` in JSON's types, or None where nothing was heard of that deployment."""
        found = self._last.get(key)
        if found is None:
            return None
        state, spec, records = found.decision.state, found.spec, self._records[key]
        return {
            "now": found.now, "mode": spec.mode, "paused": spec.paused, "slo": {"ttft": spec.ttft, "tpot": spec.tpot},
            "tickSeconds": spec.tick_seconds,
            "pods": [
                explain(state.pods.get(name), view, spec, found.now, records.get(name), state.next_tick).to_json()
                for name, view in found.pods.items()
            ],
        }
