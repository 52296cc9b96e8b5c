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
MANAGED_LABEL = f"{GROUP}/managed"
MANAGED_SELECTOR = f"{MANAGED_LABEL}=true"
OWNER_LABEL = f"{GROUP}/name"
SPEC_ANNOTATION = f"{GROUP}/spec"
"""On the Deployment, which hands it to its ReplicaSets: the spec that their pods were made from."""

CONTAINER = "server"
"""Our container in the pod template; an overlay addresses it by this name."""

TOKEN_FILE = "/run/weir/token/token"
BOOT_FILE = "/etc/weir/boot.yaml"
MODEL_MOUNT = "/models"
