"""With our own products and kernels a row's logits are the same bits whatever its neighbours and however its KV came about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_families import make, prompt
from parity_rows import Row, make_runner, places, step

from weir_server.contract import SLIDING
from weir_server.exec.interface import RowWork
from weir_server.exec.runner import LoadedModel, ModelRunner, load
from weir_server.link.messages import Boot

pytestmark = pytest.mark.torch

TOKENS = 70


MODELS = [(name, quantize, "fp32") for quantize in ("none", "int8") for name in ("llama-gqa3", "gemma3")]
MODELS.append(("llama-gqa3", "none", "bf16"))


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("bits")
    name, quantize, kv_dtype = request.param
    make(name).save_pretrained(path / "model")
    boot = Boot(model=str(path / "model"), threads=2, cache_dir=str(path / "cache"), quantize=quantize, kv_dtype=kv_dtype)
    loaded = load(boot)
    if "independent" not in loaded.linear:
        pytest.skip("this processor's matrix products depend on the row count")
    return loaded


def last_logits(runner: ModelRunner, works: list[RowWork], row: int) -> torch.Tensor:
    return runner.logits(works)[row].clone()


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after a prompt, and after one more token, in a step of their own."""
    runner = make_runner(loaded, "cpu")
    row = Row.of(runner, prompt(TOKENS))
    first = last_logits(runner, [row.work()], 0)
    step(runner, (row, None))
    return first, last_logits(runner, [row.work()], 0)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 31, 32, 33, 48, 63, 64])
def test_any_number_of_rows_and_any_place_among_them(loaded: LoadedModel, alone: Any, rows: int) -> None:
    """The row decodes among others that decode at other lengths, first, last and in the middle."""
    runner = make_runner(loaded, "cpu", rows=rows)
    own = Row.of(runner, prompt(TOKENS), 0)
    step(runner, (own, None))
    others = [Row.of(runner, prompt(5 + i, i), i) for i in range(1, rows)]
    step(runner, *((other, None) for other in others))
    for place in {0, rows // 2, rows - 1}:
        works = [other.work() for other in others]
        works.insert(place, own.work())
        assert torch.equal(last_logits(runner, works, place), alone[1]), place


@pytest.mark.parametrize("cut", [[1], [7], [16], [17, 33], [64], [69, 1], [3, 66, 1]], ids=str)
def test_any_cut_of_the_prompt_beside_decodes(loaded: LoadedModel, alone: Any, cut: list[int]) -> None:
    runner = make_runner(loaded, "cpu", rows=3)
    row, neighbours = Row.of(runner, prompt(TOKENS)), [Row.of(runner, prompt(9, i), i) for i in (1, 2)]
    sizes = iter(cut * TOKENS)
    while True:
        works = [*(n.work() for n in neighbours), row.work(next(sizes))]
        if works[-1].sample:
            assert torch.equal(last_logits(runner, works, 2), alone[0])
            return
        step(runner, *((n, None) for n in neighbours), (row, len(works[-1].tokens)))


def test_a_prefix_computed_by_another_row(loaded: LoadedModel, alone: Any) -> None:
    """Full layers: blocks of a row that went another way behind them. Rings are copied, from a donor that stands there."""
    runner = make_runner(loaded, "cpu", rows=3)
    blocks, ring = places(runner, 1, 64)
    donor = Row.of(runner, prompt(TOKENS)[:48] + ([] if ring else prompt(9, 5)))
    step(runner, (donor, None))
    if ring:
        runner.copy_blocks(list(zip(donor.ring, ring, strict=True)), kind=SLIDING)
    taker = Row(prompt(TOKENS), [*donor.blocks[:3], *blocks[3:]], ring=ring, done=48)
    assert torch.equal(last_logits(runner, [taker.work()], 0), alone[0])


def test_what_was_decoded_is_prefilled_again(loaded: LoadedModel) -> None:
    """After a soft reset the answer so far is part of the prompt: the same KV, so the same logits, other steps."""
    runner = make_runner(loaded, "cpu", rows=2)
    row = Row.of(runner, prompt(TOKENS))
    for _ in range(30):
        step(runner, (row, None))
    want = last_logits(runner, [row.work()], 0)
    again = Row.of(runner, row.tokens, 1)
    for size in (41, 30, row.done - 71):
        step(runner, (again, size))
    assert (again.done, again.tokens) == (row.done, row.tokens)
    assert torch.equal(last_logits(runner, [again.work()], 0), want)
