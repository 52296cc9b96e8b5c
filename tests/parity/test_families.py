"""Every family of the table against transformers: logits at each position, greedy tokens, both file formats, both backends.

A new family costs one row of parity_families.FAMILIES.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_families import FAMILIES, FamilyRow, make, prompt, reference_logits, reference_tokens
from parity_gguf import write_gguf
from parity_rows import BACKENDS, Row, all_logits, make_runner, run_rows

from weir_server.contract import FULL, SLIDING
from weir_server.exec.runner import LoadedModel
from weir_server.model.families import FAMILIES as SERVED
from weir_server.model.files import ModelError

pytestmark = pytest.mark.torch

TOKENS = 75


@pytest.fixture(params=FAMILIES, ids=[row.name for row in FAMILIES], scope="module")
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[FamilyRow, Any, Path]:
    """A row, its transformers model, and where that is saved."""
    model, path = make(request.param), tmp_path_factory.mktemp("family") / "model"
    model.save_pretrained(path)
    return request.param, model, path


def test_every_served_family_has_a_row() -> None:
    assert {row.family for row in FAMILIES} == set(SERVED)


def test_logits_and_greedy_tokens(case: tuple[FamilyRow, Any, Path], load_dir: Callable[..., LoadedModel]) -> None:
    """Logits of a prompt fed in pieces, then 64 greedy tokens."""
    _, model, path = case
    loaded, tokens = load_dir(path), prompt(TOKENS)
    want, answer = reference_logits(model, tokens), reference_tokens(model, tokens, 64)
    assert want.std() > 0.1  # a model that says the same everywhere would prove nothing
    assert len(set(answer)) > 4
    for backend in BACKENDS:
        runner = make_runner(loaded, backend)
        fed, got = Row.of(runner, tokens), []
        while fed.done < TOKENS:
            work = fed.work(17)
            got.append(all_logits(runner, [work]))
            fed.done += len(work.tokens)
        assert (torch.cat(got) - want).abs().max() <= 1e-4, backend
        assert run_rows(runner, [Row.of(runner, tokens)], 64)[0] == answer, backend


def test_what_the_config_says_about_windows(case: tuple[FamilyRow, Any, Path], load_dir: Callable[..., LoadedModel]) -> None:
    """Layer types as transformers builds them, and pages of both types tiling the same chunk."""
    _, model, path = case
    c = load_dir(path).config
    window = getattr(model.config, "sliding_window", None)
    theirs = getattr(model.config, "layer_types", None) or [SLIDING if window else FULL] * 2
    assert list(c.layer_types) == theirs
    assert c.window == (window if SLIDING in theirs else None)
    geometry = load_dir(path).geometry(16)
    pages = {geometry.blocks_per_chunk[kind] * theirs.count(kind) for kind in set(theirs)}
    assert len(pages) == 1
    assert geometry.chunk_bytes >= pages.pop() * 2 * 16 * c.kv_heads * c.head_dim * 4


@pytest.mark.parametrize("row", [r for r in FAMILIES if r.gguf], ids=[r.name for r in FAMILIES if r.gguf])
def test_logits_of_gguf_files(row: FamilyRow, tmp_path: Path, load_dir: Callable[..., LoadedModel]) -> None:
    model, tokens = make(row), prompt(TOKENS)
    write_gguf(tmp_path / "m.gguf", model, row.gguf or "")
    runner = make_runner(load_dir(tmp_path / "m.gguf"), "gather")
    got = all_logits(runner, [Row.of(runner, tokens).work()])
    assert (got - reference_logits(model, tokens)).abs().max() <= 1e-4


def test_each_tensor_that_is_missing_extra_or_misshapen_is_named(case: tuple[FamilyRow, Any, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from weir_server.model.loader import load_checkpoint

    _, _, path = case
    state = load_file(path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    kinds = {name.replace("layers.0", "layers.1") for name in state if "layers.0" in name or "layers" not in name}
    for name in kinds:
        for wrong, says in (
            ({n: t for n, t in state.items() if n != name}, f"no tensor {name}"),
            ({**state, name: state[name][:-1].clone()}, f"{name} of {tmp_path} has shape"),
            ({**state, name + "_extra": state[name].clone()}, f"has the tensor {name}_extra"),
        ):
            save_file(wrong, tmp_path / "model.safetensors")
            with pytest.raises(ModelError, match=says.replace(".", r"\.")):
                load_checkpoint(tmp_path, str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("row", "changes", "named"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window = 16"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2-hybrid", {"layer_types": None, "max_window_layers": "two"}, "max_window_layers"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar"),
        ("mistral", {"sliding_window": 0.5}, "sliding_window"),
        ("mistral", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
        ("gemma3", {"model_type": "gemma3"}, "'gemma3'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_the_maths_is_refused_by_name(row: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    from weir_server.model.config import from_hf

    config = config_json(make(row), tmp_path)
    with pytest.raises(ModelError, match=named):
        from_hf({**config, **changes}, tmp_path / "config.json")


def config_json(model: Any, path: Path) -> dict[str, Any]:
    model.config.save_pretrained(path)
    return {"model_type": model.config.model_type, **json.loads((path / "config.json").read_text())}


def test_older_spellings_and_what_transformers_takes_for_granted(tmp_path: Path) -> None:
    """A Gemma config as the Hub has it; a window that is null is none; what is absent takes the family's default."""
    from weir_server.model.config import Rope, from_hf

    new = config_json(make("gemma3"), tmp_path)
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types", "_sliding_window_pattern")}
    old |= {"rope_theta": 5e5, "rope_local_base_freq": 7e3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    c = from_hf({**old, "sliding_window_pattern": 3}, tmp_path)
    assert c.layer_types == (SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING)
    assert c.ropes == {FULL: Rope(5e5, (4.0,) * 16), SLIDING: Rope(7e3)}
    assert from_hf(old, tmp_path).layer_types.index(FULL) == 5
    for gone in ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "hidden_activation", "sliding_window"):
        del old[gone]
    c = from_hf(old, tmp_path)
    assert (c.ropes[FULL].theta, c.ropes[SLIDING].theta, c.attention_scale, c.window) == (1e6, 1e4, 1 / 16, 4096)

    mistral = config_json(make("mistral-full"), tmp_path)
    assert mistral["sliding_window"] is None
    assert from_hf(mistral, tmp_path).window is None
    assert from_hf({k: v for k, v in mistral.items() if k != "sliding_window"}, tmp_path).window == 4096
