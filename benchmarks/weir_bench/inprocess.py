"""A real engine in this process, without HTTP or a second process: for experiments that count steps, blocks and their costs.

Boot values mean what they mean to the server: the pool, the limits and the knobs come from the same plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import psutil

from weir_server.engine.child import Model, plan_boot
from weir_server.engine.core import Engine
from weir_server.engine.memory import memory_used
from weir_server.exec.interface import Runner
from weir_server.exec.null import NullModel
from weir_server.link.messages import Admitted, Boot, Finished, Sampling, SetKnobs, Stats, Submit, Tokens
from weir_server.model.files import resolve

Key = tuple[int, int]


@dataclass(slots=True)
class Row:
    """What became of one row; times on the engine's clock, seconds. `times[i]`: when token i was there."""

    arrived: float
    cached: int = 0
    admitted: float | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]


def boot(model: str, **values: Any) -> Boot:
    """Boot values for the model that `model` names, with as many threads as there are cores."""
    return Boot(str(resolve(model)), psutil.cpu_count() or 1, **values)


def null_boot(**values: Any) -> Boot:
    """Boot values for the model that computes nothing."""
    return Boot("null", 1, null_model=True, **values)


def load(values: Boot) -> Model:
    """The model that `values` name; loading it takes seconds, so cells share it. As a server is some seconds
    after its start."""
    if values.null_model:
        return NullModel(values.page_size)
    from weir_server.exec.runner import load as load_model  # torch: not for the null model

    model = load_model(values)
    model.settle()
    return model


class Bench:
    """One engine. `rows` fills with what its rows were told."""

    def __init__(
        self, values: Boot, model: Model, clock: Callable[[], float] = time.monotonic, runner: Runner | None = None,
        **config: Any,
    ) -> None:
        """`runner` stands in for the model's own; `config`: fields of EngineConfig that no boot value sets."""
        plan = plan_boot(values, model, memory_used())
        self.clock, self.knobs, self.sizing = clock, plan.knobs, plan.sizing
        self.runner = runner or model.runner(plan.sizing.num_chunks, plan.sizing.swap_chunks)
        self.engine = Engine(self.runner, replace(plan.config, **config), plan.knobs, clock)
        self.rows: dict[Key, Row] = {}
        self._next = 0

    @property
    def stats(self) -> Stats:
        return self.engine.meter.stats

    def submit(self, prompt: list[int], max_tokens: int, *, logprobs: bool = False, **more: Any) -> int:
        """Queue a greedy request that generates exactly `max_tokens`; returns its id."""
        self._next += 1
        sampling = Sampling(max_tokens, temperature=0.0, seed=self._next, logprobs=0 if logprobs else -1)
        now = self.clock()
        for choice in range(more.get("n", 1)):
            self.rows[self._next, choice] = Row(now)
        self.engine.handle([Submit(self._next, prompt, sampling, now, **more)])
        self._hear()
        return self._next

    def set(self, **knobs: Any) -> None:
        self.knobs = self.knobs.merged(knobs)
        self.engine.handle([SetKnobs(self.knobs)])
        self._hear()

    def step(self) -> list[Key]:
        """One step; returns the rows that ended in it. Raises RuntimeError if one ended otherwise than by length."""
        self.engine.step()
        return self._hear()

    def run(self) -> None:
        while self.engine.busy:
            self.step()

    def _hear(self) -> list[Key]:
        ended = []
        for event in self.engine.report().events:
            key = (event.id, event.row)
            row = self.rows[key]
            match event:
                case Admitted(t=t, cached_tokens=cached):
                    row.admitted, row.cached = t, cached
                case Tokens(t=t, ids=ids, logprobs=logprobs):
                    row.times += [t] * len(ids)
                    row.tokens += ids
                    row.logprobs += [p.logprob for p in logprobs or ()]
                case Finished(reason=reason, message=message):
                    if reason != "length":
                        raise RuntimeError(f"request {event.id} ended as {reason}: {message}")
                    row.reason = reason
                    ended.append(key)
        return ended


def quiet() -> None:
    """Keep the engine's own log lines out of the figures."""
    logging.basicConfig(level=logging.ERROR)
