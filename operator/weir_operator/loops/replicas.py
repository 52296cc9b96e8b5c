"""The number of pods of one deployment, where the operator sets it: what is remembered between polls, and what a poll decides.

The decision is `tuner.replicas.decide_replicas`, which is pure. What must outlive this process is in the status: the number
itself (`status.desiredReplicas`), what the decision goes by (`status.tuning.state.replicas`), and which pods end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weir_operator.api.quantity import parse_duration
from weir_operator.api.types import Autoscaling
from weir_operator.tuner.replicas import ReplicaDecision, ReplicaSpec, ReplicaState, Scaling, decide_replicas, least_cached
from weir_operator.tuner.types import PodView, TunerSpec, TunerState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counted:
    """What one poll decided. `before`: pods that were wanted until then."""

    before: int
    bounds: ReplicaSpec
    decision: ReplicaDecision

    @property
    def changed(self) -> bool:
        return self.decision.outcome in (Scaling.OUT, Scaling.IN)


@dataclass(slots=True)
class Count:
    """`wanted`: None where the number is somebody else's. `generation`: of the spec under which it was taken over."""

    state: ReplicaState = field(default_factory=ReplicaState)
    wanted: int | None = None
    generation: int = -1
    last: ReplicaDecision | None = None  # of the last look
    leaving: tuple[str, ...] = ()

    @classmethod
    def resumed(cls, saved: Mapping[str, Any]) -> Count:
        """From status.tuning, with a whole tick before the first look: there are no readings yet. What is of another version is
        dropped; the number itself is not in it."""
        try:
            state = replace(ReplicaState.from_json((saved.get("state") or {}).get("replicas") or {}), next_tick=None)
        except (TypeError, ValueError, AttributeError):
            log.warning("what was saved of the number of pods is of another version: it is held for a while")
            state = ReplicaState()
        return cls(state, leaving=tuple((saved.get("replicas") or {}).get("leaving") or ()))

    def decide(
        self, wish: Autoscaling, taken: int | None, generation: int, pods: Mapping[str, PodView], tuner: TunerState,
        spec: TunerSpec, tick: float, now: float,
    ) -> Counted | None:
        """None where the number is not ours to set. `taken`: as the status and the Deployment have it; it counts at first and
        after each edit of the spec, since the number may have had another owner in between. `pods`: those that serve."""
        if taken is None or wish.max_replicas is None:
            self.wanted, self.last, self.leaving, self.state = None, None, (), ReplicaState()
            return None
        if self.wanted is None or generation != self.generation:
            self.wanted, self.generation = taken, generation
        before, bounds = self.wanted, ReplicaSpec(
            wish.min_replicas, wish.max_replicas, parse_duration(wish.scale_down_stabilization), tick,
        )
        if spec.paused:
            return Counted(before, bounds, ReplicaDecision(self.state, before))
        found = decide_replicas(self.state, pods, tuner, spec, bounds, before, now)
        self.state, self.wanted = found.state, found.desired
        if found.outcome:
            self.last = found
            self.leaving = least_cached(pods, before - found.desired)
        return Counted(before, bounds, found)

    def status(self) -> dict[str, Any] | None:
        """For status.tuning.replicas: without figures, which would change at every look."""
        if self.wanted is None or self.last is None or self.last.outcome is None:
            return None
        return {"outcome": self.last.outcome.value, **({"leaving": list(self.leaving)} if self.leaving else {})}
