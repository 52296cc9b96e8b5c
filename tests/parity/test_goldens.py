"""SmolLM2 through the engine against the committed answers of transformers: alone, in company, and after preemption.

Greedy tokens must be the reference's up to a step where its lead over the second best was under 2e-4, and such a step may
end the comparison of one prompt of the twenty at most. What each condition claims to be is asserted, not assumed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rows import Row, all_logits

from weir_server.contract import Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.runner import LoadedModel, load
from weir_server.link.messages import Boot, Finished, Sampling, Submit, Tokens
from weir_server.model.files import resolve
from weir_server.model.loader import load_checkpoint
from weir_server.policy.limits import Limits

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

GOLDENS = Path(__file__).parents[1] / "goldens"
NEAR_TIE = 2e-4
SAMPLING = Sampling(max_tokens=200, temperature=0)
PAGE = 16


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((GOLDENS / "smollm2.json").read_text())


@pytest.fixture(scope="module")
def loaded(golden: dict[str, Any]) -> LoadedModel:
    return load(Boot(model=str(resolve(golden["model"])), threads=2))


class Served:
    """An engine of our own over the model, and what came out of it."""

    def __init__(self, loaded: LoadedModel, blocks: int, rows: int, prefix_cache: bool = False) -> None:
        runner = loaded.runner(blocks + 2)
        config = EngineConfig(loaded.context_length, blocks + 2, Limits(tokens=rows + 512), prefix_cache=prefix_cache)
        self.engine = Engine(runner, config, Knobs(rows, None, 0.0, 1000))
        self.tokens: dict[int, list[int]] = {}
        self.preempted: set[int] = set()
        """Ids that lost their KV with more than a page generated."""

    @property
    def mean_decode_rows(self) -> float:
        step = self.engine.meter.stats.step
        return step["decode_rows"] / step["steps"]

    def run(self, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
        """Serve `prompts` by id, all submitted at once; their tokens."""
        for id, ids in prompts.items():
            self.tokens[id] = []
            self.engine.submit(Submit(id, ids, SAMPLING, self.engine.clock()))
        for _ in range(20_000):
            if not self.engine.busy:
                break
            self.engine.step()
            self.preempted |= {row.id for row in self.engine.batch.queue if row.generated > PAGE}
            for event in self.engine.report().events:
                if isinstance(event, Tokens):
                    self.tokens[event.id] += event.ids
                elif isinstance(event, Finished):
                    assert event.reason == "length", event
        assert not self.engine.busy
        assert not any(self.engine.meter.stats.invariant_violations.values())
        return {id: self.tokens[id] for id in prompts}


def check(golden: dict[str, Any], tokens: dict[int, list[int]]) -> None:
    """Raises AssertionError where an answer leaves the reference at a step that was no near-tie, or too many do."""
    ties = []
    for i, want in enumerate(golden["answers"]):
        got = tokens[i]
        assert len(got) == len(want["tokens"])
        at = next((n for n, (a, b) in enumerate(zip(got, want["tokens"], strict=True)) if a != b), None)
        if at is not None:
            assert want["lead"][at] < NEAR_TIE, f"prompt {i} leaves the reference at step {at}, lead {want['lead'][at]}"
            ties.append((i, at))
    assert len(ties) <= 1, ties


def prompts(golden: dict[str, Any]) -> dict[int, list[int]]:
    return {i: a["ids"] for i, a in enumerate(golden["answers"])}


def test_the_weights_are_those_of_the_goldens(golden: dict[str, Any]) -> None:
    sys.path.insert(0, str(GOLDENS))
    from make import weights_hash

    assert weights_hash(load_checkpoint(resolve(golden["model"])).weights) == golden["weights_sha256"]


def test_teacher_forced_logits(golden: dict[str, Any], loaded: LoadedModel) -> None:
    runner, worst = loaded.runner(34), 0.0
    for answer in golden["answers"]:
        ids = answer["ids"]
        logits = all_logits(runner, [Row(ids + answer["tokens"][:-1], range(2, 34)).work()])[len(ids) - 1 :]
        worst = max(
            worst,
            float((logits[:, golden["logit_ids"]] - torch.tensor(answer["kept"])).abs().max()),
            float((logits.amax(-1) - torch.tensor(answer["best"])).abs().max()),
        )
        for step in (logits.argmax(-1) != torch.tensor(answer["tokens"])).nonzero():
            assert answer["lead"][int(step)] < NEAR_TIE
    print(f"largest difference of a logit: {worst:.1e}")
    assert worst <= 1e-3


def test_alone_and_cold(golden: dict[str, Any], loaded: LoadedModel) -> None:
    served = Served(loaded, blocks=34, rows=1)
    check(golden, served.run(prompts(golden)))
    assert served.engine.meter.stats.prefix_hits == 0
    assert served.engine.meter.stats.decode_only["decode_rows"] == served.engine.meter.stats.decode_only["steps"]


def test_with_eight_others_and_a_shared_prefix(golden: dict[str, Any], loaded: LoadedModel) -> None:
    served = Served(loaded, blocks=400, rows=9, prefix_cache=True)
    check(golden, served.run(prompts(golden)))
    assert served.mean_decode_rows >= 6
    assert served.engine.meter.stats.prefix_hits > 0


def rounds(golden: dict[str, Any], loaded: LoadedModel) -> Iterator[Served]:
    """Serve in pools too small for the batch until each prompt was preempted; the first of a round never is."""
    todo, done = prompts(golden), {}
    for _ in range(10):
        if not todo:
            return
        filler = {1000: next(iter({**done, **todo}.values()))}
        rows = min(9, len(todo) + 1)
        longest = max(len(ids) for ids in [*todo.values(), *filler.values()]) + SAMPLING.max_tokens
        served = Served(loaded, blocks=-(-longest // PAGE) + 5 * (rows - 1), rows=rows)
        served.run(filler | todo)
        done |= {i: todo.pop(i) for i in served.preempted & set(todo)}
        yield served
    assert not todo, f"never preempted: {sorted(todo)}"


def test_after_a_preemption_each(golden: dict[str, Any], loaded: LoadedModel) -> None:
    tokens: dict[int, list[int]] = {}
    for served in rounds(golden, loaded):
        tokens |= {i: served.tokens[i] for i in served.preempted if i < 1000}
        assert served.engine.meter.stats.recomputed_tokens > 0
    check(golden, tokens)
