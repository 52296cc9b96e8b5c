"""Laying the user's PodTemplateSpec over ours: maps are merged, lists of named things by name, other lists replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "hostAliases": "ip"}
"""Lists whose members are told apart by something other than `name` (as Kubernetes' own merge keys)."""
_APPENDED = ("tolerations", "imagePullSecrets", "topologySpreadConstraints")


def overlaid(ours: Any, theirs: Any, field: str = "") -> Any:
    """`theirs` over `ours`; neither is changed. Shapes that do not match are the overlay's."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {
            **ours,
            **{key: overlaid(ours[key], value, key) if key in ours else value for key, value in theirs.items()},
        }
    if isinstance(ours, list) and isinstance(theirs, list):
        if field in _APPENDED:
            return ours + [item for item in theirs if item not in ours]
        key = _KEYS.get(field, "name")
        if all(isinstance(item, Mapping) and key in item for item in ours + theirs):
            by_key = {item[key]: item for item in ours}
            merged = {**by_key, **{item[key]: overlaid(by_key.get(item[key], {}), item) for item in theirs}}
            return list(merged.values())
    return theirs
