"""Choosing tokens: each filter against a slow reading of its definition, neighbours without influence, honest errors."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from weir_server.link.messages import LOWEST_LOGPROB, Sampling
from weir_server.model import sampler
from weir_server.model.sampler import Draw, sample, uniform

pytestmark = pytest.mark.torch

VOCAB = 97


def draw(context: list[int] | None = None, prompt_len: int | None = None, choice: int = 0, **sampling: Any) -> Draw:
    context = [1, 2, 3] if context is None else context
    return Draw(Sampling(max_tokens=9, **sampling), choice, context, len(context) if prompt_len is None else prompt_len)


def logits(rows: int = 1, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def allowed(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token → probability, by the definitions, in plain Python."""
    best = max(row.tolist())
    weights = {i: math.exp((x - best) / temperature) for i, x in enumerate(row.tolist())}
    ordered = sorted(weights, key=lambda i: -weights[i])
    if top_k:
        ordered = ordered[:top_k]
    if top_p < 1:
        total, reached, kept = sum(weights[i] for i in ordered), 0.0, []
        for i in ordered:
            if reached >= top_p * total:
                break
            kept.append(i)
            reached += weights[i]
        ordered = kept
    ordered = [i for i in ordered if weights[i] >= min_p]
    total = sum(weights[i] for i in ordered)
    return {i: weights[i] / total for i in ordered}


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.05, 3), st.integers(0, VOCAB + 3), st.sampled_from([1.0, 0.95, 0.5, 0.1]), st.sampled_from([0.0, 0.05, 0.5]),
    st.integers(0, 1000),
)  # fmt: skip
def test_filters_by_their_definitions(temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    """Inverse transform in vocabulary order: with a known number the token is known."""
    row = logits(seed=seed)[0]
    want, number = allowed(row, temperature, top_k, top_p, min_p), uniform(seed, 0, 3)
    got = sample(row[None].clone(), [draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)])[0]
    assert got.token in want
    reached = 0.0
    for token in sorted(want):
        reached += want[token]
        if reached >= number - 1e-6:
            break
    assert got.token == token or abs(reached - number) < 1e-5


def test_frequencies_follow_the_probabilities() -> None:
    row, n = logits(spread=1.0)[0], 6000
    want = allowed(row, 0.7, 8, 1.0, 0.0)
    rows = [draw(temperature=0.7, top_k=8, seed=s) for s in range(n)]
    counts = Counter(r.token for r in sample(row.expand(n, -1).clone(), rows))
    chi2 = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in want.items())
    assert set(counts) <= set(want)
    assert chi2 < 30  # 7 degrees of freedom: p < 1e-4


def test_a_nucleus_wider_than_every_cut_is_whole() -> None:
    flat = torch.zeros(1, 5000)
    tokens = {sample(flat.clone(), [draw(top_p=0.9, seed=s)])[0].token for s in range(300)}
    assert len(tokens) > 250


@pytest.mark.parametrize(
    "parameters", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.02, "temperature": 1.3}]
)
def test_the_same_token_alone_and_in_company(parameters: dict[str, Any]) -> None:
    rows = logits(9)
    draws = [draw(seed=i, **parameters) for i in range(8)]
    draws.append(draw(logit_bias={3: 50.0}, temperature=0.4, repetition_penalty=1.3))
    together = [r.token for r in sample(rows.clone(), draws)]
    assert together == [sample(rows[i : i + 1].clone(), [d])[0].token for i, d in enumerate(draws)]


def test_numbers_depend_on_seed_choice_and_position_alone() -> None:
    numbers = {(s, c, p): uniform(s, c, p) for s in (0, 1, -1, 2**63 - 1, -(2**63)) for c in (0, 1) for p in range(50)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 < x < 1 for x in numbers.values())
    assert abs(sum(uniform(7, 0, p) for p in range(4000)) / 4000 - 0.5) < 0.02


def test_penalties_by_their_definitions() -> None:
    row = logits()
    context = [4, 5, 5, 6]  # prompt 4, 5; generated 5, 6
    edited = row.clone()
    sample(edited, [draw(context, 2, temperature=0, repetition_penalty=2.0)])
    for i in range(VOCAB):
        x = row[0, i].item()
        assert edited[0, i].item() == pytest.approx((x / 2 if x > 0 else x * 2) if i in (4, 5, 6) else x)
    context = [4, 5, 6, 6, 7]
    edited = row.clone()
    sample(edited, [draw(context, 2, temperature=0, presence_penalty=0.5, frequency_penalty=0.25)])
    for i in range(VOCAB):
        assert edited[0, i].item() == pytest.approx(row[0, i].item() - {6: 1.0, 7: 0.75}.get(i, 0.0))


def test_bias_forces_and_minimum_length_forbids() -> None:
    row = logits()
    assert sample(row.clone(), [draw(temperature=0, logit_bias={42: 100.0})])[0].token == 42
    stop = int(row.argmax())
    assert sample(row.clone(), [draw(temperature=0, min_tokens=1, stop_ids=(stop,))])[0].token != stop
    assert sample(row.clone(), [draw([1, 2, 3], 2, temperature=0, min_tokens=1, stop_ids=(stop,))])[0].token == stop
    everything = tuple(range(VOCAB))
    failed = sample(row.clone(), [draw(min_tokens=1, stop_ids=everything)])[0]
    assert failed.token is None
    assert failed.error


def test_extreme_temperatures() -> None:
    row = logits()
    for cold in (1e-4, 1e-30, 1e-46):
        assert sample(row.clone(), [draw(temperature=cold)])[0].token == int(row.argmax())
    assert sample(row.clone(), [draw(temperature=1e30)])[0].error is None


def test_logprobs_are_the_models_own() -> None:
    row = logits()
    want = row[0].log_softmax(-1)
    got = sample(row.clone(), [draw(temperature=0, logprobs=3, logit_bias={42: 100.0})])[0]
    assert got.token == 42
    assert got.logprobs is not None
    assert got.logprobs.logprob == pytest.approx(float(want[42]), abs=1e-5)
    assert [i for i, _ in got.logprobs.top] == want.topk(3).indices.tolist()
    assert sample(row.clone(), [draw(temperature=0, logprobs=0)])[0].logprobs.top == []  # type: ignore[union-attr]
    assert sample(row.clone(), [draw(temperature=0)])[0].logprobs is None
    far = torch.full((1, VOCAB), -1e30)
    far[0, 5] = 1e30
    assert sample(far, [draw(temperature=0, logprobs=2)])[0].logprobs.top[1][1] == LOWEST_LOGPROB  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_fails_does_not_take_others_along(value: float) -> None:
    rows = logits(3)
    want = [r.token for r in sample(rows.clone(), [draw(seed=i) for i in range(3)])]
    rows[1, 7] = value
    results = sample(rows.clone(), [draw(seed=i) for i in range(3)])
    assert (results[0].token, results[2].token) == (want[0], want[2])
    assert results[1].token is None
    assert results[1].error == "the model's logits are not finite"
    results = sample(logits(2), [draw(logit_bias={VOCAB: 1.0}), draw()])
    assert results[0].error
    assert results[1].token is not None


# ---------------------------------------------------------------- one extraction for many rows

SHARED = [{}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.3, "top_p": 0.9, "min_p": 0.01}, {"top_k": 40, "top_p": 0.5}]


@pytest.mark.parametrize("shared", SHARED, ids=str)
def test_rows_with_equal_parameters_are_drawn_in_one_extraction(
    shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[rows, vocab] → [rows], once, and inside it nothing that is done once for each row."""
    shapes, calls = [], Counter[str]()
    extract = sampler._extract

    def counted(logits: torch.Tensor, *parameters: Any) -> Any:
        shapes.append(tuple(logits.shape))
        with Calls(calls):
            return extract(logits, *parameters)

    monkeypatch.setattr(sampler, "_extract", counted)
    together = [r.token for r in sample(logits(64), [draw(seed=i, **shared) for i in range(64)])]
    assert shapes == [(64, VOCAB)]
    of_many, alone = calls.total(), []
    for i in range(64):
        calls.clear()
        alone += [r.token for r in sample(logits(64)[i : i + 1], [draw(seed=i, **shared)])]
        assert calls.total() == of_many
    assert alone == together


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_row_with_a_bias_leaves_the_others_bits_alone() -> None:
    """Nor does one without end-of-sequence ids, with penalties, or one that fails."""
    rows, odd = logits(8), {"logit_bias": {3: 5.0}, "repetition_penalty": 1.5, "presence_penalty": 0.5}
    edited = rows.clone()
    draws = [draw(seed=i) for i in range(8)]
    draws[2] = draw([4, 5, 6], 2, seed=2, **odd)
    draws[5] = draw([4, 5, 6], 2, seed=5, stop_ids=(1,), min_tokens=4)
    edited[6, 0] = torch.nan
    results = sample(edited, draws)
    untouched = [0, 1, 3, 4, 7]
    assert torch.equal(edited[untouched], rows[untouched])
    assert not torch.equal(edited[2], rows[2])
    plain = sample(rows.clone(), [draw(seed=i) for i in range(8)])
    assert [results[i].token for i in untouched] == [plain[i].token for i in untouched]
