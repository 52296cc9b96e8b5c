"""Every name by which Weir is known to Kubernetes."""

from __future__ import annotations

GROUP = "weir.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceDeployment"
PLURAL = "inferencedeployments"
SINGULAR = "inferencedeployment"
SHORT_NAMES = ("infd", "idep")
CRD_NAME = f"{PLURAL}.{GROUP}"

FIELD_MANAGER = "weir-operator"
LEASE_NAME = "weir-operator"
"""Unless told otherwise. All processes that share a Lease are one operator: two in one namespace need one each."""
MANAGED_LABEL = f"{GROUP}/managed"
MANAGED_SELECTOR = f"{MANAGED_LABEL}=true"
OWNER_LABEL = f"{GROUP}/name"
SPEC_ANNOTATION = f"{GROUP}/spec"
"""On the Deployment, which hands it to its ReplicaSets: the spec that their pods were made from."""

CONTAINER = "server"
"""Our container in the pod template; an overlay addresses it by this name."""
DOWNLOADER = "fetch"
"""The init container that downloads the model."""

HANDOFF_MANAGER = "weir-handoff"
"""Keeps the number of pods between our letting go of it and an autoscaler's taking it up."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""By which a ReplicaSet chooses among pods that serve: the cheapest ends first, and one without it costs 0."""
CHEAP = "-1000"
UPGRADE_ANNOTATION = f"{GROUP}/upgrade"
PINNED_ANNOTATION = f"{GROUP}/pinned"

OPTIONAL_KINDS = {
    "PodMonitor": ("monitoring.coreos.com/v1", "podmonitors"),
    "ScaledObject": ("keda.sh/v1alpha1", "scaledobjects"),
}
"""Kinds that a cluster may lack, and that come and go: group and version, plural."""

TOKEN_FILE = "/run/weir/token/token"
KEYS_FILE = "/run/weir/keys/keys"
BOOT_FILE = "/etc/weir/boot.yaml"
MODEL_MOUNT = "/models"
