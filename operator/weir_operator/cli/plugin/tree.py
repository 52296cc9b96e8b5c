"""`kubectl infd status`: a resource, its conditions, and its children with their health, as a tree."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text
from rich.tree import Tree

from weir_operator.api import names
from weir_operator.cli.plugin.api import Api
from weir_operator.cli.plugin.texts import knobs_text, tuning_of
from weir_operator.io.apply import utc_now
from weir_operator.io.kube import ApiError
from weir_operator.loops.store import CHILD_KINDS
from weir_operator.plan.trouble import containers, is_over, is_ready, pod_trouble

SHOWN_KINDS = (*CHILD_KINDS, *names.OPTIONAL_KINDS, "Pod")
"""Pods come after the Deployment that they hang from."""
GOOD_WHEN_FALSE = {"Degraded", "Saturated", "Paused", "KnobsUnsupported", "Contested", "Progressing", "AutoscalerOwned"}
NEUTRAL = {"Progressing", "AutoscalerOwned", "Tuned", "Paused"}
_DOT = {True: ("●", "green"), False: ("○", "red"), None: ("◌", "yellow")}


@dataclass(frozen=True, slots=True)
class Child:
    """`healthy` None: it has no health of its own, or it is on its way."""

    kind: str
    name: str
    healthy: bool | None
    detail: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "healthy": self.healthy, "detail": self.detail}


async def children(api: Api, raw: Mapping[str, Any]) -> list[Child]:
    """Of the kinds that this user may list; what belongs to the resource is known by its label."""
    meta, pods = raw["metadata"], tuning_of(raw).get("pods", ())
    told = {pod["name"]: pod for pod in pods}

    async def listed(kind: str) -> list[dict[str, Any]]:
        try:
            return await api.list(kind, meta["namespace"], f"{names.OWNER_LABEL}={meta['name']}")
        except ApiError:
            return []

    found = await asyncio.gather(*(listed(kind) for kind in SHOWN_KINDS))
    return [_child(kind, obj, told) for kind, objects in zip(SHOWN_KINDS, found, strict=True) for obj in objects]


def _child(kind: str, obj: Mapping[str, Any], told: Mapping[str, Mapping[str, Any]]) -> Child:
    name, status = obj["metadata"]["name"], obj.get("status") or {}
    if kind == "Deployment":
        wanted, ready = obj["spec"].get("replicas", 1), status.get("readyReplicas", 0)
        updated = status.get("updatedReplicas", 0)
        return Child(kind, name, ready >= wanted, f"{ready} of {wanted} ready, {updated} of the present template")
    if kind == "Pod":
        return _pod(obj, told.get(name, {}))
    if kind == "PersistentVolumeClaim":
        return Child(kind, name, status.get("phase") == "Bound", str(status.get("phase", "")))
    return Child(kind, name, None, "")


def _pod(pod: Mapping[str, Any], told: Mapping[str, Any]) -> Child:
    ready = is_ready(pod)
    parts = ["ends" if pod["metadata"].get("deletionTimestamp") else "ready" if ready else _trouble(pod)]
    if restarts := sum(c.get("restartCount", 0) for c in containers(pod)):
        parts.append(f"{restarts} restarts")
    if node := pod["spec"].get("nodeName"):
        parts.append(f"on {node}")
    if told.get("knobs"):
        parts.append(knobs_text(told["knobs"]))
        parts.append(told.get("outcome", "no decision yet"))
    return Child("Pod", pod["metadata"]["name"], None if is_over(pod) else ready, " · ".join(parts))


def _trouble(pod: Mapping[str, Any]) -> str:
    """Why a pod is not ready, as its own status has it."""
    if found := pod_trouble(pod, utc_now()):
        return f"{found[0]}: {found[1]}"
    status = pod.get("status") or {}
    if status.get("message"):  # it was evicted, or its node was shut down
        return f"{status.get('reason', status.get('phase'))}: {status['message']}"
    waiting = (c.get("state", {}).get("waiting") or {} for c in containers(pod))
    return f"not ready ({next((w['reason'] for w in waiting if w.get('reason')), status.get('phase', 'unknown'))})"


def tree(raw: Mapping[str, Any], found: Sequence[Child]) -> Tree:
    """For a terminal or a pipe; colours are the console's affair."""
    status, meta = raw.get("status") or {}, raw["metadata"]
    wanted = status.get("desiredReplicas", raw["spec"].get("replicas", 0))
    head = f"{meta['namespace']}/{meta['name']}  {status.get('readyReplicas', 0)}/{wanted} ready"
    root = Tree(Text(head, style="bold"), guide_style="dim")
    if status.get("url"):
        root.add(Text(f"{status['url']}  model {status.get('model', '')}"))
    if not status:
        root.add(Text("no status yet: does the operator run?", style="yellow"))
    for c in status.get("conditions", ()):
        truth = {"True": True, "False": False}.get(c["status"])
        good = None if truth is None or c["type"] in NEUTRAL else truth != (c["type"] in GOOD_WHEN_FALSE)
        dot, _ = _DOT[truth]
        root.add(Text.assemble((dot, _DOT[good][1]), f" {c['type']}: {c['reason']} – {c['message']}"))
    deployments: dict[str, Tree] = {}
    for child in found:
        dot, colour = _DOT[child.healthy] if child.healthy is not None or child.kind == "Pod" else ("·", "dim")
        text = Text.assemble((dot, colour), f" {child.kind} {child.name}  {child.detail}".rstrip())
        parent = next(iter(deployments.values()), root) if child.kind == "Pod" else root
        branch = parent.add(text)
        if child.kind == "Deployment":
            deployments[child.name] = branch
    return root
