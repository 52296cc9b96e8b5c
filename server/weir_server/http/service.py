"""What the routes share: the model's text side, the engine, the book, the knobs; and the one way into the queue."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from weir_server.contract import CONTRACT_MAJOR, CONTRACT_MINOR, ControlState, Knobs, Slo, Window
from weir_server.engine.memory import cgroup_limit, memory_used
from weir_server.http.book import Book
from weir_server.http.engine_client import EngineClient
from weir_server.http.errors import ApiError, Busy, overloaded
from weir_server.http.gate import is_full, retry_after
from weir_server.http.knobs import KnobBoard, within
from weir_server.http.live import Call
from weir_server.http.marker import Marker
from weir_server.http.observe import REFUSED, Observations
from weir_server.http.window import build_window
from weir_server.kv.sizing import HEADROOM
from weir_server.link.messages import Drain, Ready, Report, SetKnobs, Trace
from weir_server.text.defaults import GenerationDefaults
from weir_server.text.template import ChatTemplate
from weir_server.text.tokenizer import Tokenizer

log = logging.getLogger("weir.http")
INLINE_BYTES = 4096
"""Texts up to here are tokenised on the event loop (well under a millisecond); longer ones in a thread."""
TRACE_SECONDS = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """The text side of the served model. `name` is what clients call it."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults


@dataclass(frozen=True)
class Options:
    """What the command line decides about the HTTP side."""

    slo: Slo
    body_limit: int = 16 * 1024 * 1024
    drain_timeout: Callable[[], float] = lambda: 120.0  # asked when a drain begins
    leave_seconds: float = 0.0  # between SIGTERM and the drain: for clients to go elsewhere
    initial: Mapping[str, Any] = field(default_factory=dict)  # knobs in force at start instead of the engine's own
    api_keys: Callable[[], Sequence[bytes]] | None = None  # those in force now; None: clients are asked for none
    token_file: str | None = None
    metrics: bool = True
    state_dir: str | None = None  # where the marker of an unclean exit is kept


@dataclass
class Service:
    """One per process. `now` is the monotonic clock that both processes share."""

    model: Model
    ready: Ready
    engine: EngineClient
    options: Options
    now: Callable[[], float] = time.monotonic
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    failed: str | None = None  # why the engine is gone
    leaving: bool = False  # every answer closes its connection, and /ready says so

    def __post_init__(self) -> None:
        r = self.ready
        instance = str(uuid.uuid4())
        self.marker = Marker(self.options.state_dir)
        initial = dict(self.options.initial)
        if (budget := self.marker.start_budget()) is not None:
            initial["kv_cache_budget"] = min(budget, initial.get("kv_cache_budget", budget))
        boot = r.boot.merged(within(r.envelope, initial, r.geometry.chunk_bytes))
        self.seen = Observations(self.options.slo, r.context_per_slot, self.now())
        self.book = Book(self.model.tokenizer, self.seen, r, self.engine.send)
        self.memory_limit = cgroup_limit()
        chunk, slo = r.geometry.chunk_bytes, self.options.slo
        self.board = KnobBoard(instance, r.envelope, boot, slo, chunk, engine=r.boot, budget_room=self.budget_room())
        self._pushed, self._unsettled = _steered(r.boot), False
        self.vocab = r.vocab_size
        self.drain_deadline: float | None = None
        self.asked_at = -math.inf  # when the last call came
        self.idle = asyncio.Event()  # set while no call is live
        self.idle.set()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._texts: set[asyncio.Future[Any]] = set()  # for or in a thread
        self._traces: list[asyncio.Future[list[dict[str, Any]]]] = []
        if self.board.target != r.boot:
            self.push_knobs()

    # ---- the queue

    def check_queue(self, rows: int) -> None:
        """Refuse now if the engine is gone, if draining, or if the queue is full: before any template or token."""
        if self.failed is not None:
            raise ApiError(503, self.failed, kind="server_error", reason="failed")
        if self.board.draining:
            raise overloaded("The server is draining and takes no new requests.", self.retry_after(), "draining")
        if is_full(self.book.load, rows, self.board.target.max_queue_depth, self.effective.max_batch_size):
            raise Busy(self.retry_after())

    def refuse(self, reason: str, rows: int, retry: bool) -> None:
        """Count what was refused; what failed for another reason is none of the load."""
        if reason == "queue_full":
            self.seen.refuse(reason, self.book.load.bound or "slots", rows, retry)
        elif reason in REFUSED:
            (bound,) = REFUSED[reason]
            self.seen.refuse(reason, bound, rows, retry)

    def retry_after(self) -> int:
        """Whole seconds after which coming back makes sense: what waits has gone by then, or a drain is over."""
        now = self.now()
        seconds = retry_after(self.book.load, self.book.pace(now), random.random())
        return seconds if self.drain_deadline is None else max(1, min(seconds, math.ceil(self.drain_deadline - now)))

    def queue(self, call: Call) -> None:
        self.asked_at = self.now()
        self.book.queue(call)
        self.idle.clear()

    def leave(self, call: Call) -> None:
        self.book.leave(call)
        if not self.book.calls:
            self.idle.set()

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on a text of `size` bytes: here if short, else in a thread (the tokenizer releases the GIL).

        Raises Busy where as many texts wait for a thread as rows may wait in an idle server's queue: nobody waits unbounded.
        """
        if size <= INLINE_BYTES:
            return work()
        if len(self._texts) >= self.board.target.max_queue_depth + self.effective.max_batch_size:
            raise Busy(self.retry_after())
        text = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._texts.add(text)
        text.add_done_callback(self._texts.discard)
        return await text

    # ---- what is in force

    @property
    def effective(self) -> Knobs:
        """The engine's word for what it enforces; the queue depth is the parent's to enforce."""
        return self.book.effective.merged({"max_queue_depth": self.board.target.max_queue_depth})

    def apply(self, report: Report) -> None:
        """One report of the engine; a move of batch, watermark or budget that is now in force settles."""
        self.book.apply(report)
        if report.trace is not None:
            for asked in self._traces:
                if not asked.done():
                    asked.set_result(report.trace)
            self._traces.clear()
        if self._unsettled and _steered(report.effective) == _steered(self.board.target):
            self._unsettled = False
            self.seen.settle(report.t)
            log.info("in force: %s", _in_words(self.effective))

    def push_knobs(self) -> None:
        """Tell the engine the targets, and the observations the objectives."""
        self._unsettled |= _steered(self.board.target) != self._pushed
        self._pushed = _steered(self.board.target)
        self.engine.send(SetKnobs(self.board.target))
        self.seen.set_slo(self.board.slo)

    def tick(self) -> None:
        """Twice a second: leases end, rows that are silent are noticed, the marker is kept up."""
        now = self.now()
        self.marker.note(self.effective.kv_cache_budget)
        expirations = self.board.expirations
        if self.board.tick(now, self.budget_room()):
            why = "memory has room again for" if self.board.expirations == expirations else "the lease expired; back to"
            log.warning("%s the fallback: %s", why, _in_words(self.board.target))
            self.push_knobs()
        self.seen.overdue([row.seen for row in self.book.slots.values()], now)

    async def trace(self) -> list[dict[str, Any]]:
        """The engine's last scheduling decisions. Raises TimeoutError if no step ends within TRACE_SECONDS."""
        asked: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._traces.append(asked)
        self.engine.send(Trace())
        return await asyncio.wait_for(asked, TRACE_SECONDS)

    def begin_drain(self, spent: float = 0.0) -> None:
        """Queue nothing new; the engine serves what it has until the drain timeout, of which `spent` seconds are gone."""
        if self.drain_deadline is None:
            self.board.draining = True
            timeout = max(0.0, self.options.drain_timeout() - spent)
            self.drain_deadline = self.now() + timeout
            log.info("draining: %d calls in flight, at most %.0f s", len(self.book.calls), timeout)
            self.engine.send(Drain(self.drain_deadline))

    def fail(self, message: str) -> None:
        self.failed = message
        self.book.fail_all(self.now(), message)

    # ---- what is said of it

    def window(self) -> Window:
        return build_window(
            self.now(), self.board, self.effective, self.book.load, self.book.stats, self.seen, self.book.oldest_arrival,
            self.memory_used(), self.memory_limit,
        )  # fmt: skip

    @property
    def free_chunks(self) -> int:
        """Before the engine's first report the whole pool is free."""
        s = self.book.stats
        return s.kv_blocks_free if s.kv_blocks_used or s.kv_blocks_cached or s.kv_blocks_free else self.ready.usable_blocks

    def memory_used(self) -> int:
        """Bytes of both processes, without file pages; the engine's as it last said."""
        return (self.book.stats.memory_used or self.ready.memory_used) + memory_used()

    def budget_room(self) -> int | None:
        """Bytes that the KV budget could have: what the pool holds already, and what the cgroup's limit leaves beside it."""
        if self.memory_limit is None:
            return None
        return max(0, self.book.stats.kv_resident_bytes + self.memory_limit - self.memory_used() - HEADROOM)

    def state(self) -> ControlState:
        board = self.board
        return ControlState(
            contract={"major": CONTRACT_MAJOR, "minor": CONTRACT_MINOR},
            model={"name": self.model.name, **self.ready.model}, instance=board.instance, started_at=self.started.isoformat(),
            envelope=board.envelope, kv=self.ready.geometry, boot=board.boot, target=board.target, effective=self.effective,
            fallback=board.fallback, slo=board.slo, plant=self.ready.plant, fence=board.fence,
            lease={"expires_in_seconds": board.expires_in(self.now())}, draining=board.draining,
        )  # fmt: skip


def _steered(knobs: Knobs) -> tuple[Any, ...]:
    return knobs.max_batch_size, knobs.kv_cache_budget, knobs.admission_watermark


def _in_words(knobs: Knobs) -> str:
    return (
        f"batch {knobs.max_batch_size}, KV budget {knobs.kv_cache_budget}, watermark {knobs.admission_watermark:g}, "
        f"queue {knobs.max_queue_depth}"
    )
