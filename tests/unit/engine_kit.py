"""A real Engine over a runner that keeps KV as tokens and complains about any read that is not what the row wrote.

`AuditRunner` is the oracle's hand: it stores for each slot of each block which token was fed there, and checks at every row
that all positions before `start` hold exactly the row's own context. A wrong prefix hit, a missing copy, a block written by
two rows, a wrong position: each shows here, and none of it shares code with the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from weir_server.contract import Geometry, Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.interface import RowResult, RowWork
from weir_server.exec.null import NullRunner
from weir_server.link.messages import Admitted, Finished, Report, Sampling, SetKnobs, Stats, Submit, Tokens
from weir_server.policy.limits import Limits

SIZE = 4  # tokens a block
CHUNK = 1000  # bytes a chunk
VOCAB = 1000


class AuditRunner(NullRunner):
    def __init__(self) -> None:
        super().__init__(Geometry(CHUNK, SIZE, {"full_attention": 1}), VOCAB)
        self.kv: dict[tuple[int, int], int] = {}
        self.steps: list[list[RowWork]] = []
        self.released: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.faults: list[str] = []
        self.spoil: Callable[[list[RowResult]], list[RowResult]] = lambda results: results

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        self.steps.append(list(rows))
        for row in rows:
            for position in range(row.start):
                held = self.kv.get(self._slot(row, position))
                if held != row.context[position]:
                    self.faults.append(f"position {position} reads {held}, the row has {row.context[position]}")
        for row in rows:
            if list(row.context[row.start :]) != list(row.tokens):
                self.faults.append(f"tokens from {row.start} are not those of the context")
            for i, token in enumerate(row.tokens):
                slot = self._slot(row, row.start + i)
                if slot[0] < 2:
                    self.faults.append("a row writes to a padding chunk")
                self.kv[slot] = token
        return self.spoil(super().execute(rows))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: str = "full_attention") -> None:
        self.copies += pairs
        for src, dst in pairs:
            for offset in range(SIZE):
                if (src, offset) in self.kv:
                    self.kv[dst, offset] = self.kv[src, offset]

    def release_chunks(self, chunks: Sequence[int]) -> None:
        self.released += chunks
        for key in [key for key in self.kv if key[0] in set(chunks)]:
            del self.kv[key]

    @staticmethod
    def _slot(row: RowWork, position: int) -> tuple[int, int]:
        return row.blocks[position // SIZE], position % SIZE


@cache
def _expected(seed: int, choice: int, position: int) -> int:
    x = (seed * 11400714819323198485 + choice * 15111065706836454659 + position * 10140184033053478359) % 2**64
    x = (x ^ x >> 30) * 13787848793156543929 % 2**64
    x = (x ^ x >> 27) * 10723151780598845931 % 2**64
    return (x ^ x >> 31) % VOCAB


def expected(seed: int, choice: int, prompt: int, count: int) -> list[int]:
    """What a row must say: splitmix64 over (seed, choice, position), written out here once more."""
    return [_expected(seed, choice, position) for position in range(prompt, prompt + count)]


class Clock:
    """Time that moves by one millisecond at each look, and as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Kit:
    """An engine, and what its clients have seen."""

    def __init__(
        self, *, blocks: int = 64, rows: int = 4, watermark: float = 0.0, context: int = 200, budget: int | None = -1,
        tokens: int = 64, chunk: int | None = None, grant: int = 16, prefix_cache: bool = True,
    ) -> None:
        self.clock = Clock()
        self.runner = AuditRunner()
        self.knobs = Knobs(rows, blocks * CHUNK if budget == -1 else budget, watermark, 32)
        config = EngineConfig(context, blocks + 2, Limits(tokens, chunk=chunk, grant=grant), "model", prefix_cache)
        self.engine = Engine(self.runner, config, self.knobs, self.clock)
        self.said: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], Finished] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.order: list[tuple[int, int]] = []  # of admission
        self._next = 0

    def submit(self, prompt: int | list[int], max_tokens: int = 8, **more: object) -> int:
        """Queue a request; an int prompt means so many tokens that no other request has."""
        self._next += 1
        if isinstance(prompt, int):
            prompt = [(self._next * 7 + i * 13) % VOCAB for i in range(prompt)]
        sampling = {k: more.pop(k) for k in ("seed", "stop_ids", "min_tokens") if k in more}
        submit = Submit(
            self._next, prompt, Sampling(max_tokens=max_tokens, **{"seed": self._next, **sampling}), self.clock.now, **more
        )
        self.engine.handle([submit])
        self.report()
        return self._next

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            if self.engine.busy:
                assert self.engine.step(), "a step with work at hand fed nothing"
            assert not self.runner.faults
            self.report()

    def run(self, most: int = 2000) -> None:
        while self.engine.busy:
            most -= 1
            assert most, "the engine does not come to an end"
            self.step()

    def report(self) -> Report:
        report = self.engine.report()
        for event in report.events:
            key = (event.id, event.row)
            match event:
                case Admitted():
                    assert key not in self.cached
                    self.cached[key] = event.cached_tokens
                    self.order.append(key)
                case Tokens():
                    assert key not in self.ended
                    self.said.setdefault(key, []).extend(event.ids)
                case Finished():
                    assert key not in self.ended, "two terminal events"
                    self.ended[key] = event
        return report

    def knob(self, **changes: object) -> None:
        self.knobs = self.knobs.merged(changes)
        self.engine.handle([SetKnobs(self.knobs)])
        self.report()

    @property
    def stats(self) -> Stats:
        return self.engine.meter.stats

    def reason(self, id: int, row: int = 0) -> str:
        return self.ended[id, row].reason
