"""How the layers multiply, on the shapes of SmolLM2: values right, and rows without influence on each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_families import tiny_llama
from parity_rows import Row, all_logits, make_runner

from weir_server.exec import runner as exec_runner
from weir_server.exec.runner import LoadedModel, load
from weir_server.exec.step import UnsupportedError
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


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no C compiler was at hand."""

    def absent() -> Any:
        raise UnsupportedError("the C kernels were not built")

    monkeypatch.setattr(exec_runner, "NativeKind", absent)


def loaded_and_right(tmp_path: Path) -> LoadedModel:
    """Load a tiny model and hold its logits against transformers."""
    model, tokens = tiny_llama(), torch.randint(3, 500, (40,)).tolist()
    model.save_pretrained(tmp_path / "m")
    loaded = load(Boot(model=str(tmp_path / "m"), threads=2, cache_dir=str(tmp_path / "c")))
    got = all_logits(make_runner(loaded, "gather"), [Row(tokens, range(2, 9)).work()])
    with torch.inference_mode():
        assert (got - model(torch.tensor([tokens])).logits[0]).abs().max() <= 1e-4
    return loaded


def test_without_kernels_torchs_packed_products_serve(tmp_path: Path, no_kernels: None, caplog: Any) -> None:
    assert "oneDNN" in loaded_and_right(tmp_path).linear
    assert caplog.text.count("matrix products: torch's, because the C kernels were not built") == 1


def test_without_packed_products_the_plain_one_serves(
    tmp_path: Path, no_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "agrees", lambda products, weight: False)
    assert "F.linear" in loaded_and_right(tmp_path).linear


def test_wrong_products_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    class Wrong:
        row_independent = True

        def __call__(self, weight: torch.Tensor) -> linear.Linear:
            return lambda x: x @ weight.T + 0.1

    monkeypatch.setattr(exec_runner, "NativeKind", Wrong)
    assert "oneDNN" in loaded_and_right(tmp_path).linear
    assert "ours differ" in caplog.text


def test_deterministic_refuses_where_it_cannot_be_kept(
    tmp_path: Path, no_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama().save_pretrained(tmp_path / "m")
    boot = Boot(model=str(tmp_path / "m"), threads=2, cache_dir=str(tmp_path / "c"), deterministic=True)
    monkeypatch.setattr(exec_runner, "probe", lambda weights: linear.TorchProducts(False, False, row_independent=False))
    with pytest.raises(ModelError, match="--deterministic"):
        load(boot)
    monkeypatch.setattr(exec_runner, "probe", lambda weights: linear.TorchProducts(False, False, row_independent=True))
    load(boot)


def test_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="bfloat16"):
        load(Boot(model=str(tmp_path), threads=1, dtype="bfloat16"))
