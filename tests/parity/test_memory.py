"""Weights that move into huge pages while they are read."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from weir_server.exec.gemm import NativeKind
from weir_server.exec.memory import Arena
from weir_server.exec.step import UnsupportedError

pytestmark = pytest.mark.torch

HUGE = 2 << 20


def huge_bytes() -> int:
    """Of this process, in huge pages."""
    return int(re.search(r"AnonHugePages:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024


def test_tensors_lie_end_to_end_at_cache_lines_and_in_slabs_of_their_own() -> None:
    arena = Arena()
    small, next_, large = arena.empty(1000), arena.empty(17), arena.empty(20 << 20)
    assert next_.data_ptr() - small.data_ptr() == 4032  # 4,000 bytes, to the next line
    assert all(t.data_ptr() % 64 == 0 for t in (small, next_, large))
    for i, t in enumerate((small, next_, large)):
        t.fill_(i)
    assert (small == 0).all() and (next_ == 1).all() and (large == 2).all()


def test_what_is_read_stays_while_it_moves() -> None:
    """Products go on with the same bits; where the kernel has huge pages the weights are in them afterwards."""
    try:
        kind = NativeKind()
    except UnsupportedError as e:
        pytest.skip(str(e))
    linear = kind(torch.randn(4096, 2048, generator=torch.Generator().manual_seed(1)))  # 32 MiB
    x = torch.randn(3, 2048, generator=torch.Generator().manual_seed(2))
    before, moving, held = linear(x), threading.Thread(target=kind.settle), huge_bytes()
    moving.start()
    while moving.is_alive():
        assert torch.equal(linear(x), before)
    assert torch.equal(linear(x), before)
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if offered.exists() and "[never]" not in offered.read_text():
        assert huge_bytes() - held >= 8 * HUGE


def test_what_nobody_wrote_is_not_made_memory_by_moving() -> None:
    arena = Arena()
    kept = arena.empty(HUGE).fill_(1.0)  # 8 MiB of a slab of 64
    held = huge_bytes()
    arena.move()
    assert huge_bytes() - held <= kept.nbytes


def test_a_kernel_that_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.1 there is no such call."""
    monkeypatch.setattr("weir_server.exec.memory._COLLAPSE", 9999)
    arena = Arena()
    kept = arena.empty(2 * HUGE).fill_(3.0)
    arena.move()
    assert (kept == 3.0).all()
