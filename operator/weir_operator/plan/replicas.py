"""How many pods are wanted, who says so, and which of them end where there are too many. One owner at a time.

`status.desiredReplicas` is what the operator decided (Internal): the Deployment follows it, never the other way round, so a
process that dies between the two writes leaves nothing behind that another could misread. It is the operator's own decision
only where the status, in the same write, says that it was (`AutoscalerOwned`), and of this spec: otherwise somebody else may
have been the owner since, and the number is taken over as it is: as it is read then, not as watches last told of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weir_operator.api import names
from weir_operator.api.conditions import Condition
from weir_operator.api.types import InferenceDeployment
from weir_operator.plan.observed import Observed
from weir_operator.tuner.replicas import Scaling

_REASONS = {Scaling.AT_MOST: "AtMaximum", Scaling.UNKNOWN: "CapacityUnknown"}
_OURS = ("ByOperator", "AnotherOnResource", *_REASONS.values())


def _rival(seen: Observed, target: str) -> str:
    """What an autoscaler of somebody else's on this kind of target is called, and whose it is; empty: there is none."""
    for live in seen.autoscalers:
        if live["spec"]["scaleTargetRef"]["kind"] == target:
            made_by = [f" of {ref['kind']} {ref['name']}" for ref in live["metadata"].get("ownerReferences") or ()]
            return f"HorizontalPodAutoscaler {live['metadata']['name']}{''.join(made_by[:1])}"
    return ""


def external(resource: InferenceDeployment, seen: Observed) -> bool:
    """Whether an autoscaler on the Deployment owns the number of pods: asked for, or there all the same. Taking its writes back
    would have pods come and go at its every turn."""
    return resource.spec.autoscaling.mode == "External" or bool(_rival(seen, "Deployment"))


def internal(resource: InferenceDeployment, seen: Observed) -> bool:
    """Whether the operator itself does."""
    return resource.spec.autoscaling.mode == "Internal" and not external(resource, seen)


def _present(seen: Observed) -> int | None:
    found = (seen.deployment or {}).get("spec", {}).get("replicas")
    return int(found) if found is not None else None


def _said(resource: InferenceDeployment) -> str:
    """The reason of AutoscalerOwned in the status as it was read."""
    return next((str(c["reason"]) for c in resource.status.get("conditions", ()) if c.get("type") == "AutoscalerOwned"), "")


def decided_replicas(resource: InferenceDeployment) -> int | None:
    """The operator's own number, as the status has it. None: it was somebody else's then."""
    number = resource.status.get("desiredReplicas")
    return int(number) if number is not None and _said(resource) in _OURS else None


def takes_over(resource: InferenceDeployment, seen: Observed) -> bool:
    """Whether the number becomes ours in this pass: what the Deployment has now is what the last owner left."""
    of_this_spec = resource.status.get("observedGeneration") == resource.metadata.generation
    ours = of_this_spec and decided_replicas(resource) is not None
    return internal(resource, seen) and seen.scalable and _present(seen) is not None and not ours


def wanted_replicas(resource: InferenceDeployment, seen: Observed) -> int:
    """How many pods the Deployment is to have now, whoever says so."""
    wish, present = resource.spec.autoscaling, _present(seen)
    if wish.mode == "Disabled" and not external(resource, seen):
        return resource.spec.replicas
    taken = present if present is not None else max(resource.spec.replicas, wish.min_replicas)
    if external(resource, seen) or not seen.scalable:
        return taken
    decided = decided_replicas(resource)
    return _allowed(resource, taken if decided is None or takes_over(resource, seen) else decided)


def _allowed(resource: InferenceDeployment, number: int) -> int:
    wish = resource.spec.autoscaling
    return min(max(number, wish.min_replicas), wish.max_replicas or number)


def desired_replicas(resource: InferenceDeployment, seen: Observed) -> int:
    """For the status. A report that was made of another spec may speak of a number that has had another owner since."""
    report = seen.tuning
    if internal(resource, seen) and report and report.desired is not None and report.generation == resource.metadata.generation:
        return _allowed(resource, report.desired)
    return wanted_replicas(resource, seen)


def owner(resource: InferenceDeployment, seen: Observed) -> Condition:
    """Who sets the number of pods."""
    wish, wanted = resource.spec.autoscaling, wanted_replicas(resource, seen)
    if wish.mode != "External" and (rival := _rival(seen, "Deployment")):
        return Condition("AutoscalerOwned", True, "AnotherOnDeployment",
                         f"{rival} sets the number of pods, now {wanted}: delete it, or set autoscaling.mode to External.")
    if wish.mode == "Disabled":
        return Condition("AutoscalerOwned", False, "BySpec")
    if not seen.scalable:
        return Condition("AutoscalerOwned", False, "FixedHere")
    if wish.mode == "External":
        return Condition("AutoscalerOwned", True, "OnDeployment",
                         f"An autoscaler on the Deployment sets the number of pods, now {wanted}.")
    if rival := _rival(seen, names.KIND):
        return Condition("AutoscalerOwned", True, "AnotherOnResource",
                         f"{rival} writes spec.replicas, which is not read: delete it, or set autoscaling.mode to Disabled.")
    outcome, before = seen.tuning.scaling if seen.tuning else None, _said(resource)
    reason = _REASONS.get(outcome, "ByOperator") if outcome else before if before in _REASONS.values() else "ByOperator"
    if reason != "ByOperator":
        return Condition("AutoscalerOwned", True, reason)
    held = "; spec.tuning.paused holds it" if resource.spec.tuning.paused else ""
    numbers = f"now {desired_replicas(resource, seen)}, of {wish.min_replicas} to {wish.max_replicas}{held}"
    return Condition("AutoscalerOwned", True, reason, f"The operator sets the number of pods, {numbers}.")


def marks(resource: InferenceDeployment, seen: Observed) -> list[tuple[Mapping[str, Any], str | None]]:
    """(pod, its deletion cost) where that has to change before the Deployment shrinks: those that the tuner chose are cheap,
    and what an earlier choice left is taken back. A cost that somebody else gave is left alone."""
    present = _present(seen)
    if not internal(resource, seen) or present is None or wanted_replicas(resource, seen) >= present:
        return []
    leaving = ((resource.status.get("tuning") or {}).get("replicas") or {}).get("leaving") or ()
    found: list[tuple[Mapping[str, Any], str | None]] = []
    for pod in seen.pods:
        cost = (pod["metadata"].get("annotations") or {}).get(names.DELETION_COST)
        cheap = pod["metadata"]["name"] in leaving
        if cheap != (cost == names.CHEAP):
            found.append((pod, names.CHEAP if cheap else None))
    return found
