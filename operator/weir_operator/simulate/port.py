"""What every simulated pod has: the server's own queue gate, knobs, observations and window, in virtual time.

Two kinds of pod stand on it: `pod.Pod` runs the server's engine step by step; `twin.Twin` keeps one small record a row and
calls the server's policy only where a step can differ from "every row decodes". A property test holds them equal.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
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
from weir_server.http.gate import Load, is_full
from weir_server.http.knobs import KnobBoard
from weir_server.http.observe import Observations
from weir_server.http.window import build_window
from weir_server.link.messages import Stats
from weir_server.policy.limits import Limits, token_budget

StepSeconds = Callable[[float, float, float], float]
"""(decode rows, context tokens, prefill tokens) → seconds of one step."""
BLOCK_TOKENS = 16
CHUNK_BYTES = 737_280
DEFAULTS = Knobs(4, None, 0.01, 32)
LEASE_SECONDS = 180.0
INSTANCE = "simulated"
SHORTEST = 0.2  # of a step's mean time: noise never makes one shorter


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
    chunk: int | None = None  # prompt tokens of a step; None: adaptive, as the server's default
    noise: float = 0.03  # relative, of a step's time
    step_seconds: StepSeconds | None = None
    seed: int = 0
    starts_after: float = 0.0  # seconds until it serves: loading a model takes its time

    @property
    def envelope(self) -> Envelope:
        whole = self.kv_blocks * CHUNK_BYTES
        least = min(whole, -(-self.context // BLOCK_TOKENS) * CHUNK_BYTES)
        return Envelope(self.batch_limits, (least, whole), self.depth_limits, (0.0, 0.5))

    @property
    def knobs(self) -> Knobs:
        return self.boot if self.boot.kv_cache_budget else replace(self.boot, kv_cache_budget=self.kv_blocks * CHUNK_BYTES)

    @property
    def limits(self) -> Limits:
        return Limits(tokens=token_budget(self.batch_limits[1], self.chunk, self.context), chunk=self.chunk)

    @property
    def geometry(self) -> Geometry:
        return Geometry(CHUNK_BYTES, BLOCK_TOKENS, {"full_attention": 1})


class Port:
    """A pod's control port and its queue's door. `now` is its clock, which only `run` moves.

    `inbox` holds the arrivals to come, in order of time. `memory_used` (bytes) is what it will say of itself; `refused` hears
    of every arrival that was turned away.
    """

    def __init__(self, setup: PodSetup, stats: Stats) -> None:
        self.setup = setup
        self.now = 0.0
        self.inbox: deque[Arrival] = deque()
        self.instance = INSTANCE
        self.board = KnobBoard(self.instance, setup.envelope, setup.knobs, setup.slo, CHUNK_BYTES)
        self.seen = Observations(setup.slo, setup.context, 0.0)
        self.memory_used, self.memory_limit = 0, 1 << 34
        self.good_arrivals: list[float] = []
        self.refused: Callable[[Arrival], None] | None = None
        self.slowdown = 1.0  # of every step: a busy neighbour
        self._stats = stats  # live
        self._settling = False
        self._seconds = setup.step_seconds or setup.plant.step_seconds
        self._rng = random.Random(setup.seed)

    # ---- what the two kinds differ in

    @property
    def effective(self) -> Knobs:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        raise NotImplementedError

    def run(self, until: float) -> None:
        """Serve until the clock reaches `until`."""
        raise NotImplementedError

    def _set(self, target: Knobs) -> None:
        raise NotImplementedError

    def _running(self, now: float) -> None:
        """Rows that gave no decode interval for long give one now."""
        raise NotImplementedError

    # ---- the door and the port

    @property
    def load(self) -> Load:
        return Load(self._stats.waiting, self._stats.running, self._stats.bound if self._stats.waiting else None)

    def step_time(self, rows: int, context: int, prefill: int) -> float:
        """Seconds of the next step, noise included."""
        seconds = self._seconds(rows, context, prefill) * self.slowdown
        return seconds * max(SHORTEST, self._rng.gauss(1.0, self.setup.noise))

    def _lets_in(self, arrival: Arrival, more: int) -> bool:
        """The server's gate, with `more` rows of the same moment before this one."""
        known = self.load
        load = Load(known.waiting + more, known.running, known.bound)
        if is_full(load, 1, self.board.target.max_queue_depth, self.effective.max_batch_size):
            self.seen.refuse("queue_full", load.bound or "slots", retry=arrival.retry)
            if self.refused:
                self.refused(arrival)
            return False
        return True

    def set_knobs(self, knobs: Mapping[str, Any], seq: int) -> None:
        """As the operator's PUT. Raises the server's KnobError where the server would refuse."""
        old = self.board.target
        self.board.put(KnobsRequest(self.instance, 1, seq, LEASE_SECONDS, {**asdict(old), **knobs}), self.now)
        self._set(self.board.target)
        self._settling |= replace(old, max_queue_depth=0) != replace(self.board.target, max_queue_depth=0)
        self._settle()

    def _settle(self) -> None:
        if self._settling and replace(self.effective, max_queue_depth=0) == replace(self.board.target, max_queue_depth=0):
            self._settling = False
            self.seen.settle(self.now)

    def control(self) -> ControlState:
        b = self.board
        return ControlState(
            {"major": CONTRACT_MAJOR, "minor": CONTRACT_MINOR}, {}, self.instance, "", b.envelope, self.setup.geometry, b.boot,
            b.target, self.effective, b.fallback, b.slo, self.setup.plant, b.fence, {"expires_in_seconds": None}, b.draining,
        )

    def window(self) -> Window:
        """A copy, as the wire would make one."""
        self._running(self.now)
        return Window.from_wire(build_window(
            self.now, self.board, self.effective, self.load, self._stats, self.seen, self._stats.oldest_arrival,
            self.memory_used, self.memory_limit,
        ).to_wire())
