"""Scheduling decisions as data: what `decide` was given and what it chose, for /debug/schedule and `weir-server replay`.

The wire form holds everything that the policy looked at, so the same function run again must choose the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from weir_server.policy.limits import Limits
from weir_server.policy.step import Running, State, StepPlan, Waiting, decide


class Decision(NamedTuple):
    """One step: its time (monotonic seconds), the state with the waiting rows that were looked at, and the choice."""

    t: float
    state: State
    plan: StepPlan


def decision(t: float, state: State, looked_at: Sequence[Waiting], plan: StepPlan) -> Decision:
    return Decision(t, replace(state, waiting=tuple(looked_at)), plan)


def to_wire(d: Decision) -> dict[str, Any]:
    state = {
        **{name: getattr(d.state, name) for name in ("queued", "rows", "free", "room", "budget", "watermark", "starved")},
        "running": [row._asdict() for row in d.state.running],
        "waiting": [row._asdict() for row in d.state.waiting],
        "limits": {**asdict(d.state.limits), "pages": None if math.isinf(d.state.limits.pages) else d.state.limits.pages},
    }
    return {"t": d.t, "state": state, "plan": asdict(d.plan)}


def from_wire(wire: Mapping[str, Any]) -> Decision:
    """Raises KeyError or TypeError on another shape."""
    s, p = dict(wire["state"]), dict(wire["plan"])
    s["running"] = tuple(Running(**row) for row in s["running"])
    s["waiting"] = tuple(Waiting(**row) for row in s["waiting"])
    s["limits"] = Limits(**{**s["limits"], "pages": math.inf if s["limits"]["pages"] is None else s["limits"]["pages"]})
    for name in ("take", "admit", "preempt"):
        p[name] = tuple(p[name])
    return Decision(wire["t"], State(**s), StepPlan(**p))


def agrees(d: Decision) -> bool:
    """Whether the policy, asked again, chooses the same."""
    return decide(d.state) == d.plan
