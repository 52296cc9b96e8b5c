"""A pod in virtual time: the server's own engine, scheduler and cache over a plant that only takes time.

What runs is the code that serves; only the forward pass is replaced by a clock that jumps ahead by the plant's step time. The
parent process's part (the queue's gate, latencies, the window) is done here for rows of one choice each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from weir_operator.simulate.load import Arrival
from weir_server.contract import (
    BOUNDS,
    CONTRACT_MAJOR,
    CONTRACT_MINOR,
    FINISH_REASONS,
    HISTOGRAMS,
    REFUSALS,
    SETTLED_HISTOGRAMS,
    SLOS,
    ControlState,
    Envelope,
    Fence,
    Geometry,
    Histogram,
    Knobs,
    Plant,
    Slo,
    Window,
)
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.interface import RowResult, RowWork
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.link.messages import Admitted, Finished, Sampling, SetKnobs, Submit, ToChild, Tokens
from weir_server.policy.limits import Limits

StepSeconds = Callable[[float, float, float], float]
"""(decode rows, context tokens, prefill tokens) → seconds of one step."""
BLOCK_TOKENS = 16
CHUNK_BYTES = 737_280
INTERVAL_TOKENS, INTERVAL_SPAN = 16, 64
DEFAULTS = Knobs(4, None, 0.01, 32)


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


class _PlantRunner:
    """A Runner whose forward costs virtual time and nothing else."""

    supports_batching = True
    vocab_size = 2

    def __init__(self, setup: PodSetup) -> None:
        self.geometry = Geometry(CHUNK_BYTES, BLOCK_TOKENS, {"full_attention": 1})
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

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def release_chunks(self, chunks: Sequence[int]) -> None:
        pass


@dataclass(slots=True)
class _Row:
    arrived: float
    admitted: float = 0.0
    times: list[float] = field(default_factory=list)  # of its tokens


class Pod:
    """One pod. `now` is its clock, which only `run` moves."""

    def __init__(self, setup: PodSetup) -> None:
        self.setup = setup
        self.runner = _PlantRunner(setup)
        blocks = setup.kv_blocks + RESERVED_CHUNKS
        limits = Limits(tokens=setup.batch_limits[1] + 512)
        config = EngineConfig(setup.context, blocks, limits, prefix_cache=False)
        self.engine = Engine(self.runner, config, setup.knobs, lambda: self.runner.now)
        self.stats = self.engine.report().stats  # live
        self.settled_at = 0.0
        self.queued = self.admitted = self.generated = self.prompted = 0
        self.refused = {r: dict.fromkeys((*BOUNDS, "none"), 0) for r in REFUSALS}
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.good = dict.fromkeys(SLOS, 0)
        self.histograms = {h: Histogram() for h in HISTOGRAMS}
        self.settled = {h: Histogram() for h in SETTLED_HISTOGRAMS}
        self.memory_used, self.memory_limit = 0, 1 << 34
        self.good_arrivals: list[float] = []
        self._rows: dict[int, _Row] = {}

    @property
    def now(self) -> float:
        return self.runner.now

    @property
    def idle(self) -> bool:
        return not self.engine.busy

    def run(self, until: float, incoming: Iterator[Arrival], ahead: list[Arrival]) -> None:
        """Serve until the clock reaches `until`. `ahead` holds the next arrival, if one was drawn and is not due."""
        def due() -> list[ToChild]:
            out: list[ToChild] = []
            while (arrival := self._next(incoming, ahead)) and arrival.at <= self.now:
                ahead.clear()
                if self._may_queue(len(out)):
                    out.append(self._accept(arrival))
            return out

        while self.now < until:
            self.engine.handle(due())
            if self.engine.busy:
                self.engine.step(due)
            else:
                following = self._next(incoming, ahead)
                self.runner.now = min(until, following.at) if following else until
            self._hear()

    @staticmethod
    def _next(incoming: Iterator[Arrival], ahead: list[Arrival]) -> Arrival | None:
        if not ahead and (arrival := next(incoming, None)):
            ahead.append(arrival)
        return ahead[0] if ahead else None

    def _may_queue(self, more: int) -> bool:
        """The contract's gate: a full queue refuses, unless slots are free that KV does not close."""
        stats, engine = self.stats, self.engine
        waiting, bound = stats.waiting + more, stats.bound if stats.waiting else None
        spare = 0 if bound == "kv" else max(0, engine.effective.max_batch_size - stats.running)
        if waiting < engine.target.max_queue_depth + spare:
            return True
        self.refused["queue_full"][bound or "none"] += 1
        return False

    def _accept(self, arrival: Arrival) -> Submit:
        self.queued += 1
        self.prompted += arrival.prompt
        self._rows[self.queued] = _Row(arrival.at)
        return Submit(self.queued, [1] * arrival.prompt, Sampling(max_tokens=arrival.output), arrival.at, cache_prompt=False)

    # ---------------------------------------------------------------- what the parent process makes of events

    def _hear(self) -> None:
        report = self.engine.report()
        for event in report.events:
            row = self._rows[event.id]
            if isinstance(event, Admitted):
                self.admitted += 1
                row.admitted = event.t
                self._observe("queue_time", event.t - row.arrived, row)
            elif isinstance(event, Tokens):
                self.generated += 1
                row.times.append(event.t)
                self._token(row)
            elif isinstance(event, Finished):
                self._end(event, self._rows.pop(event.id))
        if self.settled_at < 0 and self._in_force():
            self.settled_at = self.now
            self.settled = {h: Histogram() for h in SETTLED_HISTOGRAMS}

    def _in_force(self) -> bool:
        target, effective = self.engine.target, self.engine.effective
        budget, now = target.kv_cache_budget or 0, effective.kv_cache_budget or 0
        return effective.max_batch_size == target.max_batch_size and abs(now - budget) < CHUNK_BYTES

    def _token(self, row: _Row) -> None:
        n, t = len(row.times), row.times
        if n == 1:
            self._observe("ttft", t[0] - row.arrived, row)
            self._observe("prefill_seconds", t[0] - row.admitted, row)
        elif (n - 1) % INTERVAL_TOKENS == 0:
            back = t[max(0, n - 1 - INTERVAL_SPAN)]
            self._observe("decode_interval", (t[-1] - back) / min(n - 1, INTERVAL_SPAN), row)

    def _end(self, event: Finished, row: _Row) -> None:
        self.finished[event.reason] += 1
        if event.reason not in ("stop", "length"):
            return
        n, t = len(row.times), row.times
        tpot = (t[-1] - t[0]) / (n - 1) if n > 1 else 0.0
        if n > 1:
            self._observe("tpot", tpot, row)
        first, each = t[0] - row.arrived <= self.setup.slo.ttft, tpot <= self.setup.slo.tpot
        for name, met in (("ttft", first), ("tpot", each), ("both", first and each)):
            self.good[name] += met
        if first and each:
            self.good_arrivals.append(row.arrived)

    def _observe(self, name: str, value: float, row: _Row) -> None:
        self.histograms[name].observe(value)
        began = row.arrived if name == "ttft" else row.admitted
        if name in self.settled and 0 <= self.settled_at <= began:
            self.settled[name].observe(value)

    # ---------------------------------------------------------------- the control port

    def set_knobs(self, target: Knobs) -> None:
        old = self.engine.target
        self.engine.handle([SetKnobs(target)])
        if replace(old, max_queue_depth=0) != replace(target, max_queue_depth=0):
            self.settled_at = -1.0
        self._hear()

    def control(self) -> ControlState:
        e, s = self.engine, self.setup
        return ControlState(
            {"major": CONTRACT_MAJOR, "minor": CONTRACT_MINOR}, {}, "simulated", "", s.envelope, self.runner.geometry, s.knobs,
            e.target, e.effective, s.knobs, s.slo, s.plant, Fence(), {"expires_in_seconds": None}, False,
        )

    def window(self) -> Window:
        """A copy, as the wire would make one."""
        e, stats = self.engine, self.stats
        oldest = stats.oldest_arrival
        return Window.from_wire(Window(
            instance="simulated", monotonic=self.now, settled_at=self.settled_at if self.settled_at >= 0 else self.now,
            target=e.target, effective=e.effective, envelope=self.setup.envelope, draining=False,
            running=stats.running, prefilling=stats.prefilling, waiting=stats.waiting,
            oldest_wait=self.now - oldest if oldest is not None else 0.0, bound=stats.bound,
            memory_used=self.memory_used, memory_limit=self.memory_limit, kv_used_bytes=stats.kv_used_bytes,
            decoding_seconds=stats.decoding_seconds, running_seconds=stats.running_seconds,
            waiting_seconds=stats.waiting_seconds, head_wait_seconds=dict(stats.head_wait_seconds),
            kv_used_byte_seconds=stats.kv_used_byte_seconds, step=dict(stats.step), decode_only=dict(stats.decode_only),
            products=dict(stats.products), recompute_seconds=stats.recompute_seconds, queued=self.queued, retried=0,
            admitted=self.admitted, refused={r: dict(b) for r, b in self.refused.items()}, finished=dict(self.finished),
            preempted=stats.preempted, recomputed_tokens=stats.recomputed_tokens, prompt_tokens=self.prompted, cached_tokens=0,
            generated_tokens=self.generated, slo_good=dict(self.good), slo_total=self.histograms["ttft"].count,
            histograms=self.histograms, settled=self.settled,
        ).to_wire())
