"""What the runner adds to a forward: prompt logprobs, rows that fail alone, a decoder that cannot batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from parity_families import make, prompt, reference_logits, reference_tokens
from parity_rows import BACKENDS, Row, make_runner, run_rows

from weir_server.contract import FULL, SLIDING
from weir_server.exec import runner as runner_module
from weir_server.exec.interface import RowResult, RowWork
from weir_server.exec.runner import HEAD_ROWS, NATIVE, PER_ROW, LoadedModel, ModelRunner
from weir_server.link.messages import Sampling

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", params=["llama", "gemma3-capped"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    from weir_server.link.messages import Boot

    model, path = make(request.param), tmp_path_factory.mktemp("runner")
    model.save_pretrained(path / "model")
    return model, runner_module.load(Boot(model=str(path / "model"), threads=2, cache_dir=str(path / "cache")))


# ---------------------------------------------------------------- prompt logprobs

def scored(runner: ModelRunner, tokens: list[int], sizes: list[int], k: int, beside: Sequence[RowWork] = ()) -> list[RowResult]:
    """Results of a prompt fed in pieces of `sizes` with prompt logprobs."""
    row, results = Row.of(runner, tokens, chunk=128), []
    for size in sizes:
        work = row.work(size)
        work.context, work.prompt_logprobs = row.tokens, k
        results.append(runner.execute([*beside, work])[-1])
        row.done += size
    assert row.done == len(tokens)
    return results


@pytest.mark.parametrize("sizes", [[150], [1, 63, 64, 22], [149, 1]], ids=str)
def test_prompt_logprobs(pair: tuple[Any, LoadedModel], sizes: list[int]) -> None:
    """Of every prompt token but the first, however it is cut: transformers' log_softmax of the position before."""
    model, loaded = pair
    tokens = prompt(150)
    runner = make_runner(loaded, "cpu")
    beside = [Row.of(runner, prompt(20, 5), 1).work()]
    results = scored(runner, tokens, sizes, 3, beside)
    assert [len(r.prompt_logprobs or []) for r in results] == [*sizes[:-1], sizes[-1] - 1] or sizes[-1] == 1
    got = [entry for r in results for entry in r.prompt_logprobs or []]
    want = reference_logits(model, tokens).log_softmax(-1)
    assert len(got) == len(tokens) - 1
    for i, entry in enumerate(got):
        assert entry.logprob == pytest.approx(float(want[i, tokens[i + 1]]), abs=1e-4)
        best = want[i].topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert results[-1].token == int(want[-1].argmax())
    assert all(r.token is None for r in results[:-1])


def test_the_head_never_sees_more_rows_than_a_tile(pair: tuple[Any, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the row's own token, and its neighbours', are what they are without."""
    _, loaded = pair
    runner, tokens, seen = make_runner(loaded, "cpu"), prompt(150), []
    plain = runner.execute([Row.of(runner, tokens, chunk=150).work()])[0].token
    head = runner._head

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(runner, "_head", counted)
    assert scored(runner, tokens, [150], 0)[0].token == plain
    assert seen == [1, HEAD_ROWS, HEAD_ROWS, 149 - 2 * HEAD_ROWS]


def test_prompt_logprobs_need_the_whole_prompt(pair: tuple[Any, LoadedModel]) -> None:
    runner = make_runner(pair[1], "gather")
    work = Row.of(runner, prompt(30)).work(10)
    work.prompt_logprobs = 0
    with pytest.raises(ValueError, match="whole prompt"):
        runner.execute([work])


# ---------------------------------------------------------------- rows that fail

@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_is_not_finite_ends_alone(pair: tuple[Any, LoadedModel], backend: str, poison: float) -> None:
    """In any place among its neighbours, which keep their tokens; its logprobs end with it."""
    _, loaded = pair
    runner = make_runner(loaded, backend)
    rows = [Row.of(runner, prompt(20 + i, i), i, chunk=40) for i in range(3)]
    run_rows(runner, rows, 1)
    want = [r.token for r in runner.execute([row.work() for row in rows])]
    for bad in range(3):
        kept = {}
        for kind, table in ((FULL, rows[bad].blocks), (SLIDING, rows[bad].ring)):
            if kind in loaded.config.layers_of:
                block = runner.pool.block(kind, table[1])
                kept[kind] = block.clone()
                block[loaded.config.kv_heads * loaded.config.head_dim * 16 :] = poison
        works = [row.work() for row in rows]
        works[bad].prompt_len, works[bad].prompt_logprobs, works[bad].context = 999, 1, [*works[bad].context, 5]
        results = runner.execute(works)
        assert results[bad].error == "the model's logits are not finite"
        assert results[bad].token is None
        assert [r.token for i, r in enumerate(results) if i != bad] == [t for i, t in enumerate(want) if i != bad]
        for kind, table in ((FULL, rows[bad].blocks), (SLIDING, rows[bad].ring)):
            if kind in kept:
                runner.pool.block(kind, table[1]).copy_(kept[kind])
    assert [r.token for r in runner.execute([row.work() for row in rows])] == want


# ---------------------------------------------------------------- what KV is stored in

def test_keys_and_values_in_bfloat16(pair: tuple[Any, LoadedModel]) -> None:
    """Half the bytes of a chunk; the same numbers that float32 has, rounded; answers near those."""
    _, loaded = pair
    rounded = runner_module.load(replace(loaded.boot, kv_dtype="bf16"))
    assert rounded.model["kv_dtype"] == "bf16"
    assert 2 * rounded.geometry(32).chunk_bytes == loaded.geometry(32).chunk_bytes
    pools, logits = [], []
    for each in (loaded, rounded):
        runner = make_runner(each, "cpu")
        logits.append(runner.logits([Row.of(runner, prompt(60), chunk=64).work()]))
        pools.append(runner.pool.flat)
    assert pools[1].dtype is torch.bfloat16
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].std()
    assert not torch.equal(*logits)


# ---------------------------------------------------------------- per-row fallback

def test_a_decoder_that_cannot_batch_gets_a_forward_for_each_row(
    tmp_path: Path, load_dir: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers as in one forward, and a decode path that says so."""
    model = make("llama")
    model.save_pretrained(tmp_path / "model")
    assert load_dir(tmp_path / "model").decode_path == NATIVE
    monkeypatch.setattr(runner_module, "Decoder", AloneDecoder)
    loaded = load_dir(tmp_path / "model")
    assert loaded.decode_path == PER_ROW
    assert loaded.model["decode_path"] == "per-row fallback (aggregate decode throughput will not scale with --parallel)"
    runner = make_runner(loaded, "cpu")
    assert runner.supports_batching
    rows = [Row.of(runner, prompt(20 + i, i), i) for i in range(3)]
    want = [reference_tokens(model, row.tokens, 6) for row in rows]
    AloneDecoder.forwards.clear()
    assert run_rows(runner, rows, 6) == want
    assert AloneDecoder.forwards == [20, 21, 22, *[1] * 15]


class AloneDecoder(runner_module.Decoder):
    """Remembers how many tokens each forward had."""

    batched = False
    forwards: list[int] = []

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards.append(len(tokens))
        return super().embedded(tokens)


def test_sampling_settings_of_rows_do_not_mix(pair: tuple[Any, LoadedModel]) -> None:
    """Rows with a bias, a seed or logprobs beside plain ones: each its own token, logprobs for those alone that ask."""
    _, loaded = pair
    runner = make_runner(loaded, "cpu")
    settings = [
        Sampling(max_tokens=9, temperature=0), Sampling(max_tokens=9, seed=3, top_p=0.9, logprobs=2),
        Sampling(max_tokens=9, temperature=0, logit_bias={7: 100.0}),
    ]  # fmt: skip
    rows = [Row.of(runner, prompt(30), i, sampling=s) for i, s in enumerate(settings)]
    together = runner.execute([row.work() for row in rows])
    alone = [runner.execute([row.work()])[0] for row in rows]
    assert [r.token for r in together] == [r.token for r in alone]
    assert together[2].token == 7 != together[0].token
    assert [r.logprobs is not None for r in together] == [False, True, False]
