"""Windows and rings in both backends: odd lengths, a chunk longer than the window, a wrapped ring, copies and swaps of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from parity_families import make, prompt, reference_logits, reference_tokens
from parity_rows import BACKENDS, GREEDY, Row, all_logits, make_runner, places, run_rows, step

from weir_server.contract import FULL, SLIDING
from weir_server.exec.interface import RowWork
from weir_server.exec.runner import LoadedModel, ModelRunner

pytestmark = pytest.mark.torch

PAGE = 16


@pytest.fixture(scope="module", params=["mistral", "gemma3", "qwen2-hybrid"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    """Windows of 23, 19 and 20: none a multiple of a page, and one page is shorter than each."""
    from weir_server.exec.runner import load
    from weir_server.link.messages import Boot

    model, path = make(request.param), tmp_path_factory.mktemp("ring")
    model.save_pretrained(path / "model")
    return model, load(Boot(model=str(path / "model"), threads=2, cache_dir=str(path / "cache")))


def fed_in(runner: ModelRunner, tokens: list[int], sizes: list[int], chunk: int, neighbour: bool = False) -> torch.Tensor:
    """Logits of all tokens, fed in pieces of `sizes` (the last one repeated), with a ring for pieces of `chunk`."""
    row, other, got = Row.of(runner, tokens, chunk=chunk), Row.of(runner, prompt(180, 9), 1, chunk=chunk), []
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        if row.done == len(tokens):
            return torch.cat(got)
        work, beside = row.work(size), [other.work(3)] if neighbour else []
        got.append(all_logits(runner, [*beside, work])[sum(len(w.tokens) for w in beside) :])
        row.done += len(work.tokens)
        other.done += 3 * neighbour
    raise AssertionError


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [16, 32])
def test_pieces_of_every_size(pair: tuple[Any, LoadedModel], backend: str, page: int) -> None:
    """Single tokens over the wrap, a page and one less or more, the window and one less or more, more than the window."""
    model, loaded = pair
    runner, tokens = make_runner(loaded, backend, page), prompt(101)
    want, window = reference_logits(model, tokens), loaded.config.window or 0
    for sizes in ([1], [page - 1], [page], [page + 1], [window - 1, 1], [window], [window + 1], [40], [101], [3, 64, 1]):
        got = fed_in(runner, tokens, sizes, chunk=max(sizes))
        assert (got - want).abs().max() <= 1e-4, (sizes, backend)


def test_the_same_bits_however_a_prompt_is_cut_and_beside_whom(pair: tuple[Any, LoadedModel]) -> None:
    _, loaded = pair
    if "independent" not in loaded.linear:
        pytest.skip("this processor's matrix products depend on the row count")
    runner, tokens = make_runner(loaded, "cpu"), prompt(101)
    whole = fed_in(runner, tokens, [101], chunk=101)
    for sizes, neighbour in (([1], False), ([17], True), ([50, 1], True), ([7, 16, 31, 5], False)):
        assert torch.equal(fed_in(runner, tokens, sizes, chunk=max(sizes), neighbour=neighbour), whole), sizes


@pytest.mark.parametrize("pair", ["mistral"], indirect=True)
def test_what_has_left_the_window_is_not_seen(pair: tuple[Any, LoadedModel]) -> None:
    """Without full layers, what lies in the ring behind the window changes nothing, and what lies inside it everything."""
    _, loaded = pair
    for backend in BACKENDS:
        runner, tokens = make_runner(loaded, backend), prompt(60)
        row = Row.of(runner, tokens, chunk=60)
        step(runner, (row, None))
        before = runner.logits([row.work()])
        page, window = runner.pool.page_size, loaded.config.window or 0
        left = (60 + 1 - window) // page  # whole pages behind the window of position 60
        assert left > 0
        for block in row.ring[:left]:
            runner.pool.block(SLIDING, block).fill_(7e3)
        assert torch.equal(runner.logits([row.work()]), before), backend
        runner.pool.block(SLIDING, row.ring[left]).fill_(7e3)
        assert not torch.equal(runner.logits([row.work()]), before), backend


def test_a_ring_too_short_is_an_error_not_a_wrong_answer(pair: tuple[Any, LoadedModel]) -> None:
    _, loaded = pair
    runner, window = make_runner(loaded, "gather"), loaded.config.window or 0
    row = Row.of(runner, prompt(100), chunk=PAGE)
    slots = len(row.ring) * PAGE
    for start, count, fits in (
        (50, slots - window + 1, True), (50, slots - window + 2, False), (0, slots, True), (0, slots + 1, False),
    ):  # fmt: skip
        tokens = prompt(count)
        work = RowWork(tokens, start, row.blocks, True, GREEDY, 0, tokens, 1, ring=row.ring)
        if fits:
            runner.execute([work])
        else:
            with pytest.raises(ValueError, match="need a ring of"):
                runner.execute([work])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrapped_ring_survives_a_fork_and_a_swap(pair: tuple[Any, LoadedModel], backend: str) -> None:
    """Forked, swapped out (its blocks then overwritten) and swapped in elsewhere, the row goes on as transformers does."""
    model, loaded = pair
    runner, tokens = make_runner(loaded, backend, swap=True), prompt(61)
    row = Row.of(runner, tokens, chunk=30)
    for _ in range(3):
        step(runner, (row, 30))
    run_rows(runner, [row], 20)
    assert row.done > len(row.ring) * PAGE  # it has wrapped

    def table(blocks: Any, ring: Any) -> dict[str, Any]:
        return {kind: {FULL: blocks, SLIDING: ring}[kind] for kind in loaded.config.layers_of}

    def pairs(source: dict[str, Any], target: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
        return {kind: list(zip(source[kind], target[kind], strict=True)) for kind in source}

    home, forked, elsewhere = (table(*places(runner, place, 30)) for place in range(3))
    for kind, of_kind in pairs(home, forked).items():
        runner.copy_blocks(of_kind, kind=kind)
    fork = Row(list(row.tokens), forked.get(FULL, ()), ring=forked[SLIDING], done=row.done)
    runner.swap_out(pairs(home, forked))
    for kind, blocks in home.items():
        for block in blocks:
            runner.pool.block(kind, block).fill_(torch.nan)
    runner.swap_in(pairs(forked, elsewhere))
    row.blocks, row.ring = elsewhere.get(FULL, ()), elsewhere[SLIDING]
    run_rows(runner, [row, fork], 30)
    assert row.tokens == fork.tokens == tokens + reference_tokens(model, tokens, 51)
