"""A real Engine over a runner that keeps KV as tokens and complains about any read that is not what the row wrote.

`AuditRunner` is the oracle's hand: it stores for each slot of each block which token was fed there, of full attention and of
rings alike, in the pool and in the swap pool, and checks for every row that all positions that it sees hold exactly the row's
own context. A wrong prefix hit, a missing copy, a block written by two rows, a chunk that two types write, a ring overwritten
too soon, a swap of the wrong block: each shows here, and none of it shares code with the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from weir_server.contract import Geometry, Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.interface import RowResult, RowWork
from weir_server.exec.null import NullRunner
from weir_server.link.messages import (
    Admitted,
    Finished,
    PromptLogprobs,
    Report,
    Sampling,
    SetKnobs,
    Stats,
    Submit,
    TokenLogprobs,
    Tokens,
)
from weir_server.policy.limits import Limits

SIZE = 4  # tokens a block
CHUNK = 1000  # bytes a chunk
VOCAB = 1000
FULL, RING = "full_attention", "sliding_attention"


class Memory:
    """Chunks, each of the type that wrote to it last: what another type had there is gone."""

    def __init__(self, per_chunk: Mapping[str, int]) -> None:
        self.per_chunk = per_chunk
        self.chunks: dict[int, tuple[str, dict[tuple[int, int], int]]] = {}

    def write(self, kind: str, block: int, offset: int, token: int) -> None:
        chunk = block // self.per_chunk[kind]
        if chunk not in self.chunks or self.chunks[chunk][0] != kind:
            self.chunks[chunk] = (kind, {})
        self.chunks[chunk][1][block, offset] = token

    def read(self, kind: str, block: int, offset: int) -> int | None:
        owner, slots = self.chunks.get(block // self.per_chunk[kind], (kind, {}))
        return slots.get((block, offset)) if owner == kind else None

    def copy(self, kind: str, src: int, target: Memory, dst: int) -> None:
        for offset in range(SIZE):
            if (token := self.read(kind, src, offset)) is not None:
                target.write(kind, dst, offset, token)


class AuditRunner(NullRunner):
    def __init__(self, per_chunk: Mapping[str, int] = {FULL: 1}, window: int | None = None) -> None:
        super().__init__(Geometry(CHUNK, SIZE, per_chunk), VOCAB, window)
        self.kv, self.swap = Memory(per_chunk), Memory(per_chunk)
        self.steps: list[list[RowWork]] = []
        self.released: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.swaps: list[tuple[str, int]] = []  # direction and number of blocks of each transfer
        self.faults: list[str] = []
        self.spoil: Callable[[list[RowResult]], list[RowResult]] = lambda results: results

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        self.steps.append(list(rows))
        for row in rows:
            if list(row.context[row.start : row.start + len(row.tokens)]) != list(row.tokens):
                self.faults.append(f"tokens from {row.start} are not those of the context")
            for i, token in enumerate(row.tokens):
                for kind, block, offset in self._slots(row, row.start + i):
                    if block < 2 * self.geometry.blocks_per_chunk[kind]:
                        self.faults.append("a row writes to a padding chunk")
                    self.kv.write(kind, block, offset, token)
        for row in rows:
            self._check(row)
        return self.spoil(super().execute(rows))

    def _check(self, row: RowWork) -> None:
        for position in range(row.start + len(row.tokens)):
            for kind, block, offset in self._slots(row, position):
                if kind == RING and self.window and position <= row.start - self.window:
                    continue
                held = self.kv.read(kind, block, offset)
                if held != row.context[position]:
                    self.faults.append(f"{kind} position {position} reads {held}, the row has {row.context[position]}")

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: str = FULL) -> None:
        self.copies += pairs
        for src, dst in pairs:
            self.kv.copy(kind, src, self.kv, dst)

    def swap_out(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._swap("out", pairs, self.kv, self.swap)

    def swap_in(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._swap("in", pairs, self.swap, self.kv)

    def _swap(self, way: str, pairs: Mapping[str, Sequence[tuple[int, int]]], source: Memory, target: Memory) -> None:
        self.swaps.append((way, sum(map(len, pairs.values()))))
        for kind, blocks in pairs.items():
            for src, dst in blocks:
                source.copy(kind, src, target, dst)

    def release_chunks(self, chunks: Sequence[int]) -> None:
        self.released += chunks
        for chunk in chunks:
            self.kv.chunks.pop(chunk, None)

    def _slots(self, row: RowWork, position: int) -> list[tuple[str, int, int]]:
        slots = []
        if FULL in self.geometry.blocks_per_chunk:
            slots.append((FULL, row.blocks[position // SIZE], position % SIZE))
        if RING in self.geometry.blocks_per_chunk:
            slots.append((RING, row.ring[position // SIZE % len(row.ring)], position % SIZE))
        return slots


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
        tokens: int = 64, chunk: int | None = None, grant: int = 16, prefix_cache: bool = True, swap: int = 0,
        per_chunk: Mapping[str, int] = {FULL: 1}, window: int | None = None, newest: bool = False, **limits: object,
    ) -> None:  # fmt: skip
        """`blocks`, `swap`: usable chunks of the pool and of the swap pool."""
        self.clock = Clock()
        self.runner = AuditRunner(per_chunk, window)
        self.knobs = Knobs(rows, blocks * CHUNK if budget == -1 else budget, watermark, 32)
        config = EngineConfig(
            context, blocks + 2, Limits(tokens, chunk=chunk, grant=grant, **limits), "model", prefix_cache,  # type: ignore[arg-type]
            newest, swap + 2 if swap else 0,
        )  # fmt: skip
        self.engine = Engine(self.runner, config, self.knobs, self.clock)
        self.said: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], Finished] = {}
        self.cached: dict[tuple[int, int], int] = {}
        self.order: list[tuple[int, int]] = []  # of admission
        self.told: dict[tuple[int, int], list[TokenLogprobs]] = {}  # of prompts
        self._next = 0

    def submit(self, prompt: int | list[int], max_tokens: int = 8, **more: object) -> int:
        """Queue a request; an int prompt means so many tokens that no other request has."""
        self._next += 1
        if isinstance(prompt, int):
            prompt = [(self._next * 7 + i * 13) % VOCAB for i in range(prompt)]
        sampling = {k: more.pop(k) for k in ("seed", "stop_ids", "min_tokens") if k in more}
        more.setdefault("arrived", self.clock.now)
        submit = Submit(
            self._next, prompt, Sampling(max_tokens=max_tokens, **{"seed": self._next, **sampling}), **more  # type: ignore[arg-type]
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
                case PromptLogprobs():
                    told = self.told.setdefault(key, [])
                    assert key not in self.said and event.start == len(told) + 1
                    told += event.logprobs
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
