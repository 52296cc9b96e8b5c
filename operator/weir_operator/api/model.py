"""The model: where it comes from, where a download is kept, and how it is named to clients."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from weir_operator.api.scalars import Name, Part, Quantity, Rule, Source, rules

_DOWNLOADED = "(hf|s3|https)://"
_STORED = "is for sources that are downloaded: hf://, s3:// and https://"


def _downloaded_only(field: str) -> Rule:
    return f"!has(self.{field}) || self.source.matches('^{_DOWNLOADED}')", f"{field} {_STORED}"


_ONE_CLAIM = "give either size, for a claim of the operator's, or claimName, for one of yours"
_WHOSE_CLASS = "storageClassName is of the claim that the operator makes: give size too"


class Cache(Part):
    """Where a downloaded model is kept, so that it is downloaded once and shared by the pods."""

    model_config = {"json_schema_extra": rules(
        ("has(self.size) != has(self.claimName)", _ONE_CLAIM), ("has(self.size) || !has(self.storageClassName)", _WHOSE_CLASS),
    )}

    size: Quantity | None = None
    """Size of a PersistentVolumeClaim that the operator makes, called NAME-models."""
    claim_name: Name | None = None
    """A PersistentVolumeClaim of yours, in place of the operator's."""
    storage_class_name: Name | None = None
    """Storage class of the operator's claim. Default: the cluster's."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = "ReadWriteOnce"
    """Of the operator's claim. ReadWriteOnce keeps all pods on one node; ReadWriteMany needs storage that can do it."""
    reclaim_policy: Literal["Retain", "Delete"] = "Retain"
    """What becomes of the operator's claim when this resource is deleted. A retained one is taken up again by a resource of the
    same name."""

    @model_validator(mode="after")
    def _one_of(self) -> Any:
        if (self.size is None) == (self.claim_name is None):
            raise ValueError(_ONE_CLAIM)
        if self.size is None and self.storage_class_name is not None:
            raise ValueError(_WHOSE_CLASS)
        return self


class SecretRef(Part):
    """A Secret in the same namespace."""

    name: Name
    """Its name."""


class Model(Part):
    """The model and how it is named to clients."""

    model_config = {"json_schema_extra": rules(
        *(_downloaded_only(field) for field in ("endpoint", "sha256", "secretRef", "cache")),
        (
            "!has(self.sha256) || !self.source.startsWith('hf://') || self.source.split('/').size() > 4",
            "sha256 is of one file: name it in the source, hf://ORG/NAME/FILE",
        ),
    )}

    source: Source
    """Where the weights are: `hf://ORG/NAME[@REVISION][/FILE]` (a repository of a Hugging Face Hub, or one GGUF file of it),
    `pvc://CLAIM/PATH` (on a PersistentVolumeClaim), `file:///PATH` (in the container), `package://DISTRIBUTION/FILE` (a file of
    a Python distribution in the image), `oci://IMAGE[#PATH]` (in an image that is mounted as a volume; Kubernetes 1.33 or
    later), `s3://BUCKET/KEY` (an object, or a folder if KEY ends with a slash) or `https://HOST/FILE`. A path is a GGUF file or
    a directory in the Hugging Face layout. What is downloaded is downloaded by an init container, checked, and kept in
    `model.cache`."""
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The id under /v1/models, byte for byte. Default: the file's name, or ORG/NAME of a Hub's repository."""
    max_model_len: Annotated[int, Field(ge=512, le=2_000_000)] | None = None
    """Longest prompt plus answer of one row, in tokens. Default: what the model was trained for."""
    quantization: Literal["auto", "int8", "none"] | None = None
    """How weights are held: `int8` (8 bits, a quarter of the memory), `none` (float32), or `auto`, the default (8 bits where
    the file's own weights are that, to the bit; else float32)."""
    dtype: Literal["float32"] | None = None
    """Type that the weights are computed in. The server has this one; others are refused here until it serves them."""
    endpoint: Annotated[str, Field(max_length=512, pattern="^https?://[^/ ]+(/[^ ]*)?$")] | None = None
    """Another Hub than huggingface.co for hf:// (as HF_ENDPOINT), or another service than AWS for s3://."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Checksum that a downloaded file must have. A Hub's own checksums are always checked."""
    secret_ref: SecretRef | None = None
    """A Secret whose keys become the environment of the download: HF_TOKEN for hf://; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_REGION and AWS_SESSION_TOKEN for s3://; BEARER_TOKEN for https://."""
    cache: Cache | None = None
    """Where a download is kept. Without it each pod downloads into a folder of its own that ends with it."""

    @model_validator(mode="after")
    def _only_for_downloads(self) -> Any:
        given = {"endpoint": self.endpoint, "sha256": self.sha256, "secretRef": self.secret_ref, "cache": self.cache}
        for name, value in given.items():
            if value is not None and not re.match(_DOWNLOADED, self.source):
                raise ValueError(f"{name} {_STORED}")
        if self.sha256 and self.source.startswith("hf://") and self.source.count("/") < 4:
            raise ValueError("sha256 is of one file: name it in the source, hf://ORG/NAME/FILE")
        return self
