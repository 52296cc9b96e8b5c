"""Programs that the chart's tests use, and the chart as they render it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__ = ["ASSETS", "CHART", "HELMS", "ROOT", "call", "generate", "kinds", "needed", "one", "program", "render"]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/weir"
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
sys.path.insert(0, str(ROOT / "hack"))

import generate  # noqa: E402


def program(name: str) -> str | None:
    """A program of the PATH, else of KUBEBUILDER_ASSETS."""
    return shutil.which(name) or (shutil.which(name, path=ASSETS) if ASSETS else None)


def needed(name: str) -> str:
    """The same, or the test is skipped."""
    return program(name) or pytest.skip(f"no {name} on PATH or in KUBEBUILDER_ASSETS")


def call(command: str, *args: str, check: bool = True, text: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([command, *args], input=text, capture_output=True, text=True, timeout=120, check=False)
    assert not check or done.returncode == 0, done.stderr or done.stdout
    return done


HELMS = [found for name in ("helm", "helm3") if (found := program(name))]


def render(helm: str, *args: str, chart: Path = CHART, namespace: str = "weir-system") -> list[dict[str, Any]]:
    """What `helm template` makes of the chart, without hooks of `helm test`."""
    done = call(helm, "template", "weir", str(chart), "-n", namespace, "--kube-version=1.36.0", "--skip-tests", *args)
    return [m for m in yaml.safe_load_all(done.stdout) if m]


def kinds(manifests: list[dict[str, Any]]) -> list[str]:
    return sorted(m["kind"] for m in manifests)


def one(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [m for m in manifests if m["kind"] == kind]
    return found
