"""Weights from GGUF files, and the cache of them on disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from parity_families import tiny_llama
from parity_gguf import write_gguf
from parity_rows import Row, all_logits, make_runner

from weir_server.exec.runner import load
from weir_server.link.messages import Boot
from weir_server.model import loader
from weir_server.model.files import ModelError
from weir_server.model.int8 import dense

pytestmark = pytest.mark.torch

@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_of_a_gguf_file(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", model, kind=GGMLQuantizationType[kind])
    tokens = torch.randint(3, 500, (40,)).tolist()
    loaded = load(Boot(model=str(tmp_path / "m.gguf"), threads=2, cache_dir=str(tmp_path / "cache")))
    got = all_logits(make_runner(loaded, "gather"), [Row(tokens, range(2, 9)).work()])
    with torch.inference_mode():
        assert (got - model(torch.tensor([tokens])).logits[0]).abs().max() <= 1e-4


def test_gguf_files_that_do_not_fit_name_what_is_wrong(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"drop": "blk.1.ffn_up.weight"}, r"no tensor blk\.1\.ffn_up\.weight"),
        ({"extra": "blk.0.attn_q.bias"}, r"attn_q\.bias"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention__sliding_window": 128}, "sliding_window"),
        ({"feed_forward_length": 64}, r"ffn_gate\.weight"),
        ({"rope__dimension_count": 8}, "dimension_count"),
    ]
    for i, (changes, named) in enumerate(cases):
        path = tmp_path / f"{i}.gguf"
        write_gguf(path, tiny_llama(), **changes)
        with pytest.raises(ModelError, match=named):
            loader.load_checkpoint(path, str(tmp_path / "cache"))


# ---------------------------------------------------------------- the cache

@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "m.gguf", tiny_llama(), kind=GGMLQuantizationType.Q8_0)
    return tmp_path / "m.gguf"


def same(a: loader.Checkpoint, b: loader.Checkpoint) -> bool:
    return a.config == b.config and all(torch.equal(dense(w), dense(b.weights[n])) for n, w in a.weights.items())


def test_second_load_reads_the_cache_alone(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loader.load_checkpoint(gguf, str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "_fused", None)
    second = loader.load_checkpoint(gguf, str(tmp_path / "cache"))
    assert second.mapped
    assert same(first, second)
    assert [f.suffix for f in (tmp_path / "cache").iterdir()] == [".safetensors"]


def test_another_source_file_is_another_cache(gguf: Path, tmp_path: Path) -> None:
    first = loader.load_checkpoint(gguf, str(tmp_path / "cache"))
    write_gguf(gguf, tiny_llama(seed=5), kind=GGMLQuantizationType.Q8_0)
    os.utime(gguf, ns=(1, 1))
    second = loader.load_checkpoint(gguf, str(tmp_path / "cache"))
    assert not same(first, second)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_cache_is_written_again(gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = loader.load_checkpoint(gguf, str(tmp_path / "cache"))
    (cached,) = (tmp_path / "cache").iterdir()
    whole = cached.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], b"x" * 200):
        cached.unlink()
        cached.write_bytes(damaged)
        caplog.clear()
        assert same(first, loader.load_checkpoint(gguf, str(tmp_path / "cache")))
        assert "damaged" in caplog.text
        assert cached.read_bytes() == whole


def test_where_no_cache_can_be_written_the_model_loads_all_the_same(
    gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        checkpoint = loader.load_checkpoint(gguf, str(tmp_path / "file" / "below"))
    assert not checkpoint.mapped
    assert same(checkpoint, loader.load_checkpoint(gguf, str(tmp_path / "cache")))
    assert caplog.text.count("cannot write the weight cache") == 1


def test_a_write_that_ends_early_costs_one_line(gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a full file system: the write fails half-way, and nothing of it is left."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        checkpoint = loader.load_checkpoint(gguf, str(tmp_path / "cache"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not checkpoint.mapped
    assert caplog.text.count("cannot write the weight cache") == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_source_replaced_after_loading_changes_nothing(gguf: Path, tmp_path: Path) -> None:
    loaded = load(Boot(model=str(gguf), threads=1, cache_dir=str(tmp_path / "cache")))
    runner, row = make_runner(loaded, "gather"), Row([5, 6, 7], [2, 3])
    before = runner.logits([row.work()])
    gguf.write_bytes(b"short")
    assert torch.equal(runner.logits([row.work()]), before)
