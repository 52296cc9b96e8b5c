"""The last round of each deployment, kept so that one may ask why.

Bound: one Round for each deployment that is steered; its readings are those that the tuner holds anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weir_operator.loops.replicas import Counted
from weir_operator.loops.steering import Subject
from weir_operator.loops.tuner import Round, wall_clock
from weir_operator.tuner.explain import explain
from weir_operator.tuner.replicas import SPARE, ReplicaDecision
from weir_operator.tuner.types import Record

KEEP_SECONDS = 300.0
"""What was not polled for so long is not explained: whatever holds its polls back, the answer would be of another time."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """Of one deployment. `looked`: the last look at the number of pods."""

    round: Round
    records: dict[str, Record]
    looked: ReplicaDecision | None


class Rounds:
    """Fed by a Sink in its loop, asked by whoever explains, in any thread: what is kept is replaced as a whole."""

    def __init__(self, clock: Callable[[], float] = wall_clock) -> None:
        self._clock = clock
        self._heard: dict[str, _Heard] = {}

    def heard(self, subject: Subject, round_: Round) -> None:
        before, count = self._heard.get(subject.key), round_.count
        known = {**(before.records if before else {}), **{r.pod: r for r in round_.records}}
        looked = count.decision if count and count.decision.outcome else before.looked if before else None
        self._heard[subject.key] = _Heard(round_, {pod: r for pod, r in known.items() if pod in round_.pods}, looked)

    def forgotten(self, key: str) -> None:
        self._heard.pop(key, None)

    def explained(self, key: str) -> dict[str, Any] | None:
        """`{"now", "mode", "slo", "pods": [...]}` in JSON's types, or None where nothing was heard of it lately."""
        heard = self._heard.get(key)
        if heard is None or self._clock() - heard.round.now > KEEP_SECONDS:
            return None
        found, records = heard.round, heard.records
        state, spec = found.decision.state, found.spec
        return {
            "now": found.now, "mode": spec.mode, "paused": spec.paused, "slo": {"ttft": spec.ttft, "tpot": spec.tpot},
            "tickSeconds": spec.tick_seconds,
            **({"replicas": _counted(count, heard.looked)} if (count := found.count) else {}),
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
