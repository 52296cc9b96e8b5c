"""plan(): the whole decision about one InferenceDeployment, as a value that can be printed, compared and applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from weir_operator.api.types import InferenceDeployment
from weir_operator.plan.manifests import Defaults, Manifest, children
from weir_operator.plan.observed import Observed
from weir_operator.plan.presets import filled
from weir_operator.plan.status import status


@dataclass(frozen=True, slots=True)
class Plan:
    """`manifests` in the order in which they are applied; `status` whole."""

    manifests: tuple[Manifest, ...]
    status: Mapping[str, Any]


def plan(resource: InferenceDeployment, seen: Observed, defaults: Defaults) -> Plan:
    """What should exist and what is true. Pure: the same arguments give the same plan."""
    return Plan(tuple(children(resource, defaults, seen)), status(resource, seen))


class SpecError(ValueError):
    """A manifest that cannot be used; the text is one sentence that names the field."""


def parse(raw: Mapping[str, Any]) -> InferenceDeployment:
    """The typed resource, with what its preset fills in. Raises SpecError."""
    known = {k: v for k, v in raw.items() if k in ("apiVersion", "kind", "metadata", "spec", "status")}
    if unknown := sorted(set(raw) - set(known)):
        raise SpecError(f"{unknown[0]}: unknown field")
    try:
        resource = InferenceDeployment.model_validate(known)
        return resource.model_copy(update={"spec": filled(resource.spec)})
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the manifest"
        text = {"extra_forbidden": "unknown field", "missing": "is required"}.get(first["type"])
        raise SpecError(f"{where}: {text or first['msg'].removeprefix('Value error, ')}") from None
