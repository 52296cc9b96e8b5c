"""8-bit weights end to end: what is rounded how, what GGUF has as it is, what loading keeps, and answers of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize
from parity_families import FAMILIES, FamilyRow, make, prompt, reference_logits, reference_tokens, tiny_llama
from parity_gguf import write_gguf
from parity_rows import Row, all_logits, make_runner, run_rows

from weir_server.engine.memory import memory_used
from weir_server.exec import runner as exec_runner
from weir_server.exec.gemm import NativeLinear
from weir_server.exec.runner import LoadedModel, describe, load
from weir_server.exec.step import UnsupportedError
from weir_server.link.messages import Boot
from weir_server.model import int8, loader
from weir_server.model.int8 import Int8Matrix, lines_shape, quantize

pytestmark = pytest.mark.torch


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """`weight` as 8 bits hold it, worked out weight by weight in exact arithmetic but for the roundings that are defined."""
    out = np.zeros(weight.shape, np.float32)
    for r, row in enumerate(weight.numpy()):
        for g in range(0, len(row), 32):
            group = row[g : g + 32]
            scale = np.abs(group).max() / np.float32(127)
            for i, w in enumerate(group):
                out[r, g + i] = np.float32(np.rint(w / scale)) * scale if scale else 0
    return torch.from_numpy(out)


def round_matrices(model: Any) -> Any:
    """`model` with its matrices as 8 bits hold them: the reference for what computes with those."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(Int8Matrix.of(quantize(p.detach())).float32())
    return model


def boot(path: Path, **more: Any) -> Boot:
    return Boot(model=str(path), threads=2, cache_dir=str(path.parent / "cache"), **more)


def kernels_or_skip(loaded: LoadedModel) -> LoadedModel:
    if loaded.weights != "int8":
        pytest.skip("the C kernels were not built, so 8-bit weights are held in float32")
    return loaded


# ---------------------------------------------------------------- one matrix

@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (40, 100), (5, 31)], ids=str)
def test_a_weight_is_the_nearest_multiple_of_its_groups_largest_by_127(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    weight[0, :] *= 1e-3
    held = Int8Matrix.of(quantize(weight))
    assert held.lines.shape == lines_shape(shape)
    assert torch.equal(held.float32(), rounded(weight))
    error = (held.float32() - weight).abs()
    assert (error <= weight.abs().max(1, keepdim=True).values / 254 * 1.0001).all()


def test_many_rows_are_rounded_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(100, 64)
    whole = quantize(weight)
    monkeypatch.setattr(int8, "_ROWS", 7)
    parts = quantize(weight)
    assert torch.equal(whole.q, parts.q) and torch.equal(whole.scales, parts.scales)


def test_rows_are_looked_up_in_the_same_tensor() -> None:
    held = Int8Matrix.of(quantize(random(50, 70)))
    rows = torch.tensor([0, 49, 15, 16, 49])
    assert torch.equal(held[rows], held.float32()[rows])
    assert held[rows].shape == (5, 70) and held[rows].is_contiguous()
    assert held[rows[:0]].shape == (0, 70)


def test_it_takes_nine_bits_a_weight() -> None:
    assert Int8Matrix.of(quantize(random(960, 576))).lines.nbytes == 960 * 576 * 9 // 8


# ---------------------------------------------------------------- GGUF

@pytest.mark.parametrize("kind", sorted(int8.EXACT))
def test_ggufs_blocks_are_taken_as_they_are(kind: str) -> None:
    number = GGMLQuantizationType[kind]
    raw = gguf_quantize((random(40, 96) * 0.1).numpy(), number).copy()
    raw[3, 2:9] = 0x80  # the least that a byte holds, which no rounding of ours gives
    blocks = int8.of_gguf(raw, kind)
    assert np.array_equal(Int8Matrix.of(blocks).float32().numpy(), dequantize(raw, number))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16"])
def test_a_file_in_8_bits_is_served_in_8_bits_unless_it_is_told_otherwise(tmp_path: Path, kind: str, arch: str) -> None:
    """By itself only what stays the same to the bit: llama's interleaved heads and stacked parts, too."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make(arch), arch, kind=GGMLQuantizationType[kind])
    auto, plain = (loader.load_checkpoint(path, str(tmp_path / "cache"), q) for q in ("auto", "none"))
    assert auto.int8 == (kind in int8.EXACT) and not plain.int8
    assert auto.key != plain.key or not auto.int8
    for name, weight in auto.weights.items():
        assert isinstance(weight, Int8Matrix) == (auto.int8 and len(weight.shape) == 2)
        assert torch.equal(int8.dense(weight), int8.dense(plain.weights[name])), name


def test_a_file_with_one_matrix_of_another_type_is_served_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_llama(), kind=GGMLQuantizationType.Q8_0)
    assert loader.read_headers(path, "auto")[1] and not loader.read_headers(path, "none")[1]
    was = loader._Gguf.is_int8
    monkeypatch.setattr(loader._Gguf, "is_int8", lambda self, piece: piece != "layers.1.up" and was(self, piece))
    assert not loader.read_headers(path, "auto")[1] and loader.read_headers(path, "int8")[1]
    mixed = loader.load_checkpoint(path, str(tmp_path / "other"), "int8")  # that one alone is rounded
    assert isinstance(mixed.weights["layers.1.gate_up"], Int8Matrix)


def test_float32_and_8_bits_of_a_q8_0_file_answer_alike_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_llama(tie_word_embeddings=True), kind=GGMLQuantizationType.Q8_0)
    logits = []
    for q in ("auto", "none"):
        loaded = load(boot(path, quantize=q))
        runner = make_runner(loaded, "cpu")
        logits.append(all_logits(runner, [Row.of(runner, prompt(40)).work()]))
        if q == "auto":
            kernels_or_skip(loaded)
    assert torch.equal(*logits)


# ---------------------------------------------------------------- whole models

@pytest.fixture(params=FAMILIES, ids=[row.name for row in FAMILIES])
def family(request: Any) -> FamilyRow:
    return request.param


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_every_family_computes_with_exactly_the_rounded_weights(tmp_path: Path, family: FamilyRow, backend: str) -> None:
    model, tokens = make(family), prompt(60)
    model.save_pretrained(tmp_path / "m")
    loaded = kernels_or_skip(load(boot(tmp_path / "m", quantize="int8")))
    unrounded = reference_logits(model, tokens)
    want = reference_logits(round_matrices(model), tokens)
    runner = make_runner(loaded, backend)
    got = all_logits(runner, [Row.of(runner, tokens).work()])
    assert (got - want).abs().max() <= 1e-4
    assert (unrounded - want).abs().max() > 1e-3, "rounding that changes nothing was not done"
    assert run_rows(runner, [Row.of(runner, tokens, 1)], 12)[0] == reference_tokens(model, tokens, 12)


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_widths_that_are_no_whole_groups(tmp_path: Path, backend: str) -> None:
    model, tokens = tiny_llama(hidden_size=80, head_dim=16, intermediate_size=112, tie_word_embeddings=True), prompt(40)
    model.save_pretrained(tmp_path / "m")
    runner = make_runner(kernels_or_skip(load(boot(tmp_path / "m", quantize="int8"))), backend)
    got = all_logits(runner, [Row.of(runner, tokens).work()])
    assert (got - reference_logits(round_matrices(model), tokens)).abs().max() <= 1e-4


def test_8_bits_are_what_is_multiplied_and_nothing_is_held_besides(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "m")
    loaded = kernels_or_skip(load(boot(tmp_path / "m", quantize="int8")))
    decoder = loaded.decoder
    linears = [decoder._head, *(w for layer in decoder.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down))]
    assert all(isinstance(w, NativeLinear) and w.int8 for w in linears)
    assert decoder._head.weight is decoder.embed.lines, "the tied head is the embedding's own tensor"
    assert loaded.model["weights"] == "int8" and str(loaded.model["linear"]).startswith("int8, own")
    assert load(boot(tmp_path / "m")).model["weights"] == "float32"


def test_the_arithmetic_of_memory_knows_the_smaller_weights(tmp_path: Path) -> None:
    for tied in (True, False):
        path = tmp_path / str(tied) / "m"
        tiny_llama(tie_word_embeddings=tied).save_pretrained(path)
        loaded = kernels_or_skip(load(boot(path, quantize="int8")))
        held = {t.data_ptr(): t.nbytes for t in _tensors(loaded)}
        assert describe(boot(path, quantize="int8")).weights_bytes == loaded.weights_bytes == sum(held.values())
        assert loaded.weights_bytes < 0.3 * loader.weights_bytes(loaded.config, in_int8=False, mapped=False)


def _tensors(loaded: LoadedModel) -> list[torch.Tensor]:
    decoder, found = loaded.decoder, [loaded.decoder.norm]
    for layer in decoder.layers:
        found += [layer.attn_norm, layer.mlp_norm, layer.qkv.weight, layer.out.weight, layer.gate_up.weight, layer.down.weight]
    return [*found, decoder._head.weight, decoder.embed.lines]


def test_a_start_from_the_cache_takes_no_memory_for_8_bits(tmp_path: Path) -> None:
    tiny_llama(hidden_size=512, intermediate_size=4096, vocab_size=4096).save_pretrained(tmp_path / "m")
    whole = kernels_or_skip(load(boot(tmp_path / "m", quantize="int8"))).weights_bytes
    before = memory_used()
    again = load(boot(tmp_path / "m", quantize="int8"))
    assert again.decoder.embed.lines.data_ptr() % 64 == 0, "a line of weights is a line of the cache"
    assert memory_used() - before < whole / 2


# ---------------------------------------------------------------- the cache, and a machine without a compiler

def test_the_caches_of_the_two_formats_are_never_taken_for_each_other(tmp_path: Path, caplog: Any) -> None:
    tiny_llama().save_pretrained(tmp_path / "m")
    wide, narrow = (loader.load_checkpoint(tmp_path / "m", str(tmp_path / "cache"), q) for q in ("none", "int8"))
    assert wide.mapped and narrow.mapped and not wide.int8 and narrow.int8
    places = {c.int8: tmp_path / "cache" / f"{c.key}.safetensors" for c in (wide, narrow)}
    assert len({*places.values()}) == 2
    contents = {k: p.read_bytes() for k, p in places.items()}
    for int8_wanted, place in places.items():  # even under the other's name
        place.unlink()
        place.write_bytes(contents[not int8_wanted])
        again = loader.load_checkpoint(tmp_path / "m", str(tmp_path / "cache"), "int8" if int8_wanted else "none")
        assert "has another layout" in caplog.text
        caplog.clear()
        assert again.int8 is int8_wanted and place.read_bytes() == contents[int8_wanted]


def test_without_kernels_the_same_values_are_held_in_float32_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def absent() -> Any:
        raise UnsupportedError("the C kernels were not built")

    monkeypatch.setattr(exec_runner, "NativeKind", absent)
    model, tokens = tiny_llama(tie_word_embeddings=True), prompt(40)
    model.save_pretrained(tmp_path / "m")
    loaded = load(boot(tmp_path / "m", quantize="int8"))
    assert caplog.text.count("the 8-bit weights are held in float32") == 1
    assert loaded.model["weights"] == "int8 held in float32"
    plain = load(boot(tmp_path / "m", quantize="none")).weights_bytes
    assert loaded.weights_bytes == describe(boot(tmp_path / "m", quantize="int8")).weights_bytes == plain
    runner = make_runner(loaded, "gather")
    got = all_logits(runner, [Row.of(runner, tokens).work()])
    assert (got - reference_logits(round_matrices(model), tokens)).abs().max() <= 1e-4
