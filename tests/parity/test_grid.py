"""The whole engine against transformers: scheduler × page × chunk × pressure × attention types × choices.

Every cell says by a counter that it was what it claims to be. Not the product: axes turn against each other so that all pairs
of values meet, which a test asserts.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from parity_engine import Models, Served, shared_start
from parity_families import prompt

from weir_server.contract import FULL
from weir_server.kv.shape import Need, Shape
from weir_server.policy.limits import Limits

pytestmark = pytest.mark.torch

ANSWER = 30
LENGTHS = (21, 40, 9, 61, 33)
TOKENS = 600


class Cell(NamedTuple):
    model: str  # full | sliding | hybrid attention
    pressure: str
    choices: int
    scheduler: str
    page: int
    chunk: int | None  # None = adaptive, 0 = whole prompts
    policy: str


MODELS = ("llama", "mistral", "gemma3")
PRESSURES = ("none", "soft reset", "offload")
CHOICES = (1, 3)
SCHEDULERS = ("fifo", "prefill_first")
PAGES = (16, 32)
CHUNKS = (None, 7, 0)
POLICIES = ("newest_stalled", "least_progress")
AXES = (MODELS, PRESSURES, CHOICES, SCHEDULERS, PAGES, CHUNKS, POLICIES)


def cells() -> list[Cell]:
    out = []
    for turn, (m, p, c) in enumerate(itertools.product(range(3), range(3), range(2))):
        for twice in range(2):
            chunk = CHUNKS[(m + p + 2 * c + twice) % 3]
            scheduler, page, policy = (turn + twice) % 2, (turn // 2 + twice) % 2, (turn // 3 + turn + twice) % 2
            out.append(
                Cell(MODELS[m], PRESSURES[p], CHOICES[c], SCHEDULERS[scheduler], PAGES[page], chunk, POLICIES[policy])
            )
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def test_every_pair_of_values_meets() -> None:
    for (i, one), (j, other) in itertools.combinations(enumerate(AXES), 2):
        met = {(cell[i], cell[j]) for cell in cells()}
        assert met == set(itertools.product(one, other)), (one, other)


@pytest.mark.parametrize("cell", cells(), ids=lambda c: "-".join(map(str, c)))
def test_cell(cell: Cell, models: Models) -> None:
    served = serve(cell, models)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    first = EARLY if by_lane(cell) else len(prompts)
    for id, ids in enumerate(prompts):
        if id == first:
            served.step(10)
        served.submit(id, ids, ANSWER, n=cell.choices, lane=2 if id < first else 0)
    served.run()
    for id, ids in enumerate(prompts):
        for choice in range(cell.choices):
            assert served.tokens[id, choice] == models.answer(cell.model, ids, ANSWER), (id, choice)
    check_counters(cell, served)


EARLY = 3
"""Requests that are there when those of a higher lane come."""


def by_lane(cell: Cell) -> bool:
    """Whether rows of a higher lane press, rather than growth: rings never grow, and a hybrid's full layers hardly do."""
    return cell.pressure != "none" and (cell.model == "mistral" or (cell.model == "gemma3" and cell.chunk == 7))


def serve(cell: Cell, models: Models) -> Served:
    """A pool that holds everything, or too little of it for the cell's pressure, but always the largest row."""
    loaded = models.loaded(cell.model, cell.page)
    limits = {"chunk": cell.chunk, "prefill_first": cell.scheduler == "prefill_first", "pressure": cell.policy}
    piece = Limits(TOKENS, chunk=cell.chunk).piece
    shape = Shape.of(loaded.geometry(cell.page), loaded.window, piece)
    needs = [shape.need(n + ANSWER, n + ANSWER) for n in LENGTHS]

    def packed(needs: list[Need]) -> int:
        return shape.chunks(Need(sum(n.full for n in needs) * cell.choices, sum(n.ring for n in needs) * cell.choices))

    usable = sum(map(shape.chunks, needs)) * cell.choices
    if by_lane(cell):
        usable = packed(needs[:EARLY])
    elif cell.pressure != "none":
        usable = max(*map(shape.chunks, needs), int(usable * 0.45))
    swap = 2 * usable if cell.pressure == "offload" else 0
    return Served(loaded, usable, rows=len(LENGTHS) * cell.choices, swap=swap, limits=limits)


def check_counters(cell: Cell, served: Served) -> None:
    stats, prompts = served.stats, sum(LENGTHS)
    if cell.pressure == "none":
        assert stats.preempted == stats.recomputed_tokens == 0
        once = prompts + len(LENGTHS) * (cell.choices - 1)  # each further choice computes the prompt's last token
        if cell.model == "llama" or cell.chunk != 7:
            assert stats.step["prefill_tokens"] == once
        else:  # of a short ring a donor may have overwritten what a choice needs by the time that there is room for it
            assert once <= stats.step["prefill_tokens"] <= prompts * cell.choices
    else:
        assert stats.preemptions_by_cause["priority" if by_lane(cell) else "kv"] > 0
    if cell.pressure == "soft reset":
        assert stats.soft_resets == stats.preempted > 0
        assert stats.recomputed_tokens > 0
    if cell.pressure == "offload":
        assert stats.offloads == stats.preempted > 0
        assert stats.restored_tokens > 0
        assert stats.recomputed_tokens == 0


# ---------------------------------------------------------------- prefixes

@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("start", [31, 32, 33, 64, 90])
def test_a_shared_prefix_is_computed_once(models: Models, page: int, start: int) -> None:
    """Cached tokens are the whole pages of what is shared, and never all of a prompt; answers are the cold ones."""
    served = Served(models.loaded("llama", page), 60, prefix_cache=True)
    prefix = shared_start(start)
    prompts = [prefix + prompt(5 + i, seed=i) for i in range(4)] + [prefix]
    served.submit(0, prompts[0], ANSWER)
    served.run()
    computed = served.stats.step["prefill_tokens"]
    for id, ids in enumerate(prompts[1:], 1):
        served.submit(id, ids, ANSWER)
    served.run()
    hits = {id: min(start, len(ids) - 1) // page * page for id, ids in enumerate(prompts) if id}
    assert {id: served.cached[id, 0] for id in hits} == hits
    assert served.stats.step["prefill_tokens"] - computed == sum(len(prompts[id]) - hit for id, hit in hits.items())
    for id, ids in enumerate(prompts):
        assert served.tokens[id, 0] == models.answer("llama", ids, ANSWER)


def test_a_corrupted_cached_block_changes_the_answer(models: Models) -> None:
    """So answers do come from the cache: without that, a prefix hit would prove nothing."""
    served = Served(models.loaded("llama", 16), 60, prefix_cache=True)
    ids = shared_start(40)
    served.submit(0, ids, ANSWER)
    served.run()
    for block in range(2, 62):
        served.runner.pool.block(FULL, block).mul_(-1.0)
    served.submit(1, ids, ANSWER)
    served.run()
    assert served.cached[1, 0] == 32
    assert served.tokens[0, 0] == models.answer("llama", ids, ANSWER) != served.tokens[1, 0]


@pytest.mark.parametrize("model", ["mistral", "gemma3"])
def test_models_with_windows_share_no_prefixes(models: Models, model: str) -> None:
    served = Served(models.loaded(model, 16), 60, prefix_cache=True)
    for id in range(2):
        served.submit(id, shared_start(50), ANSWER)
        served.run()
        assert served.cached[id, 0] == 0
        assert served.tokens[id, 0] == models.answer(model, shared_start(50), ANSWER)


# ---------------------------------------------------------------- rings that have wrapped

@pytest.mark.parametrize("swap", [0, 40], ids=["soft reset", "offload"])
@pytest.mark.parametrize("model", ["mistral", "gemma3", "qwen2-hybrid"])
def test_preempted_after_its_ring_has_wrapped(models: Models, model: str, swap: int) -> None:
    loaded = models.loaded(model, 16)
    limits: dict[str, Any] = {"chunk": 7}
    shape = Shape.of(loaded.geometry(16), loaded.window, 7)
    served = Served(loaded, 2 * shape.chunks(shape.need(120, 120)), swap=swap, limits=limits)
    asked = [(prompt(9, 2), 110, 2), (prompt(70, 3), 50, 2), (prompt(80, 4), 40, 0)]  # the oldest is never a victim
    for id, (ids, n, lane) in enumerate(asked):
        served.submit(id, ids, n, lane=lane)
        served.step(30)
        row = served.engine.batch.running[-1]
        if lane:
            assert row.id == id
            assert row.computed > len(row.ring) * 16 > (loaded.window or 0)
    served.run()
    stats = served.stats
    assert stats.preemptions_by_cause["priority"] > 0
    assert (stats.offloads, stats.soft_resets) == ((stats.preempted, 0) if swap else (0, stats.preempted))
    assert (stats.recomputed_tokens > 0) is (not swap)
    for id, (ids, n, _) in enumerate(asked):
        assert served.tokens[id, 0] == models.answer(model, ids, n)


# ---------------------------------------------------------------- logprobs of prompts

@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_prompt_logprobs_bypass_the_prefix_cache(models: Models, model: str) -> None:
    """The same when the prompt is cached, in pieces, and beside others; of every token but the first."""
    seen = []
    for chunk in (None, 7):
        served = Served(models.loaded(model, 16), 60, prefix_cache=True, limits={"chunk": chunk})
        ids = shared_start(50)
        served.submit(0, ids, 5)
        served.run()
        served.submit(1, prompt(30), ANSWER)
        served.submit(2, ids, 5, prompt_logprobs=2)
        served.run()
        assert served.cached[2, 0] == 0
        assert served.tokens[2, 0] == served.tokens[0, 0]
        assert len(served.scored[2, 0]) == len(ids) - 1
        assert all(len(entry.top) == 2 for entry in served.scored[2, 0])
        seen.append(served.scored[2, 0])
    if "independent" in served.loaded.linear:
        assert seen[0] == seen[1]
