"""Scheduling decisions as data: what `decide` was given and what it chose, for /debug/schedule and `weir-server replay`.

The wire form holds everything that the policy looked at, so the same function run again must choose the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from weir_server.kv.shape import Need, Room
from weir_server.policy.limits import Limits
from weir_server.policy.state import Running, State, StepPlan, Waiting
from weir_server.policy.step import decide


class Decision(NamedTuple):
    """One step: its time (monotonic seconds), the state with the waiting rows that were looked at, and the choice."""

    t: float
    state: State
    plan: StepPlan


def decision(t: float, state: State, looked_at: Sequence[Waiting], plan: StepPlan) -> Decision:
    return Decision(t, replace(state, waiting=tuple(looked_at)), plan)


_NUMBERS = ("queued", "head_lane", "rows", "growth", "budget", "watermark", "starved")


def to_wire(d: Decision) -> dict[str, Any]:
    state = {
        **{name: getattr(d.state, name) for name in _NUMBERS},
        "room": d.state.room._asdict(),
        "running": [{**row._asdict(), "frees": row.frees and row.frees._asdict()} for row in d.state.running],
        "waiting": [{**row._asdict(), "need": row.need._asdict()} for row in d.state.waiting],
        "limits": {**asdict(d.state.limits), "pages": None if math.isinf(d.state.limits.pages) else d.state.limits.pages},
    }
    return {"t": d.t, "state": state, "plan": asdict(d.plan)}


def from_wire(wire: Mapping[str, Any]) -> Decision:
    """Raises KeyError or TypeError on another shape."""
    s, p = dict(wire["state"]), dict(wire["plan"])
    s["room"] = Room(**s["room"])
    s["running"] = tuple(Running(**{**row, "frees": row["frees"] and Room(**row["frees"])}) for row in s["running"])
    s["waiting"] = tuple(Waiting(**{**row, "need": Need(**row["need"])}) for row in s["waiting"])
    s["limits"] = Limits(**{**s["limits"], "pages": math.inf if s["limits"]["pages"] is None else s["limits"]["pages"]})
    for name in ("take", "preempt"):
        p[name] = tuple(p[name])
    p["admit"] = tuple((place, tokens) for place, tokens in p["admit"])
    return Decision(wire["t"], State(**s), StepPlan(**p))


def agrees(d: Decision) -> bool:
    """Whether the policy, asked again, chooses the same."""
    return decide(d.state) == d.plan
