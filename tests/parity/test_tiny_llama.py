"""Our decoder against transformers on tiny random checkpoints: logits to 1e-4, greedy tokens equal, however rows are fed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_families import prompt, reference_logits, reference_tokens, tiny_llama
from parity_rows import GREEDY, Row, all_logits, make_runner, step

from weir_server.contract import FULL
from weir_server.exec.interface import RowWork
from weir_server.model.files import ModelError

pytestmark = pytest.mark.torch

BACKENDS = ("gather", "cpu")


def blocks(first: int, n: int = 12) -> list[int]:
    return list(range(first, first + n))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def pair(request: Any, tmp_path: Path, load_dir: Any) -> Any:
    model = tiny_llama(tie_word_embeddings=request.param)
    model.save_pretrained(tmp_path / "model")
    return model, load_dir(tmp_path / "model")


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("chunk", [1, 7, 16, 75])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_at_every_position(pair: Any, backend: str, chunk: int, page_size: int) -> None:
    model, loaded = pair
    runner, tokens = make_runner(loaded, backend, page_size), prompt(75)
    row, got = Row(tokens, blocks(5)), []
    while row.done < len(tokens):
        work = row.work(chunk)
        got.append(all_logits(runner, [work]))
        row.done += len(work.tokens)
    want = reference_logits(model, tokens)
    assert want.std() > 0.1  # a model that says the same everywhere would prove nothing
    assert (torch.cat(got) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_groups(tmp_path: Path, load_dir: Any, backend: str, heads: tuple[int, int]) -> None:
    """One KV head for each query head, for all of them, more than one tile holds, and three (SmolLM2's)."""
    model = tiny_llama(num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=32, hidden_size=96)
    model.save_pretrained(tmp_path / "model")
    runner, tokens = make_runner(load_dir(tmp_path / "model"), backend), prompt(50)
    got = all_logits(runner, [Row(tokens, blocks(4)).work()])
    assert (got - reference_logits(model, tokens)).abs().max() <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_batches_prefix_hits_and_preemption(pair: Any, backend: str) -> None:
    """Rows that prefill in chunks, decode, share a prefix's blocks and are recomputed elsewhere, all in the same forwards."""
    model, loaded = pair
    runner = make_runner(loaded, backend)
    a, b = Row(prompt(41), blocks(2)), Row(prompt(9, 2), blocks(14))
    step(runner, (b, None))
    for _ in range(4):
        step(runner, (b, None), (a, 12))  # a prefills in pieces beside b's decoding
    c = Row(prompt(41)[:37] + prompt(20, 3), [*a.blocks[:2], *blocks(26)], done=32)  # adopts a's first two full blocks
    for _ in range(8):
        step(runner, (a, None), (c, 5), (b, None))
    a_again = Row(list(a.tokens), blocks(40), done=0)  # preempted with tokens generated: everything again, in other blocks
    a_again.prompt_len = a.prompt_len
    while len(a_again.tokens) < 41 + 40:
        step(runner, (c, None), (a_again, 16), (b, None))
    for row in (a_again, b, c):
        n = len(row.tokens) - row.prompt_len
        assert n > 16
        assert row.tokens[row.prompt_len :] == reference_tokens(model, row.tokens[: row.prompt_len], n)


def test_same_bits_alone_and_in_company_at_any_chunk_size(pair: Any) -> None:
    """With the C kernels a row's logits do not depend on neighbours or on how its prompt was cut."""
    _, loaded = pair
    if "independent" not in loaded.linear:
        pytest.skip("this machine's matrix products depend on the row count")
    tokens = prompt(70)
    alone = all_logits(make_runner(loaded, "cpu"), [Row(tokens, blocks(2)).work()])
    runner, row, cut = make_runner(loaded, "cpu"), Row(tokens, blocks(2)), []
    neighbour = Row(prompt(200, 9), blocks(20, 14))
    while row.done < len(tokens):
        work = row.work(9 if row.done < 40 else 1)
        other = neighbour.work(5)
        cut.append(all_logits(runner, [other, work])[len(other.tokens) :])
        row.done += len(work.tokens)
        neighbour.done += len(other.tokens)
    assert torch.equal(torch.cat(cut), alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_nan_ends_alone(pair: Any, backend: str) -> None:
    _, loaded = pair
    runner = make_runner(loaded, backend)
    good, bad = Row(prompt(20), blocks(2)), Row(prompt(20, 4), blocks(20))
    step(runner, (good, None), (bad, None))
    expected = runner.execute([good.work()])[0].token
    runner.pool.block(FULL, bad.blocks[0]).fill_(torch.nan)
    results = runner.execute([bad.work(), good.work()])
    assert results[0].token is None
    assert "not finite" in (results[0].error or "")
    assert results[1].token == expected
    runner.release_chunks(list(bad.blocks))
    again = Row(prompt(20, 4), bad.blocks)
    assert runner.execute([again.work()])[0].error is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_copied_blocks_answer_like_the_original(pair: Any, backend: str) -> None:
    _, loaded = pair
    runner = make_runner(loaded, backend)
    row = Row(prompt(30), blocks(2))
    step(runner, (row, None))
    runner.copy_blocks([(2, 20), (3, 21)])
    fork = Row(list(row.tokens), [20, 21, 22], done=row.done)
    works = [row.work(), fork.work()]
    first, second = runner.logits(works)
    assert torch.allclose(first, second, atol=1e-6)
    assert (runner.pool.block(FULL, 20) != 0).any()


def test_released_chunks_read_as_zeros(pair: Any) -> None:
    _, loaded = pair
    runner = make_runner(loaded, "gather")
    step(runner, (Row(prompt(30), blocks(2)), None))
    assert (runner.pool.block(FULL, 2) != 0).any()
    runner.release_chunks([2])
    assert (runner.pool.block(FULL, 2) == 0).all()
    assert (runner.pool.block(FULL, 3) != 0).any()


def test_too_few_blocks_is_an_error_not_a_write_elsewhere(pair: Any) -> None:
    _, loaded = pair
    with pytest.raises(ValueError, match="need 2 blocks"):
        make_runner(loaded, "gather").execute([RowWork(prompt(17), 0, [2], True, GREEDY, 0, prompt(17), 17)])


# ---------------------------------------------------------------- what config and files may say

def greedy(loaded: Any, tokens: list[int], n: int = 16) -> list[int]:
    row = Row(list(tokens), blocks(2, 20))
    runner = make_runner(loaded, "gather")
    while len(row.tokens) < len(tokens) + n:
        step(runner, (row, None))
    return row.tokens[len(tokens) :]


def rewrite(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    config = {k: v for k, v in (config | changes).items() if k not in drop}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_tied_and_untied_heads_that_disagree_with_the_files(tmp_path: Path, load_dir: Any) -> None:
    """vllm-project/vllm#6758, NVIDIA/TensorRT-LLM#13664, vllm-project/vllm#53019."""
    from safetensors.torch import load_file, save_file

    tied, untied = tiny_llama(tie_word_embeddings=True), tiny_llama(tie_word_embeddings=False)
    tokens = prompt(20)
    for name, model in (("b", tied), ("a", tied), ("c", untied), ("d", untied), ("e", untied)):
        model.save_pretrained(tmp_path / name)
    state = load_file(tmp_path / "a" / "model.safetensors")
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "a" / "model.safetensors")
    state = load_file(tmp_path / "d" / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "d" / "model.safetensors")
    rewrite(tmp_path / "e", drop=("tie_word_embeddings",))
    for name, model in (("a", tied), ("b", tied), ("c", untied), ("e", untied)):
        assert greedy(load_dir(tmp_path / name), tokens) == reference_tokens(model, tokens, 16), name
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_dir(tmp_path / "d")


def test_rope_in_old_and_new_spelling_and_null_fields(tmp_path: Path, load_dir: Any) -> None:
    """sgl-project/sglang#14745, deepspeedai/DeepSpeed#8345, HabanaAI/vllm-fork#1294."""
    model = tiny_llama(num_key_value_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    spellings: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "old": (("rope_parameters",), {"rope_theta": 500000.0}),
        "new": (("rope_theta", "torch_dtype"), {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        "null": (
            ("rope_parameters",),
            {"rope_theta": 500000.0, "head_dim": None, "rope_scaling": None, "num_key_value_heads": None},
        ),
        "bad": (("rope_theta",), {"rope_parameters": {"rope_type": "banana", "rope_theta": 500000.0}}),
    }
    tokens = prompt(200)
    want = reference_tokens(model, tokens, 32)
    for name, (drop, changes) in spellings.items():
        model.save_pretrained(tmp_path / name)
        rewrite(tmp_path / name, drop, **changes)
    for name in ("old", "new", "null"):
        assert greedy(load_dir(tmp_path / name), tokens, 32) == want
    with pytest.raises(ModelError, match="banana"):
        load_dir(tmp_path / "bad")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 500.0,
        },
    ],
    ids=lambda r: r["rope_type"],
)  # fmt: skip
def test_scaled_rope(tmp_path: Path, load_dir: Any, rope: dict[str, Any]) -> None:
    model, tokens = tiny_llama(rope_parameters=rope), prompt(150)
    model.save_pretrained(tmp_path / "model")
    got = all_logits(make_runner(load_dir(tmp_path / "model"), "gather"), [Row(tokens, blocks(2)).work()])
    assert (got - reference_logits(model, tokens)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"), ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "mamba"}, "mamba"), ({"sliding_window": 128}, "sliding_window"), ({"hidden_size": 63}, "63"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"), ({"num_hidden_layers": "two"}, "two"),
        ({"num_key_value_heads": 3}, "3"), ({"num_hidden_layers": 3}, r"layers\.2\."),
        ({"num_hidden_layers": 1}, r"layers\.1\."), ({"intermediate_size": 95}, r"gate_proj\.weight"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, load_dir: Any, changes: Any, named: str) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=named):
        load_dir(rewrite(tmp_path / "model", **changes))


def test_shards_and_half_precision_files(tmp_path: Path, load_dir: Any) -> None:
    from transformers import LlamaForCausalLM

    tokens = prompt(40)
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="60KB")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager").eval()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    got = all_logits(make_runner(load_dir(tmp_path / "model"), "gather"), [Row(tokens, blocks(2)).work()])
    assert (got - reference_logits(model, tokens)).abs().max() <= 1e-4
    missing = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelError, match=missing.name):
        load_dir(tmp_path / "model")


def test_vocabulary_padded_beyond_the_tokenizer(tmp_path: Path, load_dir: Any) -> None:
    """pegainfer-project/pegainfer#673: an id beyond the tokenizer's is a legal sample."""
    from weir_server.link.messages import Sampling

    tiny_llama(vocab_size=640).save_pretrained(tmp_path / "model")
    forced = Sampling(max_tokens=3, temperature=0, logit_bias={639: 1000.0}, logprobs=1)
    result = make_runner(load_dir(tmp_path / "model"), "gather").execute([Row(prompt(9), blocks(2), forced).work()])[0]
    assert result.token == 639
    assert result.logprobs is not None
    assert result.logprobs.logprob <= 0
