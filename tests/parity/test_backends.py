"""The choice of an attention backend: the self-test catches a wrong one, and what cannot serve gives way with one line."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch

from weir_server.contract import FULL, SLIDING
from weir_server.exec import backends, library
from weir_server.exec.cpu import CpuBackend
from weir_server.exec.gather import GatherBackend, GatherOps
from weir_server.exec.pool import KvPool
from weir_server.exec.runner import choose_products
from weir_server.exec.step import UnsupportedError
from weir_server.model.config import DecoderConfig, Rope
from weir_server.model.decoder import Decoder
from weir_server.model.loader import Checkpoint, shapes

pytestmark = pytest.mark.torch

CONFIG = DecoderConfig(
    "llama", hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=512, context=256, rms_eps=1e-5, tied=True,
    layer_types=(FULL, FULL), window=None, ropes={FULL: Rope(10000.0)}, attention_scale=0.25, final_softcap=None,
)  # fmt: skip
HYBRID = dataclasses.replace(
    CONFIG, family="gemma3", layer_types=(SLIDING, SLIDING, FULL), window=512, ropes={FULL: Rope(1e6), SLIDING: Rope(1e4)}
)


def decoder(config: DecoderConfig) -> Decoder:
    """Of random weights, with products of our own where they were built."""
    weights = {name: torch.randn(shape) for name, shape in shapes(config).items()}
    return Decoder(Checkpoint(config, weights, int8=False, mapped=False, key=""), choose_products([weights["embed"]]))


@pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_the_kernels_pass(page_size: int, config: DecoderConfig) -> None:
    try:
        library.load_library()
    except UnsupportedError as e:
        pytest.skip(str(e))
    backends.self_test(CpuBackend, config, page_size)
    assert backends.choose_backend(decoder(config), KvPool(config, page_size, 4)).name == "cpu"


@pytest.mark.parametrize("operation", ["attention", "gated", "add_rms_norm", "pick", "capped"])
def test_a_wrong_operation_is_caught(operation: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(GatherOps, operation)

    def wrong(self: Any, **inputs: Any) -> torch.Tensor:
        out = right(self, **inputs)
        out[-1, -1] += 1e-3
        return out

    class Wrong(GatherBackend):
        name = "wrong"

        def compile(self, forward: Any, width: int) -> Any:
            def within(ops: Any, x: Any) -> Any:
                monkeypatch.setattr(ops, operation, wrong.__get__(ops), raising=True)
                return forward(ops, x)

            return super().compile(within, width)

    with pytest.raises(UnsupportedError, match=r"wrong differs from the oracle by \d\.\de-03"):
        backends.self_test(Wrong, CONFIG, 16)
    monkeypatch.setattr(backends, "CpuBackend", Wrong)
    assert backends.choose_backend(decoder(CONFIG), KvPool(CONFIG, 16, 4)).name == "gather"
    assert caplog.text.count("attention backend: gather, because") == 1


def test_what_the_kernels_cannot_do_goes_to_gather(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, page, says in (({"head_dim": 8}, 16, "head_dim"), ({"ffn": 100}, 16, "ffn"), ({}, 8, "page size")):
        caplog.clear()
        config = dataclasses.replace(CONFIG, **changes)
        assert backends.choose_backend(decoder(config), KvPool(config, page, 4)).name == "gather"
        assert says in caplog.text
    monkeypatch.setattr(library, "__file__", "/nonexistent/library.py")
    caplog.clear()
    assert backends.choose_backend(decoder(CONFIG), KvPool(CONFIG, 16, 4)).name == "gather"
    assert "the C kernels were not built" in caplog.text


def test_kernels_of_another_build_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension left over from other sources would read its arguments from the wrong places."""
    other = type("Other", (ctypes.Structure,), {"_fields_": [*library.Attention._fields_, ("more", ctypes.c_int64)]})
    monkeypatch.setattr(library, "Attention", other)
    with pytest.raises(UnsupportedError, match=r"not built|other sources"):
        library.load_library()


def test_each_instruction_set_agrees_with_the_oracle() -> None:
    """All that this processor has, the one that no processor lacks first."""
    try:
        loaded = library.load_library()
    except UnsupportedError as e:
        pytest.skip(str(e))
    levels = range(loaded.weir_select(2) + 1)

    class Chosen(CpuBackend):
        level = 0

        def compile(self, forward: Any, width: int) -> Any:
            assert loaded.weir_select(self.level) == self.level
            return super().compile(forward, width)

    try:
        for Chosen.level in levels:
            for config in (CONFIG, HYBRID):
                backends.self_test(Chosen, config, 16)
    finally:
        library.load_library()
