"""The real Engine over real tiny models, and what its clients saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from parity_families import make, reference_tokens

from weir_server.contract import Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.runner import LoadedModel, load
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.link.messages import Admitted, Boot, Finished, PromptLogprobs, Sampling, Stats, Submit, TokenLogprobs, Tokens
from weir_server.policy.limits import Limits

STEPS = 2000
"""Most steps of a run: a bound, not a measure."""


class Models:
    """Tiny models and transformers' answers, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Any] = {}
        self._answers: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def loaded(self, name: str, page: int) -> LoadedModel:
        if name not in self._made:
            model = make(name)
            model.save_pretrained(self.folder / name)
            boot = Boot(model=str(self.folder / name), threads=2, cache_dir=str(self.folder / "cache"))
            self._made[name] = model, load(boot)
        loaded: LoadedModel = self._made[name][1]
        loaded.boot = msgspec.structs.replace(loaded.boot, page_size=page)
        return loaded

    def answer(self, name: str, prompt: Sequence[int], n: int) -> list[int]:
        """The `n` greedy tokens of transformers."""
        key = name, tuple(prompt)
        if len(self._answers.get(key, [])) < n:
            self.loaded(name, 16)
            self._answers[key] = reference_tokens(self._made[name][0], list(prompt), n)
        return self._answers[key][:n]


@dataclass
class Served:
    """`usable`, `swap`: chunks that rows can get. `limits`: of policy.limits.Limits, and the request cap `rows`."""

    loaded: LoadedModel
    usable: int
    rows: int = 8
    swap: int = 0
    prefix_cache: bool = False
    limits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num, swap = self.usable + RESERVED_CHUNKS, self.swap + RESERVED_CHUNKS if self.swap else 0
        config = EngineConfig(
            self.loaded.context_length, num, Limits(**({"tokens": 600} | self.limits)), "tiny", self.prefix_cache,
            swap_chunks=swap,
        )  # fmt: skip
        self.runner = self.loaded.runner(num, swap)
        self.engine = Engine(self.runner, config, Knobs(self.rows, None, 0.0, 1000))
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.scored: dict[tuple[int, int], list[TokenLogprobs]] = {}
        self.ended: dict[tuple[int, int], str] = {}

    @property
    def stats(self) -> Stats:
        return self.engine.meter.stats

    def submit(self, id: int, prompt: Sequence[int], n_tokens: int, **more: Any) -> None:
        sampling = more.pop("sampling", None) or Sampling(max_tokens=n_tokens, temperature=0)
        self.engine.handle([Submit(id, list(prompt), sampling, self.engine.clock(), **more)])

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            if self.engine.busy:
                assert self.engine.step(), "a step with work at hand fed nothing"
            for event in self.engine.report().events:
                key = event.id, event.row
                match event:
                    case Admitted():
                        self.cached[key] = event.cached_tokens
                    case Tokens():
                        self.tokens.setdefault(key, []).extend(event.ids)
                    case PromptLogprobs():
                        self.scored.setdefault(key, []).extend(event.logprobs)
                    case Finished():
                        self.ended[key] = event.reason

    def run(self) -> None:
        """To the end, where nothing is held and no invariant was broken."""
        for _ in range(STEPS):
            if not self.engine.busy:
                break
            self.step()
        self.engine.report()
        assert not self.engine.busy
        assert not any(self.stats.invariant_violations.values())
        assert self.stats.kv_used_bytes == self.stats.swap_used_bytes == 0


def shared_start(n: int, seed: int = 77) -> list[int]:
    return torch.randint(3, 500, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
