"""A world for the engine: what its clients and its operator do to it, and what must hold after each thing that they do.

`World` drives a real Engine over the auditing runner with a clock of its own. What it checks by itself, from messages and
forwards alone: one terminal event for each row (I10), the tokens that the row says undisturbed (I12), full and productive
steps (I6, I7, I8), nobody overtaken without bound (I11). `Books` reads the engine's own books for the rest (I1 … I5, I9).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from fuzz_books import Books, build
from fuzz_runner import CONTEXT, VOCAB, Asked, AuditRunner, Key, logprob

from weir_server.contract import FULL, SLIDING, Geometry, Knobs
from weir_server.link.messages import (
    DEADLINE_EXCEEDED,
    KV_BUDGET_EXCEEDED,
    Admitted,
    Cancel,
    Drain,
    Finished,
    PromptLogprobs,
    SetKnobs,
    Stop,
    Submit,
    ToChild,
    Tokens,
)

SIZE = 4  # tokens a block
CHUNK = 1000  # bytes a chunk
OVERTAKEN = 8
"""I11: nobody is overtaken more often within an effective lane."""
LANE_SECONDS = 30.0
PREFIXES = [[(7 * n + 11 * i) % VOCAB for i in range(40)] for n in range(3)]
GEOMETRIES = {
    "full": {FULL: 1},
    "sliding": {SLIDING: 1},
    "hybrid": {FULL: 2, SLIDING: 1},  # one full layer beside two sliding ones
    "wide hybrid": {FULL: 3, SLIDING: 2},  # two beside three
}


@dataclass(frozen=True)
class Setup:
    """What is fixed at start, and the first knobs."""

    geometry: str = "full"
    chunks: int = 30  # usable
    rows: int = 4
    watermark: float = 0.0
    tokens: int = 16
    pages: float = math.inf
    chunk: int | None = None
    grant: int = 16
    scheduler: str = "fifo"
    prompts: int = 4
    padded: int | None = None
    pressure: str = "newest_stalled"
    slot_victims: str | None = None
    evict_newest: bool = False
    swap: int = 0  # usable chunks
    window: int = 7
    prefix_cache: bool = True


class Clock:
    """Time that moves by a millisecond at each look, and as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def _ends(message: Cancel | Stop, key: tuple[int, int]) -> bool:
    """Whether the message ends this row: a Cancel all of its request, a Stop its own alone."""
    return key[0] == message.id and (isinstance(message, Cancel) or key[1] == message.row)


class World:
    """Use as a context manager: on the way out, what is left must come to its end."""

    def __init__(self, setup: Setup | None = None, **changes: object) -> None:
        self.setup = replace(setup or Setup(), **changes)  # type: ignore[arg-type]
        per = GEOMETRIES[self.setup.geometry]
        self.geometry = Geometry(CHUNK, SIZE, per)
        self.clock = Clock()
        self.runner = AuditRunner(
            self.geometry, self.setup.chunks + 2, self.setup.swap + 2, self.setup.window if SLIDING in per else None
        )
        self.knobs = Knobs(self.setup.rows, self.setup.chunks * CHUNK, self.setup.watermark, 1024)
        self.engine = build(self.runner, self.setup, self.knobs, self.clock, CONTEXT)
        self.books = Books(self.engine, self.geometry)
        self.said: dict[Key, list[int]] = {}
        self.told: dict[Key, int] = {}  # prompt tokens with logprobs sent
        self.ended: dict[Key, Finished] = {}
        self.admitted: dict[Key, int] = {}
        self.overtaken: Counter[Key] = Counter()
        self.stopped: set[Key] = set()
        self.lowered = self.draining = False
        self.decoding: set[Key] = set()  # rows that had a token from the last step
        self.steps = self.stuck = 0
        self._best = -1

    # ------------------------------------------------------------------------------------------------ what one can do

    def ask(
        self, prefix: int = 0, shared: int = 0, own: int = 4, max_tokens: int = 8, *, wait: float | None = None, **more: object
    ) -> Asked:
        """A request that has not been sent. `wait`: seconds to its deadline."""
        id = len(self.runner.asked) + 1
        prompt = [*PREFIXES[prefix][:shared], *((500 + 17 * i) % VOCAB for i in range(own))]
        now = self.clock.now
        return Asked(id, prompt, max_tokens, arrived=now, deadline=None if wait is None else now + wait, **more)  # type: ignore[arg-type]

    def submit(self, *args: int, **more: object) -> int:
        asked = self.ask(*args, **more)  # type: ignore[arg-type]
        self.tell([self.sent(asked)])
        return asked.id

    def sent(self, asked: Asked) -> Submit:
        """The message of a request, from now on one of ours."""
        self.runner.add(asked)
        return Submit(
            asked.id, list(asked.prompt), asked.sampling, asked.arrived, n=asked.n, cache_prompt=asked.cache,
            cache_salt=asked.salt, lane=asked.lane, deadline=asked.deadline, prompt_logprobs=asked.prompt_logprobs,
        )

    def tell(self, messages: list[ToChild]) -> None:
        self.engine.handle(messages)
        self._hear()
        self._gone(messages)
        self.check()

    def end(self, which: int, what: str, n: int = 1, during: bool = False) -> None:
        """Let something end the `which`-th live row, or its request: a client, a stop string, an error, a lost forward."""
        if not (live := self._live()):
            return
        key = live[which % len(live)]
        if what == "row error":
            self.runner.failing.add(key)
        elif what == "lost step":
            self.runner.lose = True
        else:
            if what == "stop":
                self.stopped.add(key)
            message = Cancel(key[0]) if what == "cancel" else Stop(*key, n)
            if during:
                self.step(during=[message])
            else:
                self.tell([message])

    def knob(self, **changes: object) -> None:
        """The budget is given as a share of the pool."""
        if (share := changes.pop("share", None)) is not None:
            changes["kv_cache_budget"] = max(1, int(float(share) * self.setup.chunks)) * CHUNK  # type: ignore[arg-type]
            self.lowered = True
        self.knobs = self.knobs.merged(changes)
        self.tell([SetKnobs(self.knobs)])

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def drain(self) -> None:
        """A drain whose deadline has passed: everything ends. The next life of the engine starts empty."""
        self.draining = True
        self.tell([Drain(self.clock.now)])
        assert not self.engine.busy
        self.engine.deadline = math.inf

    def step(self, times: int = 1, *, during: Iterable[Cancel | Stop] = ()) -> None:
        """`during`: messages that come in while the first of the steps computes."""
        for _ in range(times):
            if self.engine.busy:
                self._step(list(during))
                during = ()

    def run(self, most: int = 5000) -> None:
        end = self.steps + most
        while self.engine.busy:
            assert self.steps < end, "the engine does not come to rest"
            self.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.run()
            rows = sum(asked.n for asked in self.runner.asked.values())
            assert len(self.ended) == rows, f"I10: {rows - len(self.ended)} rows never ended"

    # ------------------------------------------------------------------------------------------------ what must hold

    def _step(self, during: list[Cancel | Stop]) -> None:
        waited, before, ran = self.books.queued(), self.clock.now, set(self.books.running())
        spoke = {key: len(self.said.get(key, ())) for key in self._live() if any(_ends(m, key) for m in during)}
        self.runner.transfers.clear()
        fed = self.engine.step(lambda: during)
        self.steps += 1
        expired = self._expired(before)
        assert fed or expired, "I7: a step with work at hand fed nothing"
        if fed:
            self._full(ran)
        self._order(waited, before)
        self._progress()
        self._hear()
        self._gone(during)
        for key, said in spoke.items():
            assert key not in self.ended or len(self.said.get(key, ())) == said, f"{key} says more after its end was told"
        late = [key for key in self._live() if key in expired]
        assert not late, f"{late} live on after their deadline"
        self.check()

    def _full(self, ran: set[Key]) -> None:
        """I6: the budgets of a step."""
        fed, s = self.runner.fed, self.setup
        assert 0 < sum(n for _, _, n in fed) <= s.tokens, f"I6: {fed} in a step of {s.tokens} tokens"
        pages = sum(-(-(start + n) // SIZE) for _, start, n in fed)
        assert pages <= s.pages or len(fed) == 1 or FULL not in self.geometry.blocks_per_chunk, f"I6: {pages} pages are read"
        runs = self.books.running()
        joined = [key for key in runs if key not in ran]
        assert not joined or len(runs) <= self.knobs.max_batch_size, f"I6: {len(runs)} rows after {joined} joined"
        for way in ("in", "out"):
            assert self.runner.transfers[way] <= 1, f"{self.runner.transfers[way]} transfers {way} in one step"
        if joined and self.decoding & {key for key, _, _ in fed}:
            limit = min(s.chunks, (self.knobs.kv_cache_budget or 0) // CHUNK)
            most = limit - math.ceil(self.knobs.admission_watermark * limit)
            held = self.engine.meter.stats.kv_used_bytes // CHUNK
            assert held <= most, f"{joined} joined beside decodes: {held} chunks are held, {most} may be"
        self.decoding = set(self.runner.sampled)

    def _order(self, waited: list[Key], before: float) -> None:
        """I11: whoever leaves the queue for the batch overtakes those who were before it and still wait."""
        runs, waits = set(self.books.running()), set(self.books.waiting())
        joined = [key for key in waited if key in runs]
        for key in (key for key in waited if key in waits):
            first = (self._lane(key, before), key)
            passed = sum((self._lane(other, self.clock.now), other) > first for other in joined)
            self.overtaken[key] += passed
            assert self.overtaken[key] <= OVERTAKEN, f"I11: {key} was overtaken {self.overtaken[key]} times"
        for key in joined:
            self.overtaken.pop(key, None)

    def _lane(self, key: Key, now: float) -> int:
        """The effective lane; a later `now` never gives a larger one."""
        asked = self.runner.asked[key[0]]
        return max(0, asked.lane - int((now - asked.arrived) / LANE_SECONDS))

    def _progress(self) -> None:
        """I8: something that no forward had computed before, or an end, within as many steps as a re-prefill of all takes."""
        best = sum(self.runner.reached.values()) + len(self.ended)
        self.stuck, self._best = (self.stuck + 1, self._best) if best <= self._best else (0, best)
        most = 8 + 8 * CONTEXT * max(len(self.books.running()), 1) // self.books.piece()
        assert self.stuck <= most, f"I8: nothing new in {self.stuck} steps"

    def _live(self) -> list[Key]:
        return [key for key in self.runner.length if key not in self.ended]

    def _expired(self, now: float) -> set[Key]:
        return {key for key in self._live() if (at := self.runner.asked[key[0]].deadline) is not None and at <= now}

    def _gone(self, messages: Sequence[ToChild]) -> None:
        for message in messages:
            if isinstance(message, Cancel) and message.id in self.runner.asked:
                left = [key for key in self._live() if key[0] == message.id]
                assert not left, f"{left} were cancelled and live on"

    def _hear(self) -> None:
        for event in self.engine.report().events:
            key = (event.id, event.row)
            asked = self.runner.asked[event.id]
            assert key not in self.ended, f"I10: {event} after the end"
            match event:
                case Admitted(cached_tokens=cached):
                    assert key not in self.admitted, "admitted twice"
                    assert not cached or asked.cache or asked.n > 1, "cache_prompt: false"
                    assert cached < len(asked.prompt), "nothing is left to compute the first token from"
                    assert not cached or asked.prompt_logprobs < 0, "prompt logprobs bypass prefix reads"
                    self.admitted[key] = cached
                case PromptLogprobs():
                    self._prompt_logprobs(key, asked, event)
                case Tokens():
                    said = self.said.setdefault(key, [])
                    told = self.told.get(key, 0)
                    assert asked.prompt_logprobs < 0 or told == len(asked.prompt) - 1, "tokens come before prompt logprobs"
                    assert (event.logprobs is None) == (asked.logprobs < 0)
                    said += event.ids
                case Finished():
                    self.ended[key] = event
                    self._end(key, asked, event)

    def _prompt_logprobs(self, key: Key, asked: Asked, event: PromptLogprobs) -> None:
        told = self.told.get(key, 0)
        assert asked.prompt_logprobs >= 0 and not self.said.get(key), "prompt logprobs out of place"
        assert event.start == told + 1, f"prompt logprobs begin at {event.start}, {told} are told"
        tags = asked.futures[key[1]].tags[told : told + len(event.logprobs)]
        assert event.logprobs == [logprob(tag, asked.prompt_logprobs) for tag in tags], "prompt logprobs of other tokens"
        self.told[key] = told + len(event.logprobs)
        assert self.told[key] < max(1, len(asked.prompt)), "prompt logprobs beyond the prompt"

    def _end(self, key: Key, asked: Asked, event: Finished) -> None:
        """Each reason only where it is due; and what was said is the whole answer where nobody cut it short."""
        said, future = self.said.get(key, []), asked.futures[key[1]]
        whole = future.tokens[len(asked.prompt) :]
        assert said == whole[: len(said)], f"I12: {key} says {said}, undisturbed {whole}"
        match event.reason:
            case "length" | "stop" if key not in self.stopped:
                assert said == whole and event.reason == future.reason, f"I12: {key} ended as {event.reason} after {len(said)}"
            case "stop":
                assert event.generated <= len(said)
            case "error":
                assert key in self.runner.failed or self._impossible(asked), f"{key}: {event.message}"
            case "handed_back":
                assert key not in self.admitted, f"{key} was admitted before it was handed back"
                assert self.draining or (self.lowered and event.message.startswith(KV_BUDGET_EXCEEDED)), event.message
            case "cancelled" if event.message == DEADLINE_EXCEEDED:
                assert asked.deadline is not None and asked.deadline <= self.clock.now, "cut before its deadline"
        if event.reason != "stop":
            assert event.generated == len(said), f"{event.generated} generated, {len(said)} sent"

    def _impossible(self, asked: Asked) -> bool:
        """Whether a request may be refused for its size: no prompt, no room for an answer, or more than the pool holds."""
        per, final = self.geometry.blocks_per_chunk, asked.final - 1
        chunks = math.ceil(math.ceil(final / SIZE) / per[FULL]) if FULL in per else 0
        if SLIDING in per:
            ring = math.ceil(min(self.setup.window + self.books.piece(), final) / SIZE)
            chunks += ring if FULL in per else math.ceil(ring / per[SLIDING])
        return not asked.prompt or len(asked.prompt) >= CONTEXT or chunks > self.setup.chunks

    def check(self) -> None:
        assert not self.runner.faults, self.runner.faults
        self.books.check(self.setup.chunks, self.setup.swap)
        live = set(self._live())
        known = {*self.books.running(), *self.books.waiting()}
        assert live == known, f"I10: {live ^ known} live without a trace"
        for key in live:
            said, asked = self.said.get(key, []), self.runner.asked[key[0]]
            assert said == asked.futures[key[1]].tokens[len(asked.prompt) :][: len(said)], f"I12: {key} says {said}"
