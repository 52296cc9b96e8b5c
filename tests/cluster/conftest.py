"""Fixtures over a real cluster, and the reason why they skip where there is none."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_kit import ROOT, SYSTEM, helm_values, kubectl, program, run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [f"{p} on the PATH or in KUBEBUILDER_ASSETS" for p in ("kubectl", "helm") if not program(p)]
    if not os.environ.get("KUBECONFIG"):
        missing.insert(0, "KUBECONFIG, naming a cluster whose nodes hold the images (hack/images.sh)")
    for item in items:
        if Path(item.fspath).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {'; '.join(missing)}"))


@pytest.fixture
def release() -> Iterator[str]:
    """The chart, installed; uninstalled at the end whatever happened. Gives the release's name."""
    run("helm", "upgrade", "--install", "weir", str(ROOT / "charts" / "weir"), "-n", SYSTEM, "--create-namespace", "--wait",
        "--timeout=120s", *helm_values())
    yield "weir"
    run("helm", "uninstall", "weir", "-n", SYSTEM, "--ignore-not-found", "--wait", "--timeout=120s")


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--timeout=120s")
