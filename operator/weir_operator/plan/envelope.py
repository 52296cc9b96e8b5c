"""The envelope that pods are started with, where it may grow: `tuning.envelope: Roll`.

Bound: from `engine.limits.maxBatchSize` to `tuning.knobs.maxBatchSize.max`, doubled at most, by one rolling restart an hour,
and none while another is under way. As with the number of pods the status decides (`status.tuning.envelope`) and the Deployment
follows. It counts as long as the limit that it grew from is the spec's: who edits that begins anew, and so does who sets Keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weir_operator.api.quantity import parse_time
from weir_operator.api.types import InferenceDeployment, Spec
from weir_operator.plan.observed import Observed

ROLL_SECONDS = 3600.0


def _grown(resource: InferenceDeployment) -> Mapping[str, Any]:
    """What the status has of it, if it is of the present limit."""
    found: Mapping[str, Any] = (resource.status.get("tuning") or {}).get("envelope") or {}
    limit = resource.spec.engine.limits.max_batch_size
    return found if resource.spec.tuning.envelope == "Roll" and found.get("from") == limit else {}


def batch_limit(resource: InferenceDeployment) -> int | None:
    """Most rows that may ever run at once in the pods that are to be there; None: the server's default."""
    limit, most = resource.spec.engine.limits.max_batch_size, resource.spec.tuning.knobs.max_batch_size.max
    grown = int(_grown(resource).get("maxBatchSize", 0))
    return limit if limit is None or most is None else max(limit, min(grown, most))


def with_envelope(resource: InferenceDeployment) -> Spec:
    """The spec that pods are started from."""
    spec, rows = resource.spec, batch_limit(resource)
    if rows == spec.engine.limits.max_batch_size:
        return spec
    limits = spec.engine.limits.model_copy(update={"max_batch_size": rows})
    return spec.model_copy(update={"engine": spec.engine.model_copy(update={"limits": limits})})


def envelope_status(resource: InferenceDeployment, seen: Observed, rolled_out: bool) -> Mapping[str, Any]:
    """For status.tuning.envelope: what is kept, or what was just decided. `rolled_out`: every pod has the present template."""
    tuning, kept, now = resource.spec.tuning, _grown(resource), batch_limit(resource)
    proposed = seen.tuning.proposal if seen.tuning else None
    held = tuning.mode != "Auto" or tuning.paused or not seen.scalable or not rolled_out
    if tuning.envelope != "Roll" or held or now is None or proposed is None or proposed <= now:
        return kept
    if kept and _seconds(str(kept.get("since", "")), seen.now) < ROLL_SECONDS:
        return kept
    return {"maxBatchSize": proposed, "from": resource.spec.engine.limits.max_batch_size, "since": seen.now}


def _seconds(since: str, until: str) -> float:
    """Of a time that somebody edited, long ago."""
    try:
        return (parse_time(until) - parse_time(since)).total_seconds()
    except (ValueError, TypeError):
        return ROLL_SECONDS
