"""Models that are not on this machine yet: downloaded by the very command that is the init container in a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from weir_operator.api.types import InferenceDeployment
from weir_operator.io.processes import run_to_end
from weir_operator.plan.sources import fetch_args, locate

HERE = "here write hf://, https://, s3://, file:///PATH or package://DISTRIBUTION/FILE"


def models_folder() -> Path:
    """Where downloads are kept for the next time: in this user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "weir", "models").absolute()


def refuse_absent(resources: Sequence[InferenceDeployment], fail: Callable[[str], NoReturn]) -> None:
    """What only a cluster can mount ends in `fail`."""
    for resource in resources:
        found = locate(resource.spec)
        if found.claim or found.image:
            fail(f"{resource.metadata.name}: spec.model.source: a {found.scheme}:// source needs a cluster; {HERE}")


def fetch_models(resources: Sequence[InferenceDeployment], folder: Path) -> None:
    """Have the models of all below `folder`. Raises WrongInput with the download's own sentence."""
    for resource in resources:
        if not (args := fetch_args(resource.spec, str(folder))):
            continue
        if secret := resource.spec.model.secret_ref:
            said = f"Secret {secret.name} is not here: what the download needs of it comes from the environment"
            print(f"{resource.metadata.name}: {said}", flush=True)
        run_to_end(args)
