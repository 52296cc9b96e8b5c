"""A runner that keeps what each slot of each block holds, and an oracle of what a request must say.

The "model" is a chain of hashes: the KV of a position stands for all tokens up to it and for whose cache it may lie in, and
a token follows from the KV that its row really read. So whatever goes wrong with a block (a wrong prefix hit, a copy left
out, a slot of a ring overwritten too early, a chunk in two allocators' hands) is seen where it is read, and again in the
output. `Asked` knows a request's whole future beforehand, from its own words alone; nothing here is shared with the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weir_server.contract import FULL, SLIDING, Geometry
from weir_server.exec.interface import RowResult, RowWork
from weir_server.link.messages import Sampling, TokenLogprobs

VOCAB = 997
CONTEXT = 60
Key = tuple[int, int]  # id of the request (its seed too), choice


class StepLost(Exception):
    """A forward that fails as a whole."""


@dataclass
class Future:
    """What a row says if nobody disturbs it: `tokens` from the prompt to the end, `tags[p]` the KV of position p."""

    tokens: list[int]
    tags: list[int]
    reason: str


@dataclass
class Asked:
    """One request, as it was sent."""

    id: int
    prompt: list[int]
    max_tokens: int
    n: int = 1
    cache: bool = True
    salt: str = ""
    lane: int = 1
    arrived: float = 0.0
    deadline: float | None = None
    prompt_logprobs: int = -1
    logprobs: int = -1
    stop_at: int | None = None  # the token that choice 0 says there is its end-of-sequence
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    futures: list[Future] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.stop_at is not None:
            said = self._future(0).tokens[len(self.prompt) :]
            self.stop_ids = tuple(said[self.stop_at : self.stop_at + 1])
        self.futures = [self._future(choice) for choice in range(self.n)]

    @property
    def final(self) -> int:
        return min(len(self.prompt) + self.max_tokens, CONTEXT)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.min_tokens, seed=self.id, stop_ids=self.stop_ids, logprobs=self.logprobs)

    def _future(self, choice: int) -> Future:
        tag, tokens, tags = _root(self), list(self.prompt), list[int]()
        for token in self.prompt:
            tags.append(tag := hash((tag, token)))
        while tokens and len(tokens) < self.final:
            tokens.append(drawn(tag, self.id, choice))
            if tokens[-1] in self.stop_ids and len(tokens) - len(self.prompt) >= self.min_tokens:
                return Future(tokens, tags, "stop")
            tags.append(tag := hash((tag, tokens[-1])))
        return Future(tokens, tags, "length")


def _root(asked: Asked) -> int:
    """Where a chain begins: requests that may share KV begin alike. Numbers, since strings hash anew in each process."""
    return hash((1, *asked.salt.encode())) if asked.cache else hash((2, asked.id))


def drawn(tag: int, seed: int, choice: int) -> int:
    return hash((tag, seed, choice)) % VOCAB


def logprob(tag: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(-(tag % 1000) / 100, [((tag + i) % VOCAB, -float(i)) for i in range(k)])


class Memory:
    """One pool. A chunk belongs to the attention type that wrote to it last; what another type had there is lost."""

    def __init__(self, geometry: Geometry, chunks: int) -> None:
        self.size, self.per, self.chunks = geometry.block_tokens, geometry.blocks_per_chunk, chunks
        self.owner: dict[int, str] = {}
        self.blocks: dict[str, dict[int, list[int | None]]] = {kind: {} for kind in self.per}

    def block(self, kind: str, block: int) -> list[int | None]:
        return self.blocks[kind].get(block) or [None] * self.size

    def open(self, kind: str, block: int) -> list[int | None]:
        """The block's slots, to write to. Raises ValueError for one that no row may own."""
        chunk = block // self.per[kind]
        if not 2 <= chunk < self.chunks:
            raise ValueError(f"block {block} of {kind} lies in chunk {chunk} of {self.chunks}, the first two for padding")
        if self.owner.get(chunk) != kind:
            self.wipe(chunk)
            self.owner[chunk] = kind
        return self.blocks[kind].setdefault(block, [None] * self.size)

    def wipe(self, chunk: int) -> None:
        if (kind := self.owner.pop(chunk, None)) is not None:
            for block in range(chunk * self.per[kind], (chunk + 1) * self.per[kind]):
                self.blocks[kind].pop(block, None)


class AuditRunner:
    """See exec.interface.Runner. `faults` is what it complains about; `failing` and `lose` make a row or a step go wrong."""

    supports_batching = True
    vocab_size = VOCAB

    def __init__(
        self, geometry: Geometry, chunks: int, swap_chunks: int = 0, window: int | None = None
    ) -> None:
        self.geometry, self.window = geometry, window
        self.pool, self.swap = Memory(geometry, chunks), Memory(geometry, swap_chunks)
        self.asked: dict[int, Asked] = {}
        self.length: dict[Key, int] = {}  # tokens that a row has: its prompt and what it was told
        self.reached: dict[Key, int] = {}  # most tokens ever computed of a row
        self.rings: dict[Key, int] = {}
        self.failing: set[Key] = set()
        self.failed: set[Key] = set()
        self.lose = False
        self.faults: list[str] = []
        self.fed: list[tuple[Key, int, int]] = []  # of the last step: row, start, tokens
        self.sampled: list[Key] = []  # rows that it gave a token
        self.moved: Counter[str] = Counter()
        self.transfers: Counter[str] = Counter()  # since the World last looked

    def add(self, asked: Asked) -> None:
        self.asked[asked.id] = asked
        for choice in range(asked.n):
            self.length[asked.id, choice] = len(asked.prompt)
            self.reached[asked.id, choice] = 0

    # ------------------------------------------------------------------------------------------------ the runner

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        self.sampled = []
        self.fed = [((row.sampling.seed, row.choice), row.start, len(row.tokens)) for row in rows]
        if len({key for key, _, _ in self.fed}) < len(rows):
            self.faults.append("a row is twice in a step")
        if self.lose:
            self.lose = False
            self.failed |= {key for key, _, _ in self.fed}
            raise StepLost
        keyed = [(key, row) for (key, _, _), row in zip(self.fed, rows, strict=True)]
        written = [self._write(key, row) for key, row in keyed]
        for key, row in keyed:
            self._read(key, row)
        return [self._result(key, row, tags) for (key, row), tags in zip(keyed, written, strict=True)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], kind: str = FULL) -> None:
        self.moved[f"copied {kind}"] += len(pairs)
        for src, dst in pairs:
            self.pool.open(kind, dst)[:] = self.pool.block(kind, src)

    def swap_out(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._transfer("out", self.pool, self.swap, pairs)

    def swap_in(self, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self._transfer("in", self.swap, self.pool, pairs)

    def _transfer(self, way: str, source: Memory, target: Memory, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self.transfers[way] += 1
        for kind, moves in pairs.items():
            self.moved[f"swapped {way} {kind}"] += len(moves)
            if len({dst for _, dst in moves}) < len(moves):
                self.faults.append(f"a block of {kind} is swapped {way} over another")
            for src, dst in moves:
                target.open(kind, dst)[:] = source.block(kind, src)

    def release_chunks(self, chunks: Sequence[int]) -> None:
        self.moved["released"] += len(chunks)
        for chunk in chunks:
            self.pool.wipe(chunk)

    # ------------------------------------------------------------------------------------------------ the audit

    def _write(self, key: Key, row: RowWork) -> list[int]:
        """Write the row's tokens where its tables say, each tag from the one that lies before it; returns the tags."""
        future, start, end = self.asked[key[0]].futures[key[1]], row.start, row.start + len(row.tokens)
        fault = self._wrong(key, row, future, end)
        if fault:
            self.faults.append(f"row {key} at {start}: {fault}")
        tag = self._at(row, start - 1) if start else _root(self.asked[key[0]])
        tags = []
        for position, token in enumerate(row.tokens, start):
            tag = hash((tag, token))
            tags.append(tag)
            for kind, block in self._homes(row, position):
                self.pool.open(kind, block)[position % self.pool.size] = tag
        self.reached[key] = max(self.reached[key], end)
        return tags

    def _wrong(self, key: Key, row: RowWork, future: Future, end: int) -> str | None:
        """What the engine asks for, against what the row has."""
        length, size, start = self.length[key], self.pool.size, row.start
        if not row.tokens or end > length:
            return f"{len(row.tokens)} tokens are fed, the row has {length}"
        if row.sample != (end == length):
            return f"sample is {row.sample} at {end} of {length} tokens"
        if list(row.tokens) != future.tokens[start:end] or list(row.context[:end]) != future.tokens[:end]:
            return "the tokens are not the row's own"
        if row.prompt_len != len(self.asked[key[0]].prompt):
            return f"prompt_len is {row.prompt_len}"
        if FULL in self.pool.per and (len(row.blocks) * size < end or len(set(row.blocks)) < len(row.blocks)):
            return f"the table {row.blocks} does not hold {end} tokens"
        if SLIDING in self.pool.per:
            if not row.ring or len(set(row.ring)) < len(row.ring):
                return f"the ring is {row.ring}"
            if self.rings.setdefault(key, len(row.ring)) != len(row.ring):
                return f"the ring had {self.rings[key]} blocks and has {len(row.ring)}"
        return None

    def _homes(self, row: RowWork, position: int) -> list[tuple[str, int]]:
        i, homes = position // self.pool.size, []
        if FULL in self.pool.per:
            homes.append((FULL, row.blocks[i]))
        if SLIDING in self.pool.per:
            homes.append((SLIDING, row.ring[i % len(row.ring)]))
        return homes

    def _at(self, row: RowWork, position: int) -> int | None:
        """The tag of the position before those that are fed: the window is at least two, so that they see it."""
        kind, block = self._homes(row, position)[0]
        return self.pool.block(kind, block)[position % self.pool.size]

    def _read(self, key: Key, row: RowWork) -> None:
        """After all writes of the step: everything that the fed tokens see must be the row's own."""
        tags, end, size = self.asked[key[0]].futures[key[1]].tags, row.start + len(row.tokens), self.pool.size
        for kind in self.pool.per:
            first = max(0, row.start - (self.window or 0) + 1) if kind == SLIDING else 0
            for i in range(first // size, -(-end // size)):
                low, high = max(first, i * size), min(end, (i + 1) * size)
                block = row.blocks[i] if kind == FULL else row.ring[i % len(row.ring)]
                held = self.pool.block(kind, block)[low - i * size : high - i * size]
                if held != tags[low:high]:
                    self.faults.append(f"row {key} reads in {kind} at {low} … {high - 1} what is not its own (block {block})")

    def _result(self, key: Key, row: RowWork, tags: list[int]) -> RowResult:
        if key in self.failing:
            self.failing.discard(key)
            self.failed.add(key)
            return RowResult(error="the row's logits are not finite")
        result = RowResult()
        if row.prompt_logprobs >= 0:
            asked = max(0, min(len(tags), row.prompt_len - 1 - row.start))
            result.prompt_logprobs = [logprob(tag, row.prompt_logprobs) for tag in tags[:asked]]
        if row.sample:
            result.token = drawn(tags[-1], *key)
            if row.sampling.logprobs >= 0:
                result.logprobs = logprob(tags[-1], row.sampling.logprobs)
            self.length[key] += 1
            self.sampled.append(key)
        return result
