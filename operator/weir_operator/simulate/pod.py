"""A pod in virtual time: the server's own code over a plant that only takes time.

Engine, scheduler, cache, queue gate, knobs, latencies and window are what serves; only the forward pass is replaced by a clock
that jumps ahead by the plant's step time, and sockets by an iterator of arrivals. Rows have one choice each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from weir_operator.simulate.load import Arrival
from weir_server.contract import (
    CONTRACT_MAJOR,
    CONTRACT_MINOR,
    ControlState,
    Envelope,
    Geometry,
    Knobs,
    KnobsRequest,
    Plant,
    Slo,
    Window,
)
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.interface import RowResult, RowWork
from weir_server.exec.null import NullRunner
from weir_server.http.gate import Load, is_full
from weir_server.http.knobs import KnobBoard
from weir_server.http.observe import Observations, Row
from weir_server.http.window import build_window
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.link.messages import Admitted, Finished, Sampling, SetKnobs, Submit, ToChild, Tokens
from weir_server.policy.limits import Limits, token_budget

StepSeconds = Callable[[float, float, float], float]
"""(decode rows, context tokens, prefill tokens) → seconds of one step."""
BLOCK_TOKENS = 16
CHUNK_BYTES = 737_280
DEFAULTS = Knobs(4, None, 0.01, 32)
LEASE_SECONDS = 180.0
INSTANCE = "simulated"


@dataclass(frozen=True, slots=True)
class PodSetup:
    """`plant` is what the pod says of itself at boot; `step_seconds` what is true (None: the same)."""

    plant: Plant
    slo: Slo
    boot: Knobs = DEFAULTS
    batch_limits: tuple[int, int] = (1, 64)
    depth_limits: tuple[int, int] = (1, 256)
    kv_blocks: int = 8192
    context: int = 8192
    noise: float = 0.03  # relative, of a step's time
    step_seconds: StepSeconds | None = None
    seed: int = 0

    @property
    def envelope(self) -> Envelope:
        whole = self.kv_blocks * CHUNK_BYTES
        least = min(whole, -(-self.context // BLOCK_TOKENS) * CHUNK_BYTES)
        return Envelope(self.batch_limits, (least, whole), self.depth_limits, (0.0, 0.5))

    @property
    def knobs(self) -> Knobs:
        return self.boot if self.boot.kv_cache_budget else replace(self.boot, kv_cache_budget=self.kv_blocks * CHUNK_BYTES)


class _PlantRunner(NullRunner):
    """A Runner whose forward costs virtual time and nothing else."""

    def __init__(self, setup: PodSetup) -> None:
        super().__init__(Geometry(CHUNK_BYTES, BLOCK_TOKENS, {"full_attention": 1}), vocab_size=2)
        self.now = 0.0
        self._seconds = setup.step_seconds or setup.plant.step_seconds
        self._noise = setup.noise
        self._rng = random.Random(setup.seed)

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        decode = [r for r in rows if len(r.tokens) == 1]
        prefill = sum(len(r.tokens) for r in rows) - len(decode)
        seconds = self._seconds(len(decode), sum(r.start + 1 for r in decode), prefill)
        self.now += seconds * max(0.2, self._rng.gauss(1.0, self._noise))
        return [RowResult(token=1 if r.sample else None) for r in rows]


class Pod:
    """One pod. `now` is its clock, which only `run` moves. `memory_used` (bytes) is what it will say of itself."""

    def __init__(self, setup: PodSetup) -> None:
        self.setup = setup
        self.runner = _PlantRunner(setup)
        limits = Limits(tokens=token_budget(setup.batch_limits[1], None, setup.context))
        config = EngineConfig(setup.context, setup.kv_blocks + RESERVED_CHUNKS, limits, prefix_cache=False)
        self.engine = Engine(self.runner, config, setup.knobs, lambda: self.runner.now)
        self.board = KnobBoard(INSTANCE, setup.envelope, setup.knobs, setup.slo, CHUNK_BYTES)
        self.seen = Observations(setup.slo, setup.context, 0.0)
        self.memory_used, self.memory_limit = 0, 1 << 34
        self.good_arrivals: list[float] = []
        self._stats = self.engine.report().stats  # live
        self._rows: dict[int, Row] = {}
        self._settling = False
        self._next_id = 0

    @property
    def now(self) -> float:
        return self.runner.now

    @property
    def idle(self) -> bool:
        return not self.engine.busy

    @property
    def load(self) -> Load:
        return Load(self._stats.waiting, self._stats.running, self._stats.bound if self._stats.waiting else None)

    def run(self, until: float, incoming: Iterator[Arrival], ahead: list[Arrival]) -> None:
        """Serve until the clock reaches `until`. `ahead` holds the next arrival, if one was drawn and is not due."""

        def due() -> list[ToChild]:
            out: list[ToChild] = []
            while (arrival := _peek(incoming, ahead)) and arrival.at <= self.now:
                ahead.clear()
                if submit := self._arrive(arrival, len(out)):
                    out.append(submit)
            return out

        while self.now < until:
            self.engine.handle(due())
            if self.engine.busy:
                self.engine.step(due)
            else:
                following = _peek(incoming, ahead)
                self.runner.now = min(until, following.at) if following else until
            self._hear()

    def _arrive(self, arrival: Arrival, more: int) -> Submit | None:
        """Through the server's gate, `more` rows of the same moment before it."""
        load = replace(self.load, waiting=self.load.waiting + more)
        if is_full(load, 1, self.engine.target.max_queue_depth, self.engine.effective.max_batch_size):
            self.seen.refuse("queue_full", load.bound or "slots")
            return None
        self._next_id += 1
        row = self._rows[self._next_id] = Row(arrival.at, arrival.prompt)
        self.seen.queue([row])
        sampling = Sampling(max_tokens=arrival.output)
        return Submit(self._next_id, [1] * arrival.prompt, sampling, arrival.at, cache_prompt=False)

    def _hear(self) -> None:
        report = self.engine.report()
        for event in report.events:
            row = self._rows[event.id]
            if isinstance(event, Admitted):
                self.seen.admit(row, event.t, event.cached_tokens)
            elif isinstance(event, Tokens):
                self.seen.tokens(row, event.t, len(event.ids))
            elif isinstance(event, Finished):
                good = self.seen.slo_good["both"]
                self.seen.finish(self._rows.pop(event.id), event.t, event.reason)
                if self.seen.slo_good["both"] > good:
                    self.good_arrivals.append(row.arrived)
        if self._settling and replace(report.effective, max_queue_depth=0) == replace(self.board.target, max_queue_depth=0):
            self._settling = False
            self.seen.settle(self.now)

    # ---------------------------------------------------------------- the control port

    def set_knobs(self, knobs: Mapping[str, Any], seq: int) -> None:
        """As the operator's PUT. Raises the server's KnobError where the server would refuse."""
        old = self.board.target
        self.board.put(KnobsRequest(INSTANCE, 1, seq, LEASE_SECONDS, {**asdict(old), **knobs}), self.now)
        self.engine.handle([SetKnobs(self.board.target)])
        self._settling |= replace(old, max_queue_depth=0) != replace(self.board.target, max_queue_depth=0)
        self._hear()

    def control(self) -> ControlState:
        b = self.board
        return ControlState(
            {"major": CONTRACT_MAJOR, "minor": CONTRACT_MINOR}, {}, INSTANCE, "", b.envelope, self.runner.geometry, b.boot,
            b.target, self.engine.effective, b.fallback, b.slo, self.setup.plant, b.fence, {"expires_in_seconds": None}, False,
        )

    def window(self) -> Window:
        """A copy, as the wire would make one."""
        self.seen.overdue(self._rows.values(), self.now)
        return Window.from_wire(build_window(
            self.now, self.board, self.engine.effective, self.load, self._stats, self.seen, self._stats.oldest_arrival,
            self.memory_used, self.memory_limit,
        ).to_wire())


def _peek(incoming: Iterator[Arrival], ahead: list[Arrival]) -> Arrival | None:
    if not ahead and (arrival := next(incoming, None)):
        ahead.append(arrival)
    return ahead[0] if ahead else None
