"""What parity tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the server sets it; before torch is loaded

import torch

from weir_server.exec.memory import Arena
from weir_server.exec.runner import LoadedModel, load
from weir_server.link.messages import Boot


@pytest.fixture(autouse=True)
def watched_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under AddressSanitizer (hack/sanitize.sh) packed weights lie where it sees their ends: it watches no mapping of ours."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        monkeypatch.setattr(Arena, "empty", lambda _, count: torch.empty(count))


@pytest.fixture
def load_dir(tmp_path: Path) -> Callable[..., LoadedModel]:
    """Load a model directory with its cache below the test's own folder."""

    def _load(path: Path, **boot: Any) -> LoadedModel:
        return load(Boot(model=str(path), threads=2, cache_dir=str(tmp_path / "cache"), **boot))

    return _load
