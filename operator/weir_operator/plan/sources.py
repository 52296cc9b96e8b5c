"""Where a model comes from: what has to be mounted, what is downloaded and to where, and what the server is told to serve.

A downloaded model lies below the mount at a path that says where it came from, so that one claim may hold several models and a
changed source never meets the files of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir_operator.api import names
from weir_operator.api.model import Model
from weir_operator.api.types import Spec

DOWNLOADED = ("hf", "s3", "https")


@dataclass(frozen=True, slots=True)
class Located:
    """`path`: what `weir-server serve` gets. `claim` or `image`: what is mounted, where something is."""

    scheme: str
    path: str
    claim: str | None = None
    image: str | None = None

    @property
    def downloaded(self) -> bool:
        return self.scheme in DOWNLOADED


def locate(spec: Spec, root: str = names.MODEL_MOUNT) -> Located:
    """The model of `spec`, with what is mounted or downloaded lying below `root`."""
    scheme, _, rest = spec.model.source.partition("://")
    if scheme == "pvc":
        claim, _, inside = rest.partition("/")
        return Located(scheme, f"{root}/{inside}", claim=claim)
    if scheme == "oci":
        image, _, inside = rest.partition("#")
        return Located(scheme, f"{root}/{inside}".rstrip("/"), image=image)
    if scheme in DOWNLOADED:
        return Located(scheme, f"{root}/{scheme}/{rest}".rstrip("/"))
    return Located(scheme, rest if scheme == "file" else spec.model.source)


def fetch_args(spec: Spec, root: str = names.MODEL_MOUNT) -> list[str]:
    """Arguments of `weir-server` for the download, or none where there is nothing to download."""
    model, found = spec.model, locate(spec, root)
    if not found.downloaded:
        return []
    args = ["fetch", model.source, f"--to={found.path}"]
    if model.endpoint:
        args.append(f"--endpoint={model.endpoint}")
    if model.sha256:
        args.append(f"--sha256={model.sha256}")
    return args


def served_name(model: Model) -> str:
    """The id under /v1/models: as declared; else ORG/NAME of a Hub's repository; else the file's name without `.gguf`."""
    if model.served_name:
        return model.served_name
    scheme, _, rest = model.source.partition("://")
    parts = rest.replace("#", "/").rstrip("/").split("/")
    if scheme == "hf" and len(parts) == 2:
        return "/".join(parts).partition("@")[0]
    if scheme == "oci" and "#" not in rest:
        return parts[-1].partition("@")[0].partition(":")[0]
    return parts[-1].removesuffix(".gguf")
