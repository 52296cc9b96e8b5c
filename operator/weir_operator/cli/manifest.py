"""Reading a manifest from a file: one InferenceDeployment, or one sentence about what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import yaml

from weir_operator.api import names
from weir_operator.api.types import InferenceDeployment
from weir_operator.plan.plan import SpecError, parse

Fail = Callable[[str], NoReturn]


def load(file: Path, fail: Fail, mode: str | None = None) -> InferenceDeployment:
    """The file's InferenceDeployment, with `mode` in place of its own. A user's mistake ends in `fail`."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except OSError as e:
        fail(f"cannot read {file}: {e.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        fail(f"{file} is no YAML: {' '.join(str(e).split())}")
    found = [d for d in documents if isinstance(d, dict) and d.get("kind") == names.KIND]
    if len(found) != 1:
        fail(f"{file} must hold one {names.KIND}, it holds {len(found)}")
    [raw] = found
    spec = raw.get("spec")
    if mode is not None and isinstance(spec, dict) and isinstance(tuning := spec.get("tuning") or {}, dict):
        spec["tuning"] = {**tuning, "mode": mode}
    try:
        return parse({"apiVersion": None, "metadata": None, **raw})  # an API server would not guess them either
    except SpecError as e:
        fail(f"{file}: {e}")
