"""Reading manifests from files: InferenceDeployments, or one sentence about what is wrong with one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from weir_operator.api import names
from weir_operator.api.types import InferenceDeployment
from weir_operator.plan.plan import SpecError, parse

Fail = Callable[[str], NoReturn]


def load(file: Path, fail: Fail) -> InferenceDeployment:
    """The file's one InferenceDeployment. A user's mistake ends in `fail`."""
    found = _documents(file, fail)
    if len(found) != 1:
        fail(f"{file} must hold one {names.KIND}, it holds {len(found)}")
    return _typed(file, found[0], fail)


def load_all(files: Sequence[Path], fail: Fail, mode: str | None) -> list[InferenceDeployment]:
    """Every InferenceDeployment of the files, each name once, with `mode` in place of their own."""
    loaded: list[InferenceDeployment] = []
    for file in files:
        found = _documents(file, fail)
        if not found:
            fail(f"{file} holds no {names.KIND}")
        for raw in found:
            spec = raw.get("spec")
            if mode is not None and isinstance(spec, dict) and isinstance(tuning := spec.get("tuning") or {}, dict):
                spec["tuning"] = {**tuning, "mode": mode}
            loaded.append(_typed(file, raw, fail))
            if any(r.metadata.name == loaded[-1].metadata.name for r in loaded[:-1]):
                fail(f"{file}: a second {names.KIND} is called {loaded[-1].metadata.name}")
    return loaded


def _documents(file: Path, fail: Fail) -> list[dict[str, Any]]:
    """The documents of our kind; others are not ours to judge."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except OSError as e:
        fail(f"cannot read {file}: {e.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        fail(f"{file} is no YAML: {' '.join(str(e).split())}")
    return [d for d in documents if isinstance(d, dict) and d.get("kind") == names.KIND]


def _typed(file: Path, raw: dict[str, Any], fail: Fail) -> InferenceDeployment:
    try:
        return parse({"apiVersion": None, "metadata": None, **raw})  # an API server would not guess them either
    except SpecError as e:
        fail(f"{file}: {e}")
