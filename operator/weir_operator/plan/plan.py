"""plan(): the whole decision about one InferenceDeployment, as a value that can be printed, compared and applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from weir_operator.api.types import InferenceDeployment, ObjectMeta
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


def parse(raw: Mapping[str, Any], lenient: bool = False) -> InferenceDeployment:
    """The typed resource, with what its preset fills in. Raises SpecError.

    `lenient`: fields that are not known here are passed over. What an API server gives has passed its schema; a field there
    that is unknown is a later version's, whose definition came first or stayed behind: no reason to give up what serves.
    """
    known = {k: v for k, v in raw.items() if k in ("apiVersion", "kind", "metadata", "spec", "status")}
    if unknown := sorted(set(raw) - set(known)):
        raise SpecError(f"{unknown[0]}: unknown field")
    try:
        resource = InferenceDeployment.model_validate(known)
        return resource.model_copy(update={"spec": filled(resource.spec)})
    except ValidationError as e:
        errors = e.errors(include_url=False)
        later = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
        if lenient and later:
            return parse(_without(known, later))
        where = ".".join(str(part) for part in errors[0]["loc"]) or "the manifest"
        text = {"extra_forbidden": "unknown field", "missing": "is required"}.get(errors[0]["type"])
        raise SpecError(f"{where}: {text or errors[0]['msg'].removeprefix('Value error, ')}") from None


def unread(raw: Mapping[str, Any]) -> InferenceDeployment:
    """A resource that `parse` refused, by name: enough to look for what is its."""
    meta = raw["metadata"]
    named = ObjectMeta.model_construct(name=meta["name"], namespace=meta["namespace"], uid=meta["uid"])
    return InferenceDeployment.model_construct(metadata=named)


def _without(raw: Mapping[str, Any], fields: Iterable[tuple[int | str, ...]]) -> dict[str, Any]:
    """A copy that lacks these fields; a place that is none of the document's (a choice between types) is left alone."""
    out = deepcopy(dict(raw))
    for *path, name in fields:
        place: Any = out
        for part in path:
            if isinstance(place, list) and isinstance(part, int):
                place = place[part]
            else:
                place = place.get(part) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(name, None)
    return out
