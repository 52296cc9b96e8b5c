"""NetworkPolicies as the API documents them: may one pod open a connection to another's port?

Policies add up. A pod that no policy selects for a direction is open in it; one that is selected may do what any of those
policies allows. Both ends have to agree: egress of the source, ingress of the target.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Pod:
    """`ports`: names of container ports. A namespace always has the label `kubernetes.io/metadata.name`."""

    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ip: str = "10.0.0.1"
    ports: Mapping[str, int] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outside:
    """An address that is no pod's: a node, the API server, the world."""

    ip: str


End = Pod | Outside


def allowed(policies: Iterable[Policy], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """Whether `source` may connect to `target` at `port`."""
    known = list(policies)
    out = not isinstance(source, Pod) or _lets(known, source, "Egress", target, port, protocol, target)
    return out and (not isinstance(target, Pod) or _lets(known, target, "Ingress", source, port, protocol, target))


def _lets(policies: list[Policy], pod: Pod, way: str, other: End, port: int, protocol: str, target: End) -> bool:
    selecting = [p for p in policies if _selects(p, pod) and way in _types(p)]
    if not selecting:
        return True
    rules = [(rule, p["metadata"]["namespace"]) for p in selecting for rule in p["spec"].get(way.lower()) or ()]
    peers = "from" if way == "Ingress" else "to"
    return any(
        _ports(rule.get("ports"), port, protocol, target)
        and (not rule.get(peers) or any(_peer(peer, other, own) for peer in rule[peers]))
        for rule, own in rules
    )


def _types(policy: Policy) -> list[str]:
    """Absent: Ingress, and Egress if there is an egress section."""
    return policy["spec"].get("policyTypes") or ["Ingress", *(["Egress"] if "egress" in policy["spec"] else [])]


def _selects(policy: Policy, pod: Pod) -> bool:
    return policy["metadata"]["namespace"] == pod.namespace and _matches(policy["spec"].get("podSelector") or {}, pod.labels)


def _peer(peer: Mapping[str, Any], end: End, own_namespace: str) -> bool:
    if block := peer.get("ipBlock"):
        address = ipaddress.ip_address(end.ip)
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(hole) for hole in block.get("except", ())
        )
    if not isinstance(end, Pod):
        return False
    if (spaces := peer.get("namespaceSelector")) is None:
        if end.namespace != own_namespace:
            return False
    elif not _matches(spaces, {"kubernetes.io/metadata.name": end.namespace, **end.namespace_labels}):
        return False
    return _matches(peer.get("podSelector") or {}, end.labels)


def _ports(wanted: Any, port: int, protocol: str, target: End) -> bool:
    """Absent: every port. A name is looked up in the target pod."""
    if not wanted:
        return True
    for one in wanted:
        if one.get("protocol", "TCP") != protocol:
            continue
        first = one.get("port")
        if isinstance(first, str):
            first = target.ports.get(first) if isinstance(target, Pod) else None
            if first is None:
                continue
        if first is None or first <= port <= one.get("endPort", first):
            return True
    return False


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """An empty selector matches everything."""
    if any(labels.get(k) != v for k, v in (selector.get("matchLabels") or {}).items()):
        return False
    for rule in selector.get("matchExpressions") or ():
        value, values = labels.get(rule["key"]), rule.get("values", ())
        holds = {
            "In": value in values, "NotIn": value not in values, "Exists": value is not None, "DoesNotExist": value is None,
        }[rule["operator"]]
        if not holds:
            return False
    return True
