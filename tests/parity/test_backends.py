"""The choice of an attention backend: the self-test catches a wrong one, and what cannot serve gives way with one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from weir_server.exec import backends, cpu
from weir_server.exec.cpu import CpuBackend, CpuOps
from weir_server.exec.gather import GatherBackend, GatherOps
from weir_server.exec.pool import KvPool
from weir_server.exec.step import UnsupportedError
from weir_server.model.config import DecoderConfig

pytestmark = pytest.mark.torch

CONFIG = DecoderConfig("llama", 2, 64, 4, 2, 16, 96, 512, 256, 1e-5, 10000.0, (), True)


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_the_kernels_pass(page_size: int) -> None:
    try:
        cpu.load_library()
    except UnsupportedError as e:
        pytest.skip(str(e))
    backends.self_test(CpuBackend, CONFIG, page_size)
    assert backends.choose_backend(CONFIG, KvPool(CONFIG, page_size, 4)).name == "cpu"


@pytest.mark.parametrize("operation", ["attention", "silu_mul", "add_rms_norm"])
def test_a_wrong_operation_is_caught(operation: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(GatherOps, operation)

    def wrong(self: Any, **inputs: Any) -> torch.Tensor:
        out = right(self, **inputs)
        out[-1, -1] += 1e-3
        return out

    class Wrong(GatherBackend):
        name = "wrong"

        def bind(self, step: Any) -> Any:
            ops = super().bind(step)
            monkeypatch.setattr(ops, operation, wrong.__get__(ops), raising=True)
            return ops

    with pytest.raises(UnsupportedError, match=r"wrong differs from the oracle by 1\.0e-03"):
        backends.self_test(Wrong, CONFIG, 16)
    monkeypatch.setattr(backends, "CpuBackend", Wrong)
    assert backends.choose_backend(CONFIG, KvPool(CONFIG, 16, 4)).name == "gather"
    assert caplog.text.count("attention backend: gather, because") == 1


def test_what_the_kernels_cannot_do_goes_to_gather(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, page, says in (({"head_dim": 8}, 16, "head_dim"), ({"ffn": 100}, 16, "ffn"), ({}, 8, "page size")):
        caplog.clear()
        config = dataclasses.replace(CONFIG, **changes)
        assert backends.choose_backend(config, KvPool(config, page, 4)).name == "gather"
        assert says in caplog.text
    monkeypatch.setattr(cpu, "__file__", "/nonexistent/cpu.py")
    caplog.clear()
    assert backends.choose_backend(CONFIG, KvPool(CONFIG, 16, 4)).name == "gather"
    assert "the C kernels were not built" in caplog.text


def test_each_instruction_set_agrees_with_the_oracle() -> None:
    """All that this processor has, the one that no processor lacks first."""
    try:
        library = cpu.load_library()
    except UnsupportedError as e:
        pytest.skip(str(e))
    levels = range(library.weir_select(2) + 1)

    class Chosen(CpuBackend):
        level = 0

        def bind(self, step: Any) -> CpuOps:
            assert library.weir_select(self.level) == self.level
            return super().bind(step)

    try:
        for Chosen.level in levels:
            backends.self_test(Chosen, CONFIG, 16)
    finally:
        cpu.load_library()
