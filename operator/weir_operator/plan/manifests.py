"""The children of one InferenceDeployment, as manifests for server-side apply."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import yaml

from weir_operator.api import names
from weir_operator.api.quantity import parse_duration
from weir_operator.api.types import InferenceDeployment
from weir_operator.plan.args import boot_file, claim, server_args
from weir_operator.plan.overlay import overlaid
from weir_server.contract import CONTROL_PORT, HTTP_PORT

Manifest = dict[str, Any]

START_SECONDS = 600
"""Longest start: the start-up probe gives up after it, and the rollout's progress deadline is as long."""
SHORT_DRAIN = 300.0
"""Drains up to this share one grace period, so that changing them restarts nothing."""
GRACE_MARGIN = 30


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator adds where the spec is silent. `token`: the pods' control token; `image`: the server's image."""

    image: str
    token: str


def token_secret_name(resource: InferenceDeployment) -> str:
    """Carries a part of the uid: the Secret is written without ever being read, so its name must not be anybody else's."""
    return f"{resource.metadata.name}-control-{hashlib.sha256(resource.metadata.uid.encode()).hexdigest()[:10]}"


def selector(resource: InferenceDeployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "weir-server", names.OWNER_LABEL: resource.metadata.name}


def _labels(resource: InferenceDeployment) -> dict[str, str]:
    return {**selector(resource), names.MANAGED_LABEL: "true", "app.kubernetes.io/managed-by": names.FIELD_MANAGER}


def _child(resource: InferenceDeployment, api_version: str, kind: str, name: str, **content: Any) -> Manifest:
    meta = resource.metadata
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": meta.namespace,
            "labels": _labels(resource),
            "ownerReferences": [
                {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": meta.name, "uid": meta.uid, "controller": True},
            ],
        },
        **content,
    }


def _probe(path: str, **timing: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}, **timing}


def _container(resource: InferenceDeployment, defaults: Defaults) -> dict[str, Any]:
    spec = resource.spec
    args = [
        *server_args(spec),
        f"--port={HTTP_PORT}",
        f"--control-port={CONTROL_PORT}",
        f"--control-token-file={names.TOKEN_FILE}",
        f"--boot-file={names.BOOT_FILE}",
    ]
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "boot", "mountPath": names.BOOT_FILE.rsplit("/", 1)[0], "readOnly": True},
        {"name": "token", "mountPath": names.TOKEN_FILE.rsplit("/", 1)[0], "readOnly": True},
    ]
    if claim(spec):
        mounts.append({"name": "model", "mountPath": names.MODEL_MOUNT, "readOnly": True})
    return {
        "name": names.CONTAINER,
        "image": spec.image or defaults.image,
        **({"imagePullPolicy": spec.image_pull_policy} if spec.image_pull_policy else {}),
        "command": ["weir-server"],
        "args": [arg.replace("$(", "$$(") for arg in args],  # the kubelet expands $(NAME)
        "env": [{"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}, {"name": "control", "containerPort": CONTROL_PORT}],
        "startupProbe": _probe("/health", periodSeconds=1, timeoutSeconds=5, failureThreshold=START_SECONDS),
        "readinessProbe": _probe("/ready", periodSeconds=2, timeoutSeconds=5, failureThreshold=3),
        "livenessProbe": _probe("/health", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def pod_template(resource: InferenceDeployment, defaults: Defaults) -> dict[str, Any]:
    """The pods. Only model, engine, image and template enter (and a drain beyond SHORT_DRAIN): nothing else restarts them."""
    spec = resource.spec
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "boot", "configMap": {"name": f"{resource.metadata.name}-boot"}},
        {"name": "token", "secret": {"secretName": token_secret_name(resource)}},
    ]
    if name := claim(spec):
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": name, "readOnly": True}})
    ours = {
        "metadata": {"labels": _labels(resource)},
        "spec": {
            "serviceAccountName": resource.metadata.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a Service called `weir` must not become WEIR_PORT
            "terminationGracePeriodSeconds": int(max(SHORT_DRAIN, parse_duration(spec.drain.timeout))) + GRACE_MARGIN,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [_container(resource, defaults)],
            "volumes": volumes,
        },
    }
    return dict(overlaid(ours, spec.template or {}))


def children(resource: InferenceDeployment, defaults: Defaults) -> list[Manifest]:
    """All children, in the order in which they are applied: what pods mount comes before the pods."""
    meta, spec = resource.metadata, resource.spec
    deployment = _child(resource, "apps/v1", "Deployment", meta.name, spec={
        "replicas": spec.replicas,
        "selector": {"matchLabels": selector(resource)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": START_SECONDS,
        "template": pod_template(resource, defaults),
    })
    declared = spec.model_dump(by_alias=True, exclude_unset=True, mode="json")
    deployment["metadata"]["annotations"] = {names.SPEC_ANNOTATION: json.dumps(declared, sort_keys=True)}
    boot = yaml.safe_dump(boot_file(spec), sort_keys=True)
    token = base64.b64encode(defaults.token.encode()).decode()
    return [
        _child(resource, "v1", "ServiceAccount", meta.name, automountServiceAccountToken=False),
        _child(resource, "v1", "Secret", token_secret_name(resource), type="Opaque", data={"token": token}),
        _child(resource, "v1", "ConfigMap", f"{meta.name}-boot", data={names.BOOT_FILE.rsplit("/", 1)[1]: boot}),
        _child(resource, "v1", "Service", meta.name, spec={
            "selector": selector(resource),
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}],
        }),
        deployment,
    ]
