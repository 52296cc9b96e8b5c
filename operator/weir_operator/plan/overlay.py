"""Laying the user's PodTemplateSpec over ours: maps are merged, lists of named things by name, other lists replaced.

Of a union (a volume's source, a variable's value, a probe's handler) the overlay's kind replaces ours: both would be refused. A
null says nothing, as in any manifest that is applied: what is ours stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "hostAliases": "ip"}
"""Lists whose members are told apart by something other than `name` (as Kubernetes' own merge keys)."""
_APPENDED = ("tolerations", "imagePullSecrets", "topologySpreadConstraints")
_HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
_UNIONS: dict[str, Callable[[str], bool]] = {
    "volumes": lambda key: key != "name",
    "env": lambda key: key in ("value", "valueFrom"),
    **dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), lambda key: key in _HANDLERS),
}
"""Field → whether a key of what it holds is one of the kinds of which there may be one."""


def overlaid(ours: Any, theirs: Any, field: str = "") -> Any:
    """`theirs` over `ours`; neither is changed. Shapes that do not match are the overlay's."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        given = {key: value for key, value in theirs.items() if value is not None}
        is_kind = _UNIONS.get(field, lambda _: False)
        replaced = any(is_kind(key) for key in given)
        kept = {key: value for key, value in ours.items() if not (replaced and is_kind(key) and key not in given)}
        return kept | {key: overlaid(kept[key], value, key) if key in kept else value for key, value in given.items()}
    if isinstance(ours, list) and isinstance(theirs, list):
        if field in _APPENDED:
            return ours + [item for item in theirs if item not in ours]
        key = _KEYS.get(field, "name")
        if all(isinstance(item, Mapping) and key in item for item in ours + theirs):
            by_key = {item[key]: item for item in ours}
            merged = {**by_key, **{item[key]: overlaid(by_key.get(item[key], {}), item, field) for item in theirs}}
            return list(merged.values())
    return theirs
