"""The last round of each deployment, kept so that one may ask why.

Bound: one Round for each deployment that was polled within KEEP_SECONDS; its readings are those that the tuner holds anyway.
"""

from __future__ import annotations

from typing import Any

from weir_operator.loops.replicas import Counted
from weir_operator.loops.steering import Subject
from weir_operator.loops.tuner import Round
from weir_operator.tuner.explain import explain
from weir_operator.tuner.replicas import SPARE, ReplicaDecision
from weir_operator.tuner.types import Record

KEEP_SECONDS = 300.0


class Rounds:
    """Fed by a Sink, asked by whoever explains."""

    def __init__(self) -> None:
        self._last: dict[str, Round] = {}  # the longest unheard of first
        self._records: dict[str, dict[str, Record]] = {}
        self._looked: dict[str, ReplicaDecision] = {}  # the last look at the number of pods

    def heard(self, subject: Subject, round_: Round) -> None:
        self._last.pop(subject.key, None)
        self._last[subject.key] = round_
        if round_.count and round_.count.decision.outcome:
            self._looked[subject.key] = round_.count.decision
        known = {**self._records.get(subject.key, {}), **{r.pod: r for r in round_.records}}
        self._records[subject.key] = {pod: r for pod, r in known.items() if pod in round_.pods}
        while (oldest := next(iter(self._last))) and self._last[oldest].now < round_.now - KEEP_SECONDS:
            del self._last[oldest], self._records[oldest]
            self._looked.pop(oldest, None)

    def explained(self, key: str) -> dict[str, Any] | None:
        """`{"now", "mode", "slo", "pods": [...]}` in JSON's types, or None where nothing was heard of that deployment."""
        found = self._last.get(key)
        if found is None:
            return None
        state, spec, records = found.decision.state, found.spec, self._records[key]
        return {
            "now": found.now, "mode": spec.mode, "paused": spec.paused, "slo": {"ttft": spec.ttft, "tpot": spec.tpot},
            "tickSeconds": spec.tick_seconds,
            **({"replicas": _counted(count, self._looked.get(key))} if (count := found.count) else {}),
            "pods": [
                explain(state.pods.get(name), view, spec, found.now, records.get(name), state.next_tick).to_json()
                for name, view in found.pods.items()
            ],
        }


def _counted(count: Counted, looked: ReplicaDecision | None) -> dict[str, Any]:
    """The number of pods: what is wanted, what came of the last look at it, and what another look would go by."""
    return {
        "desired": count.decision.desired, "min": count.bounds.least, "max": count.bounds.most, "spare": round(1 - SPARE, 2),
        "outcome": looked.outcome.value if looked and looked.outcome else None, "reason": looked.reason if looked else "",
        "offered": looked.offered if looked else None, "capacity": looked.capacity if looked else None,
        "nextLook": count.decision.state.next_tick, "stabilisation": count.bounds.stabilise,
    }
