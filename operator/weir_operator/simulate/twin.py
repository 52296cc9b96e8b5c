"""The same pod without its per-token work: a few numbers a row, and the server's policy only where a step has a choice.

What it skips is what cannot differ. While every row in the batch decodes and nobody can be admitted, a step gives each row
one token; so a row is three step numbers (its first token, its next interval, its last token), and a step costs the same for
8 rows as for 200. Wherever a prompt is prefilled or a slot is free for one that waits, the server's own `policy.step.decide`
says what happens, and the queue gate, knobs, observations and window are the server's as in `pod.Pod`.

Bound: no prefix cache and no preemption. Where running rows would have to give way it raises Pressed, and the caller runs the
same arrivals through `pod.Pod`. Cost: about 20 µs a step, whatever the rows (Pod: 200 µs and more with each row).
tests/unit/test_twin.py holds both equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from weir_operator.simulate.load import Arrival
from weir_operator.simulate.port import BLOCK_TOKENS, CHUNK_BYTES, PodSetup, Port
from weir_server.contract import BOUNDS, STEP_PRODUCTS, STEP_SUMS, Knobs, Window
from weir_server.engine.meter import accrue
from weir_server.http.observe import INTERVAL_EVERY, INTERVAL_SECONDS, INTERVAL_TOKENS, Row
from weir_server.kv.shape import Need, Room
from weir_server.link.messages import Stats
from weir_server.policy.state import Running, State, Waiting
from weir_server.policy.step import decide


class Pressed(Exception):
    """Rows would have to give way to others for KV, or KV itself is to move: beyond this model."""


class _Row:
    __slots__ = ("arrival", "begun", "blocks", "computed", "due", "ends", "output", "passed", "seen")

    def __init__(self, arrival: Arrival, context: int) -> None:
        self.arrival = arrival
        self.seen = Row(arrival.at, arrival.prompt)
        self.output = min(arrival.output, context - arrival.prompt)
        self.computed = self.blocks = self.passed = 0
        self.begun = self.ends = self.due = 0  # numbers of steps: first token, last token, next interval

    @property
    def reach(self) -> int:
        """Tokens that it needs KV for when it is admitted."""
        return min(self.arrival.prompt + 1, self.arrival.prompt + self.output - 1)


class Twin(Port):
    """See the module. Where nobody is to read its window (`watched` False) it does not gather what only that would show."""

    def __init__(self, setup: PodSetup, watched: bool = True) -> None:
        stats = Stats(
            head_wait_seconds=dict.fromkeys(BOUNDS, 0.0), step=dict.fromkeys(STEP_SUMS, 0.0),
            decode_only=dict.fromkeys(STEP_SUMS, 0.0), products=dict.fromkeys(STEP_PRODUCTS, 0.0),
        )
        super().__init__(setup, stats)
        self._watched = watched
        self._limit = min(setup.kv_blocks, (self.board.target.kv_cache_budget or 0) // CHUNK_BYTES)
        self._waiting: deque[_Row] = deque()
        self._prefilling: list[_Row] = []
        self._decoding: dict[_Row, None] = {}
        self._context = 0  # tokens that the decoding rows read in the next step
        self._used = 0  # KV blocks
        self._starved = 0
        self._ends: list[float] = []  # of every step
        self._grow: dict[int, list[_Row]] = {}  # step → rows that need a block for it
        self._count: dict[int, list[_Row]] = {}  # step → rows that give a decode interval after it
        self._last: dict[int, list[_Row]] = {}  # step → rows that end with it
        self._sums = [0.0] * (len(STEP_SUMS) + len(STEP_PRODUCTS))

    @property
    def effective(self) -> Knobs:
        t, running = self.board.target, len(self._decoding) + len(self._prefilling)
        return Knobs(max(t.max_batch_size, running), self._limit * CHUNK_BYTES, t.admission_watermark, t.max_queue_depth)

    @property
    def idle(self) -> bool:
        return not (self._decoding or self._prefilling or self._waiting)

    def run(self, until: float) -> None:
        while self.now < until:
            self._arrive()
            if not self.idle:
                self._step()
                self._settle()
            else:
                self.now = min(until, self.inbox[0].at) if self.inbox else until

    def _set(self, target: Knobs) -> None:
        if (target.kv_cache_budget or 0) // CHUNK_BYTES != self._limit:
            raise Pressed

    def _arrive(self) -> None:
        if not self.inbox or self.inbox[0].at > self.now:
            return
        taken: list[_Row] = []
        while self.inbox and self.inbox[0].at <= self.now:
            arrival = self.inbox.popleft()
            if self._lets_in(arrival, len(taken)):
                row = _Row(arrival, self.setup.context)
                if _blocks(row.reach) > self._limit or row.output < 1:
                    raise Pressed
                self.seen.queue([row.seen], retry=arrival.retry)
                taken.append(row)
        self._waiting.extend(taken)
        self._gauge(self._stats.bound)

    def _gauge(self, bound: str | None) -> None:
        s = self._stats
        s.running, s.prefilling = len(self._decoding) + len(self._prefilling), len(self._prefilling)
        s.waiting = len(self._waiting)
        s.bound = bound if self._waiting else None
        s.oldest_arrival = self._waiting[0].arrival.at if self._waiting else None
        s.kv_used_bytes = self._used * CHUNK_BYTES

    # ---- one step, in the order of engine.core.Engine.step

    def _step(self) -> None:
        start, number = self.now, len(self._ends)
        growing = self._grow.pop(number, ())
        if len(growing) > self._limit - self._used:
            raise Pressed
        fed: list[tuple[_Row, int]] = []
        slots = self.board.target.max_batch_size - len(self._decoding) - len(self._prefilling)
        if self._prefilling or (self._waiting and slots > 0):
            fed, bound = self._plan(number, len(growing))
        else:
            bound, self._starved = ("drain" if slots < 0 else "slots"), 0
        for row in growing:
            row.blocks += 1
            if (again := number + BLOCK_TOKENS) <= row.ends:
                self._grow.setdefault(again, []).append(row)
        self._used += len(growing)
        rows, context = len(self._decoding), self._context
        self._gauge(bound)
        prefill = sum(n for _, n in fed)
        seconds = self._forward(rows, context, fed)
        if self._watched:
            accrue(self._stats, seconds, bool(self._decoding))
        self._arrive()
        self._commit(number, fed)
        if self._watched:
            self._meter(self.now - start, rows, context, prefill)
        self._gauge(self._stats.bound)

    def _plan(self, number: int, growing: int) -> tuple[list[tuple[_Row, int]], str | None]:
        """The server's policy on this step: prompt tokens by row, the admitted ones included, and what the head waits for."""
        offered: list[_Row] = []

        def waiting() -> Iterator[Waiting]:
            for row in self._waiting:
                offered.append(row)
                yield Waiting(left=row.arrival.prompt, need=Need(_blocks(row.reach)), passed=row.passed)

        oldest = next(iter(self._decoding), None)
        shown = number - oldest.begun if oldest else 0
        decoding = [Running(left=0, need=0, pages=0, computed=0, generated=shown)] * len(self._decoding)
        if growing:
            decoding[0] = decoding[0]._replace(need=growing)
        prefilling = [Running(r.arrival.prompt - r.computed, 0, r.blocks, r.computed) for r in self._prefilling]
        target, free = self.board.target, self._limit - self._used
        plan = decide(State(
            running=decoding + prefilling, waiting=waiting(), queued=len(self._waiting),
            head_lane=1 if self._waiting else None, rows=target.max_batch_size,
            room=Room(free), growth=free, budget=self._limit, watermark=target.admission_watermark, starved=self._starved,
            limits=self.setup.limits,
        ))
        self._starved = plan.starved
        fed = [(row, n) for row, n in zip(self._prefilling, plan.take[len(decoding):], strict=True) if n]
        joins = dict(plan.admit)
        for place, row in enumerate(offered):
            if n := joins.get(place):
                self._waiting.remove(row)
                row.blocks = _blocks(row.reach)
                self._used += row.blocks
                self._prefilling.append(row)
                self.seen.admit(row.seen, self.now, 0)
                fed.append((row, n))
            else:
                row.passed += sum(other > place for other in joins)
        return fed, plan.bound

    def _forward(self, rows: int, context: int, fed: list[tuple[_Row, int]]) -> float:
        """The clock jumps. A piece of one token costs what a decoding row costs."""
        single = [row.computed + 1 for row, n in fed if n == 1]
        seconds = self.step_time(rows + len(single), context + sum(single), sum(n for _, n in fed) - len(single))
        self.now += seconds
        return seconds

    def _commit(self, number: int, fed: list[tuple[_Row, int]]) -> None:
        """One token for every decoding row, a first one for each prompt that is whole now, an end for those that have all."""
        now = self.now
        self._ends.append(now)
        self._context += len(self._decoding)
        self.seen.generated_tokens += len(self._decoding)
        for row in self._count.pop(number, ()):
            if row.due == number:
                self._tell(row, number)
                row.seen.tokens -= 1
                self.seen.generated_tokens -= 1
                row.seen.recent.pop()
                self.seen.tokens(row.seen, now, 1)
                self._next_interval(row)
        for row, n in fed:
            row.computed += n
            if row.computed == row.arrival.prompt:
                self._begin(row, number)
        for row in sorted(self._last.pop(number, ()), key=lambda row: row.arrival.at):
            self._end(row, number)

    def _begin(self, row: _Row, number: int) -> None:
        self._prefilling.remove(row)
        self._decoding[row] = None
        self._context += row.arrival.prompt + 1
        row.begun, row.ends = number, number + row.output - 1
        self.seen.tokens(row.seen, self.now, 1)
        self._last.setdefault(row.ends, []).append(row)
        self._next_interval(row)
        first = number + BLOCK_TOKENS * row.blocks - row.arrival.prompt + 1  # feeds the first token beyond its blocks
        if first <= row.ends:
            self._grow.setdefault(first, []).append(row)

    def _next_interval(self, row: _Row) -> None:
        row.due = row.begun + row.seen.counted_tokens + INTERVAL_EVERY - 1
        if self._watched and row.due <= row.ends:
            self._count.setdefault(row.due, []).append(row)

    def _tell(self, row: _Row, number: int) -> None:
        """Bring the row's observations up to the step."""
        row.seen.tokens, row.seen.last = number - row.begun + 1, self._ends[number]
        row.seen.recent.clear()
        row.seen.recent.extend(self._ends[max(row.begun, number - INTERVAL_TOKENS):number + 1])

    def _end(self, row: _Row, number: int) -> None:
        self._tell(row, number)
        del self._decoding[row]
        self._used -= row.blocks
        self._context -= row.arrival.prompt + row.output
        good = self.seen.slo_good["both"]
        self.seen.finish(row.seen, self.now, "length")
        if self.seen.slo_good["both"] > good:
            self.good_arrivals.append(row.arrival.born)

    def _meter(self, y: float, n: int, c: int, p: int) -> None:
        s = self._sums
        values = (1.0, y, n, c, p, n * n, n * c, n * p, c * c, c * p, p * p, n * y, c * y, p * y, y * y)
        self._sums = [a + b for a, b in zip(s, values)]  # noqa: B905 (both are of one length; this is the hot path)
        if not p:
            d = self._stats.decode_only
            d["steps"] += 1.0
            d["step_seconds"] += y
            d["decode_rows"] += n
            d["context_tokens"] += c

    # ---- telling

    def window(self) -> Window:
        for names, totals, start in ((STEP_SUMS, self._stats.step, 0), (STEP_PRODUCTS, self._stats.products, len(STEP_SUMS))):
            totals.update(zip(names, self._sums[start:], strict=False))
        return super().window()

    def _running(self, now: float) -> None:
        for row in self._decoding:
            if now - row.seen.counted_at >= INTERVAL_SECONDS:
                self._tell(row, len(self._ends) - 1)
                self.seen.overdue([row.seen], now)
                self._next_interval(row)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
