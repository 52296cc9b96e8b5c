"""What the operator adds to a pod template, kept with the Deployment that it made: a newer operator restarts nothing by itself.

Bound: pods keep the defaults that they were made with until the user changes something that restarts them anyway, or sets
the annotation `weir.dev/upgrade` to a value that it did not have. Cost: one annotation on the Deployment, written in the same
request as the template, so that the two cannot disagree. Reason: an operator whose upgrade rolls a whole fleet at once is an
outage.

All that a later operator may want to render differently is data in `Pinned`; golden templates (tests/goldens) hold everything
else still. A Deployment that was made before a field there was has the field's default: so that default is what pods had until
then, for good, and what new pods get is said in `manifests.Defaults`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from weir_operator.api import names
from weir_operator.api.types import InferenceDeployment

RESTARTING = ("model", "engine", "image", "image_pull_policy", "auth", "sidecar", "template")
"""Fields of the spec that enter the pod template, whatever their values (a long drain and a long deadline enter it too)."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """Defaults that enter the pod template. `parallel`: slots of a server; `leave_seconds`: for how long a pod that ends still
    takes requests, while its address leaves the Service; `user`: uid and gid."""

    image: str
    parallel: int = 4
    leave_seconds: int = 5
    user: int = 10001


def of_spec(resource: InferenceDeployment) -> str:
    """Digest of what the user declared that restarts pods. Declaring a default changes nothing."""
    declared = resource.spec.model_dump(by_alias=True, exclude_defaults=True, mode="json", include=set(RESTARTING))
    upgrade = resource.metadata.annotations.get(names.UPGRADE_ANNOTATION)
    return hashlib.sha256(json.dumps([declared, upgrade], sort_keys=True).encode()).hexdigest()[:16]


def in_force(resource: InferenceDeployment, deployment: Mapping[str, Any] | None, current: Pinned) -> Pinned:
    """The defaults to render with: those that `deployment` was made with while the user declares the same, else `current`."""
    notes = (deployment or {}).get("metadata", {}).get("annotations") or {}
    try:
        saved = json.loads(notes.get(names.PINNED_ANNOTATION, "{}"))
        if saved.get("of") == of_spec(resource):
            known = {f.name for f in fields(Pinned)}
            return Pinned(**{name: value for name, value in saved["defaults"].items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # not as we wrote it: somebody edited it, and it is written anew
    return current


def annotation(resource: InferenceDeployment, pinned: Pinned) -> dict[str, str]:
    return {names.PINNED_ANNOTATION: json.dumps({"of": of_spec(resource), "defaults": asdict(pinned)}, sort_keys=True)}
