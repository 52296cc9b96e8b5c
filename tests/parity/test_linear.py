"""The choice of how to multiply, on the shapes of SmolLM2's layers: values right, and rows without influence on each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rows import Row, all_logits, make_runner, tiny_llama

from weir_server.exec import runner as exec_runner
from weir_server.exec.runner import load
from weir_server.link.messages import Boot
from weir_server.model import linear
from weir_server.model.files import ModelError

pytestmark = pytest.mark.torch

COUNTS = (1, 2, 3, 5, 8, 13, 16, 31, 64, 130)


@pytest.fixture
def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(out, width, generator=generator) for out, width in ((960, 576), (576, 1536), (3072, 576))]


@pytest.mark.parametrize("hint", [1, 16])
def test_rows_do_not_depend_on_their_number(weights: list[torch.Tensor], hint: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hint of one row oneDNN treats a single row apart (seen on AVX2): then it is padded, or the probe says so."""
    monkeypatch.setattr(linear, "_HINT_ROWS", hint)
    kind = linear.probe(weights)
    if not kind.row_independent:  # then nothing is promised, and it is said
        assert "dependent on" in str(kind)
        weights = []
    for weight in weights:
        multiply, x = kind(weight), torch.randn(130, weight.shape[1])
        whole = multiply(x)
        assert torch.allclose(whole, x @ weight.T, atol=1e-3)
        assert all(torch.equal(multiply(x[:n]), whole[:n]) for n in COUNTS)


def test_the_probe_sees_the_row_counts_that_differ() -> None:
    def odd(counts: set[int]) -> Any:
        return lambda x: x * 2 + (1e-6 if len(x) in counts else 0)

    assert linear._dependent_rows(odd({1}), 576, 40) == {1}
    assert linear._dependent_rows(odd({1, 17}), 576, 40) == {1, 17}
    assert linear._dependent_rows(odd(set()), 576, 40) == set()


def test_without_the_packed_ops_the_plain_product_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "_agrees", lambda weight: False)
    model, tokens = tiny_llama(), torch.randint(3, 500, (40,)).tolist()
    model.save_pretrained(tmp_path / "m")
    loaded = load(Boot(model=str(tmp_path / "m"), threads=2, cache_dir=str(tmp_path / "c")))
    assert "F.linear" in loaded.linear
    got = all_logits(make_runner(loaded, "gather"), [Row(tokens, range(2, 9)).work()])
    with torch.inference_mode():
        assert (got - model(torch.tensor([tokens])).logits[0]).abs().max() <= 1e-4


def test_deterministic_refuses_where_it_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path / "m")
    boot = Boot(model=str(tmp_path / "m"), threads=2, cache_dir=str(tmp_path / "c"), deterministic=True)
    monkeypatch.setattr(exec_runner, "probe", lambda weights: linear.LinearKind(False, False, row_independent=False))
    with pytest.raises(ModelError, match="--deterministic"):
        load(boot)
    monkeypatch.setattr(exec_runner, "probe", lambda weights: linear.LinearKind(False, False, row_independent=True))
    load(boot)


def test_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="bfloat16"):
        load(Boot(model=str(tmp_path), threads=1, dtype="bfloat16"))
