"""The children of one InferenceDeployment, as manifests for server-side apply."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from weir_operator.api import names
from weir_operator.api.quantity import parse_duration
from weir_operator.api.types import InferenceDeployment
from weir_operator.plan import pin
from weir_operator.plan.args import boot_file
from weir_operator.plan.observed import Observed
from weir_operator.plan.pods import cache_claim_name, labels, pod_template, selector, token_secret_name
from weir_operator.plan.replicas import external, wanted_replicas
from weir_operator.plan.sources import locate
from weir_server.contract import CONTROL_PORT, HTTP_PORT

Manifest = dict[str, Any]
NOTHING_SEEN = Observed()
KEPT = ("ServiceAccount", "Secret", "ConfigMap", "Deployment")
"""Kinds of which there is always one: all others may be asked for and not asked for, and are deleted then."""
BEFORE_PODS = ("ServiceAccount", "Secret", "ConfigMap", "PersistentVolumeClaim", "NetworkPolicy")
"""What pods stand on, and what guards them: no pod is made while one of these is refused."""
BESIDE_PODS = ("PodDisruptionBudget", "HorizontalPodAutoscaler", *names.OPTIONAL_KINDS)
"""What pods serve as well without."""
WAITING_METRIC = "weir_requests_waiting"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator adds where the spec is silent. `token`: the pods' control token; `image`: the server's image;
    `operator_namespace`: from where the control port is reached."""

    image: str
    token: str
    operator_namespace: str = "weir-system"

    @property
    def pinned(self) -> pin.Pinned:
        """What new pods get."""
        return pin.Pinned(self.image)


def _child(resource: InferenceDeployment, api_version: str, kind: str, name: str, **content: Any) -> Manifest:
    meta = resource.metadata
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": meta.name, "uid": meta.uid, "controller": True}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": name, "namespace": meta.namespace, "labels": labels(resource), "ownerReferences": [owner]},
        **content,
    }


def _deployment(resource: InferenceDeployment, defaults: Defaults, seen: Observed) -> Manifest:
    """`replicas` is left out only once the Deployment is there and somebody else's: one that is made has to begin somewhere."""
    spec, rollout = resource.spec, resource.spec.rollout
    pinned = pin.in_force(resource, seen.deployment, defaults.pinned)
    ours = seen.deployment is None or not external(resource, seen)
    found = _child(resource, "apps/v1", "Deployment", resource.metadata.name, spec={
        **({"replicas": wanted_replicas(resource, seen)} if ours else {}),
        "selector": {"matchLabels": selector(resource)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        "progressDeadlineSeconds": max(1, int(parse_duration(spec.rollout.progress_deadline))),
        "template": pod_template(resource, pinned),
    })
    declared = spec.model_dump(by_alias=True, exclude_unset=True, mode="json")
    kept = {names.SPEC_ANNOTATION: json.dumps(declared, sort_keys=True)}
    found["metadata"]["annotations"] = {**pin.annotation(resource, pinned), **kept}
    return found


def _services(resource: InferenceDeployment) -> Iterator[Manifest]:
    name, service = resource.metadata.name, resource.spec.service
    port = {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    front = _child(resource, "v1", "Service", name, spec={
        "type": service.type, "selector": selector(resource), "ports": [port],
    })
    if service.annotations:
        front["metadata"]["annotations"] = service.annotations
    yield front
    if service.headless:
        yield _child(resource, "v1", "Service", f"{name}-pods", spec={
            "clusterIP": "None", "selector": selector(resource), "ports": [{**port, "port": HTTP_PORT}],
        })


def _network_policy(resource: InferenceDeployment, defaults: Defaults) -> Iterator[Manifest]:
    policy = resource.spec.network_policy
    if not policy.enabled:
        return
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": defaults.operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
    }
    clients = {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}], **({"from": policy.clients} if policy.clients else {})}
    yield _child(resource, "networking.k8s.io/v1", "NetworkPolicy", resource.metadata.name, spec={
        "podSelector": {"matchLabels": selector(resource)},
        "policyTypes": ["Ingress"],
        "ingress": [clients, {"ports": [{"port": CONTROL_PORT, "protocol": "TCP"}], "from": [operator]}],
    })


def _disruption_budget(resource: InferenceDeployment) -> Iterator[Manifest]:
    """Of a single pod, "one at a time" says nothing."""
    most = resource.spec.disruption.max_unavailable
    single = resource.spec.autoscaling.mode == "Disabled" and resource.spec.replicas <= 1
    if single and most == 1:
        return
    yield _child(resource, "policy/v1", "PodDisruptionBudget", resource.metadata.name, spec={
        "maxUnavailable": most, "selector": {"matchLabels": selector(resource)}, "unhealthyPodEvictionPolicy": "AlwaysAllow",
    })


def _cache_claim(resource: InferenceDeployment) -> Iterator[Manifest]:
    cache = resource.spec.model.cache
    if cache is None or cache.size is None or not locate(resource.spec).downloaded:
        return
    claim = _child(resource, "v1", "PersistentVolumeClaim", cache_claim_name(resource), spec={
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size}},
        **({"storageClassName": cache.storage_class_name} if cache.storage_class_name else {}),
    })
    if cache.reclaim_policy == "Retain":
        del claim["metadata"]["ownerReferences"]
    yield claim


def _scaler(resource: InferenceDeployment) -> Iterator[Manifest]:
    wish, name, namespace = resource.spec.autoscaling, resource.metadata.name, resource.metadata.namespace
    behavior = {"scaleDown": {"stabilizationWindowSeconds": int(parse_duration(wish.scale_down_stabilization))}}
    if wish.scaler == "HorizontalPodAutoscaler":
        target = {"type": "AverageValue", "averageValue": str(wish.waiting_per_pod)}
        yield _child(resource, "autoscaling/v2", "HorizontalPodAutoscaler", name, spec={
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": wish.min_replicas, "maxReplicas": wish.max_replicas, "behavior": behavior,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": WAITING_METRIC}, "target": target}}],
        })
    if wish.scaler == "ScaledObject":
        query = f'sum({WAITING_METRIC}{{namespace="{namespace}",pod=~"{name}-[a-z0-9]+-[a-z0-9]+"}})'
        metadata = {"serverAddress": wish.prometheus, "query": query, "threshold": str(wish.waiting_per_pod)}
        yield _child(resource, "keda.sh/v1alpha1", "ScaledObject", name, spec={
            "scaleTargetRef": {"name": name}, "minReplicaCount": wish.min_replicas, "maxReplicaCount": wish.max_replicas,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [{"type": "prometheus", "metadata": metadata}],
        })


def _pod_monitor(resource: InferenceDeployment) -> Iterator[Manifest]:
    wish = resource.spec.monitoring
    if not wish.pod_monitor:
        return
    found = _child(resource, "monitoring.coreos.com/v1", "PodMonitor", resource.metadata.name, spec={
        "selector": {"matchLabels": selector(resource)},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": wish.interval}],
    })
    found["metadata"]["labels"] = {**wish.labels, **found["metadata"]["labels"]}
    yield found


def children(resource: InferenceDeployment, defaults: Defaults, seen: Observed = NOTHING_SEEN) -> list[Manifest]:
    """All children, in the order in which they are applied: what pods mount comes before the pods, what reads them after. Those
    of a kind that the cluster lacks are left out."""
    meta = resource.metadata
    boot = yaml.safe_dump(boot_file(resource.spec), sort_keys=True)
    token = base64.b64encode(defaults.token.encode()).decode()
    found = [
        _child(resource, "v1", "ServiceAccount", meta.name, automountServiceAccountToken=False),
        _child(resource, "v1", "Secret", token_secret_name(resource), type="Opaque", data={"token": token}),
        _child(resource, "v1", "ConfigMap", f"{meta.name}-boot", data={names.BOOT_FILE.rsplit("/", 1)[1]: boot}),
        *_cache_claim(resource),
        *_services(resource),
        *_network_policy(resource, defaults),
        _deployment(resource, defaults, seen),
        *_disruption_budget(resource),
        *_scaler(resource),
        *_pod_monitor(resource),
    ]
    return [m for m in found if m["kind"] not in names.OPTIONAL_KINDS or m["kind"] in seen.kinds]


def missing_kinds(resource: InferenceDeployment, seen: Observed) -> list[str]:
    """Kinds that are asked for and that the cluster lacks."""
    asked = {m["kind"] for m in (*_scaler(resource), *_pod_monitor(resource))}
    return sorted(kind for kind in asked if kind in names.OPTIONAL_KINDS and kind not in seen.kinds)
