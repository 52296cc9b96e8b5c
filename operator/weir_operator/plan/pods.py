"""The pod template: the server, the download before it, what both mount, and the user's own template over it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from weir_operator.api import names
from weir_operator.api.quantity import parse_duration
from weir_operator.api.types import InferenceDeployment, Spec
from weir_operator.plan.args import server_args
from weir_operator.plan.envelope import with_envelope
from weir_operator.plan.overlay import overlaid
from weir_operator.plan.pin import Pinned
from weir_operator.plan.sources import fetch_args, locate
from weir_server.contract import CONTROL_PORT, HTTP_PORT

START_SECONDS = 600
"""A start may take so long, or the rollout's progress deadline if that is longer: then the start-up probe gives up."""
STATE = "/tmp"
"""An emptyDir: what a server notes there is for itself when it comes back after a kill in the same pod."""
SHORT_DRAIN = 300.0
"""Drains up to this share one grace period, so that changing them restarts nothing."""
GRACE_MARGIN = 30
DEAD_GRACE = 20
"""Of a server that its probes found dead: it has nothing to drain."""
_HARDENED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def selector(resource: InferenceDeployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "weir-server", names.OWNER_LABEL: resource.metadata.name}


def labels(resource: InferenceDeployment) -> dict[str, str]:
    return {**selector(resource), names.MANAGED_LABEL: "true", "app.kubernetes.io/managed-by": names.FIELD_MANAGER}


def containers_of(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All of a pod's, in the order in which they start: as a sidecar the server is an init container."""
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def token_secret_name(resource: InferenceDeployment) -> str:
    """Carries a part of the uid: the Secret is written without ever being read, so its name must not be anybody else's."""
    return f"{resource.metadata.name}-control-{hashlib.sha256(resource.metadata.uid.encode()).hexdigest()[:10]}"


def cache_claim_name(resource: InferenceDeployment) -> str:
    return f"{resource.metadata.name}-models"


def _folder(file: str) -> str:
    return file.rsplit("/", 1)[0]


def _probe(path: str, **timing: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}, **timing}


def _literal(args: list[str]) -> list[str]:
    """The kubelet expands $(NAME)."""
    return [arg.replace("$(", "$$(") for arg in args]


def _base(spec: Spec, pinned: Pinned, name: str, args: list[str], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the server and the download have in common."""
    return {
        "name": name,
        "image": spec.image or pinned.image,
        **({"imagePullPolicy": spec.image_pull_policy} if spec.image_pull_policy else {}),
        "command": ["weir-server"],
        "args": _literal(args),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "securityContext": _HARDENED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *mounts],
    }


def _server(resource: InferenceDeployment, pinned: Pinned) -> dict[str, Any]:
    spec = resource.spec
    args = [
        *server_args(with_envelope(resource), pinned.parallel), f"--port={HTTP_PORT}", f"--control-port={CONTROL_PORT}",
        f"--control-token-file={names.TOKEN_FILE}", f"--boot-file={names.BOOT_FILE}",
        f"--leave-seconds={pinned.leave_seconds}", f"--state-dir={STATE}",
    ]
    mounts = [
        {"name": "boot", "mountPath": _folder(names.BOOT_FILE), "readOnly": True},
        {"name": "token", "mountPath": _folder(names.TOKEN_FILE), "readOnly": True},
    ]
    if spec.auth:
        args.append(f"--api-key-file={names.KEYS_FILE}")
        mounts.append({"name": "keys", "mountPath": _folder(names.KEYS_FILE), "readOnly": True})
    if _model_volume(resource):
        mounts.append({"name": "model", "mountPath": names.MODEL_MOUNT, "readOnly": True})
    dead = {"terminationGracePeriodSeconds": DEAD_GRACE}
    longest_start = int(max(START_SECONDS, parse_duration(spec.rollout.progress_deadline)))
    return {
        **_base(spec, pinned, names.CONTAINER, args, mounts),
        **({"restartPolicy": "Always"} if spec.sidecar else {}),  # of an init container: that makes it a native sidecar
        "ports": [{"name": "http", "containerPort": HTTP_PORT}, {"name": "control", "containerPort": CONTROL_PORT}],
        "startupProbe": _probe("/health", periodSeconds=1, timeoutSeconds=5, failureThreshold=longest_start) | dead,
        "readinessProbe": _probe("/ready", periodSeconds=2, timeoutSeconds=5, failureThreshold=3),
        "livenessProbe": _probe("/health", periodSeconds=10, timeoutSeconds=5, failureThreshold=6) | dead,
    }


def _download(resource: InferenceDeployment, pinned: Pinned) -> list[dict[str, Any]]:
    """The init container that fills the model's volume, or none."""
    model = resource.spec.model
    args = fetch_args(resource.spec)
    if not args:
        return []
    mounts = [{"name": "model", "mountPath": names.MODEL_MOUNT}]
    secret = {"envFrom": [{"secretRef": {"name": model.secret_ref.name}}]} if model.secret_ref else {}
    return [{**_base(resource.spec, pinned, names.DOWNLOADER, args, mounts), **secret}]


def _model_volume(resource: InferenceDeployment) -> dict[str, Any] | None:
    """Where the model lies, if it is not in the image."""
    found, cache = locate(resource.spec), resource.spec.model.cache
    if found.claim:
        return {"persistentVolumeClaim": {"claimName": found.claim, "readOnly": True}}
    if found.image:
        return {"image": {"reference": found.image}}
    if not found.downloaded:
        return None
    if cache is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": cache.claim_name or cache_claim_name(resource)}}


def _volumes(resource: InferenceDeployment) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "boot", "configMap": {"name": f"{resource.metadata.name}-boot"}},
        {"name": "token", "secret": {"secretName": token_secret_name(resource)}},
    ]
    if auth := resource.spec.auth:
        entry = {"key": auth.key, "path": names.KEYS_FILE.rsplit("/", 1)[1]}
        volumes.append({"name": "keys", "secret": {"secretName": auth.secret_ref.name, "items": [entry]}})
    if model := _model_volume(resource):
        volumes.append({"name": "model", **model})
    return volumes


def pod_template(resource: InferenceDeployment, pinned: Pinned) -> dict[str, Any]:
    """The pods. Only what `pin.RESTARTING` names enters, a drain beyond SHORT_DRAIN and a deadline beyond START_SECONDS."""
    spec, server = resource.spec, _server(resource, pinned)
    before = [*_download(resource, pinned), *([server] if spec.sidecar else [])]
    ours = {
        "metadata": {"labels": labels(resource)},
        "spec": {
            "serviceAccountName": resource.metadata.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a Service called `weir` must not become WEIR_PORT
            "terminationGracePeriodSeconds": int(max(SHORT_DRAIN, parse_duration(spec.drain.timeout))) + GRACE_MARGIN,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": pinned.user, "runAsGroup": pinned.user, "fsGroup": pinned.user,
                "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
            },
            **({"initContainers": before} if before else {}),
            **({} if spec.sidecar else {"containers": [server]}),
            "volumes": _volumes(resource),
        },
    }
    return dict(overlaid(ours, spec.template or {}))
