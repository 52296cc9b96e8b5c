"""What a plan may know besides the resource, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weir_operator.api import names
from weir_operator.api.conditions import Condition
from weir_operator.tuner.replicas import Scaling
from weir_operator.tuner.types import Outcome


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What the tuner loop says of one deployment. `status` goes into status.tuning as it is."""

    status: Mapping[str, Any]
    ready: int  # pods that should answer
    answering: int
    silent: Mapping[str, str] = field(default_factory=dict)  # pod → why its last poll failed
    good_percent: int | None = None  # of the requests that finished lately; None: too few
    refusing: bool = False
    outcome: Outcome | None = None  # the least settled of the pods' outcomes at the last tick
    reason: str = ""
    drift: str = ""
    other_contract: tuple[str, ...] = ()
    desired: int | None = None  # pods, where the operator sets their number
    scaling: Scaling | None = None  # what came of the last look at it
    proposal: int | None = None  # rows of a larger envelope
    generation: int = 0  # of the spec that this was said of


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a plan may know besides the resource. Objects are as the API server gave them. `kinds`: which of the optional
    kinds the cluster has."""

    now: str = "1970-01-01T00:00:00Z"  # RFC 3339
    deployment: Mapping[str, Any] | None = None
    pods: Sequence[Mapping[str, Any]] = ()
    trouble: Condition | None = None  # NameTaken or ApplyRefused, from the last pass
    refused: str = ""  # of what stands beside the pods: what was not made, and why
    applied: bool = True  # whether the last pass left every child as planned
    tuning: TuningReport | None = None
    kinds: frozenset[str] = frozenset(names.OPTIONAL_KINDS)
    autoscalers: Sequence[Mapping[str, Any]] = ()  # of somebody else's, whose target is the resource or its Deployment
    other_operator: str = ""  # one that wants to serve the resource, too: its namespace, or NAMESPACE/LEASE
    scalable: bool = True  # whether the number of pods may change: on one machine it does not
