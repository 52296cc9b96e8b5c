"""The engine: submit, cancel, stop, set knobs, drain, and one step at a time.

A step: decide (policy, pure) → apply (blocks) → one forward → drain messages → commit. Messages that came in during the
forward are applied before its output, so a cancelled row emits nothing more. Everything runs in one thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from weir_server.contract import Knobs
from weir_server.engine.batch import Batch, Work
from weir_server.engine.invariants import violations
from weir_server.engine.meter import Meter
from weir_server.engine.rows import Row, RowState
from weir_server.exec.interface import RowResult, RowWork, Runner
from weir_server.kv.cache import Cache
from weir_server.kv.prefix import Chain, PrefixCache, domain
from weir_server.kv.shape import Shape
from weir_server.link.messages import (
    DEADLINE_EXCEEDED,
    KV_BUDGET_EXCEEDED,
    Admitted,
    Cancel,
    Drain,
    Event,
    Finished,
    PromptLogprobs,
    Report,
    SetKnobs,
    Stop,
    Submit,
    ToChild,
    TokenLogprobs,
    Tokens,
    Trace,
)
from weir_server.policy.limits import Limits
from weir_server.policy.state import State, StepPlan
from weir_server.policy.step import decide
from weir_server.policy.trace import Decision, decision, to_wire

log = logging.getLogger("weir.engine")

BACKEND_ERROR = "inference backend error"
DRAINED = "The server is shutting down."
CHECK_EVERY = 256
"""Steps between two samples of the invariants."""
MANY = 64
"""Deadlines of ended requests that are kept beside those of live ones."""
TRACED = 64
"""Decisions kept for whoever asks why."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What is fixed at start. `model` names the weights in the prefix cache's keys.

    `evict_newest`: cold prefixes go in the order most recently freed first. `swap_chunks`: of the swap pool, 0 = none.
    """

    context_per_slot: int
    num_chunks: int
    limits: Limits
    model: str = ""
    prefix_cache: bool = True
    evict_newest: bool = False
    swap_chunks: int = 0


class Engine:
    """All requests of one server. `report()` hands over what has happened since the last one."""

    def __init__(
        self, runner: Runner, config: EngineConfig, knobs: Knobs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.runner = runner
        self.config = config
        self.target = knobs
        self.clock = clock
        chunk_bytes, shape = runner.geometry.chunk_bytes, Shape.of(runner.geometry, runner.window, config.limits.piece)
        prefix = PrefixCache(config.evict_newest) if config.prefix_cache else None
        self.batch = Batch(
            Cache(config.num_chunks, chunk_bytes, shape, prefix),
            Cache(config.swap_chunks, chunk_bytes, shape) if config.swap_chunks else None,
            knobs.kv_cache_budget,
        )
        self.meter = Meter(clock(), chunk_bytes)
        self.requests: dict[int, list[Row]] = {}
        self.deadline = math.inf  # of a drain
        self._events: list[Event] = []
        self._bound: str | None = None
        self._starved = 0
        self._next_seq = 0
        self._progress = 0.0
        self._deadlines: list[tuple[float, int]] = []  # a heap; ids that have ended are passed over
        self._decisions: deque[Decision] = deque(maxlen=TRACED)
        self._trace_asked = False

    @property
    def busy(self) -> bool:
        return bool(self.batch.running or self.batch.waiting)

    # ------------------------------------------------------------------------------------------------ messages

    def handle(self, messages: Iterable[ToChild]) -> None:
        """Apply messages in their order; ids that are unknown or finished are no error."""
        for message in messages:
            match message:
                case Submit():
                    self.submit(message)
                case Cancel(id=id):
                    for row in list(self.requests.get(id, ())):
                        self.release(row, "cancelled")
                case Stop(id=id, row=choice, n_tokens=n):
                    for row in [r for r in self.requests.get(id, ()) if r.choice == choice]:
                        self.release(row, "stop", generated=min(n, row.generated))
                case SetKnobs(target=target):
                    self.set_knobs(target)
                case Drain(deadline=deadline):
                    self.deadline = deadline
                case Trace():
                    self._trace_asked = True
                case _:
                    log.warning("ignored a %s message out of place", type(message).__name__)
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._expire(heappop(self._deadlines)[1])
        if now >= self.deadline:
            self._end_drain()
        self._settle()

    def submit(self, request: Submit) -> None:
        """Queue the rows of a request, or end them at once where they could never run."""
        if request.id in self.requests:
            log.warning("ignored a second request with the id %d", request.id)
            return
        rows: list[Row] = []
        for choice in range(request.n):
            chain = None
            if self.batch.cache.prefix and request.cache_prompt:
                chain = Chain(domain(self.config.model, request.cache_salt), self.batch.cache.shape.block_tokens)
            rows.append(Row(request, choice, self._next_seq, self.config.context_per_slot, chain, rows))
            self._next_seq += 1
        self.requests[request.id] = rows
        self.batch.enqueue(rows)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.id))
            if len(self._deadlines) > 2 * len(self.requests) + MANY:
                self._deadlines = sorted(d for d in self._deadlines if d[1] in self.requests)
        for row in list(rows):
            if wrong := self._impossible(row):
                self.release(row, "error", wrong)
            elif row.sampling.max_tokens < 1:
                self.release(row, "length")
            elif not self.batch.fits_budget(row):
                self._hand_back(row)

    def _impossible(self, row: Row) -> str | None:
        """Why a row can never run, whatever the knobs. The parent refuses such requests; this is the last line."""
        context, cache = self.config.context_per_slot, self.batch.cache
        if not row.prompt_len:
            return "Empty prompt: request has no input tokens to process"
        if row.prompt_len >= context:
            return f"request ({row.prompt_len} tokens) exceeds the available context size ({context} tokens)"
        if min(row.tokens) < 0 or max(row.tokens) >= self.runner.vocab_size:
            return f"a token id is outside the vocabulary of {self.runner.vocab_size}"
        if cache.shape.worst_chunks(row.final - 1) > cache.pool.usable:
            most = cache.shape.servable(cache.pool.usable, context)
            return f"request ({row.final} tokens) exceeds what the KV cache can hold ({most} tokens)"
        return None

    def _hand_back(self, row: Row) -> None:
        pool = self.batch.cache.pool
        need, live = self.batch.chunks_asked(row) * pool.chunk_bytes, pool.limit * pool.chunk_bytes
        why = f"{KV_BUDGET_EXCEEDED}: the prompt needs {need} bytes of KV cache and the live KV budget is {live} bytes."
        self.release(row, "handed_back", why)

    def set_knobs(self, target: Knobs) -> None:
        """New targets. Nothing that runs is touched; queued rows that the live budget could no longer hold are handed back."""
        self.target = target
        self.batch.cache.pool.set_budget(target.kv_cache_budget, self.batch.cache.held)
        for row in self._rows():
            if not row.admitted and not self.batch.fits_budget(row):
                self._hand_back(row)

    def _rows(self) -> list[Row]:
        return [row for rows in self.requests.values() for row in rows]

    @property
    def effective(self) -> Knobs:
        """What is in force: a lowered batch or budget counts when what runs has come down to it."""
        pool = self.batch.cache.pool
        return replace(
            self.target,
            max_batch_size=max(self.target.max_batch_size, len(self.batch.running)),
            kv_cache_budget=None if self.target.kv_cache_budget is None else pool.ceiling * pool.chunk_bytes,
        )

    def _end_drain(self) -> None:
        """The drain's deadline has passed: what never ran goes back, what ran ends."""
        for row in self._rows():
            self.release(row, "cancelled" if row.admitted else "handed_back", DRAINED)

    def _expire(self, id: int) -> None:
        """A request's deadline has passed, wherever its rows are."""
        rows = list(self.requests.get(id, ()))
        self.meter.stats.deadlines_exceeded += bool(rows)
        for row in rows:
            self.release(row, "cancelled", DEADLINE_EXCEEDED)

    def release(self, row: Row, reason: str, message: str = "", generated: int | None = None) -> None:
        """End a row, whatever its state: everything that it owns is freed and its one terminal event is sent."""
        if row.state is RowState.FINISHED:
            return
        if row.state is RowState.QUEUED and self.batch.queue.head(self.clock()) is row:
            self._bound = None  # whoever is the head now waits for something that the next step finds out
        self.batch.drop(row)
        row.state = RowState.FINISHED
        row.siblings.remove(row)
        if not row.siblings:
            del self.requests[row.id]
        generated = row.generated if generated is None else generated
        self._events.append(Finished(row.id, row.choice, self.clock(), reason, generated, message))

    # ------------------------------------------------------------------------------------------------ the step

    def step(self, receive: Callable[[], Iterable[ToChild]] = tuple) -> bool:
        """One step. Returns whether anything was fed: False with work at hand is a fault of the policy, and is counted."""
        start = self.clock()
        state, offers = self.batch.view(start, self.target, self.config.limits, self._starved)
        plan = decide(state)
        self._starved = plan.starved
        self._bound = plan.bound or ("prefill" if self.batch.behind else None)
        self._decisions.append(decision(start, state, [offer.ask for offer in offers], plan))
        work = self.batch.apply(plan, offers, start)
        self._note(plan, work)
        results = self._execute(work)
        self.handle(receive())
        self._commit(work, results)
        self._settle()
        if work.rows:
            self.meter.count_step(self.clock() - start, work.decode_rows, work.context, work.prefill, work.recomputed)
        if not work.rows or self.meter.stats.step["steps"] % CHECK_EVERY == 0:
            self._check(state, plan)
        return bool(work.rows)

    def _check(self, state: State, plan: StepPlan) -> None:
        """Sample the invariants; I8 is progress since the last sample: tokens computed for the first time."""
        faults = list(violations(self.batch, state, plan))
        progress = self.meter.first_time_tokens
        if progress <= self._progress and self.busy:
            faults.append(("I8", f"nothing new was computed in {CHECK_EVERY} steps"))
        self._progress = progress
        for name, fault in faults:
            self.meter.stats.invariant_violations[name] += 1
            log.error("invariant %s: %s", name, fault)

    def _note(self, plan: StepPlan, work: Work) -> None:
        """Tell and count what the plan changed, before the forward."""
        now, stats = self.clock(), self.meter.stats
        for row in work.admitted:
            self._events.append(Admitted(row.id, row.choice, now, row.computed))
            if row.chain and row.prompt_logprobs < 0:
                stats.prefix_queries += row.prompt_len
                stats.prefix_hits += row.computed
        stats.prefill_grants += plan.granted
        stats.batched_prefills += work.prompts > 1
        stats.bypassed += work.bypassed
        stats.promoted += work.promoted
        stats.restored_tokens += work.restored
        if plan.cause:
            stats.preempted += len(plan.preempt)
            stats.preempted_tokens += work.given_up
            stats.soft_resets += work.reset
            stats.offloads += len(work.offloaded)
            stats.preemptions_by_cause[plan.cause] += len(plan.preempt)
        self._measure()

    def _execute(self, work: Work) -> list[RowResult]:
        """One forward, after what is copied for it. If it fails as a whole, its rows fail and the engine goes on."""
        if work.swap_out:
            try:
                self.runner.swap_out(work.swap_out)
            except Exception:
                log.exception("offloading %d rows failed: they are computed again", len(work.offloaded))
                for row in work.offloaded:
                    self.batch.reset(row)
        if not work.rows:
            return []
        try:
            if work.swap_in:
                self.runner.swap_in(work.swap_in)
            for kind, pairs in work.copies.items():
                self.runner.copy_blocks(pairs, kind)
            return self.runner.execute([_row_work(row, n) for row, n in work.rows])
        except Exception:
            log.exception("a step of %d rows failed", len(work.rows))
            return [RowResult(error=BACKEND_ERROR)] * len(work.rows)

    def _commit(self, work: Work, results: list[RowResult]) -> None:
        now = self.clock()
        for (row, n), result in zip(work.rows, results, strict=True):
            if row.state is RowState.FINISHED:
                continue
            if result.prompt_logprobs is not None:
                self._tell_prompt(row, result.prompt_logprobs)
            untold = row.told < row.prompt_len and row.prompt_logprobs >= 0 and result.token is not None
            if result.error is not None or (result.token is None and n == row.left) or untold:
                log.error("request %d, row %d: %s", row.id, row.choice, result.error or "the forward left out what was asked")
                self.release(row, "error", BACKEND_ERROR)
                continue
            self.batch.computed(row, n)
            if result.token is not None:
                row.state = RowState.DECODING
                row.tokens.append(result.token)
                if self.batch.behind:
                    self.batch.through(row)
                logprobs = None if result.logprobs is None else [result.logprobs]
                self._events.append(Tokens(row.id, row.choice, now, [result.token], logprobs))
                self._end_if_done(row, result.token)

    def _tell_prompt(self, row: Row, logprobs: list[TokenLogprobs]) -> None:
        """Logprobs of the prompt tokens from computed + 1 on; what a row that was preempted has told is not told again."""
        if new := logprobs[row.told - row.computed - 1 :]:
            self._events.append(PromptLogprobs(row.id, row.choice, row.told, new))
            row.told += len(new)

    def _end_if_done(self, row: Row, token: int) -> None:
        if token in row.sampling.stop_ids and row.generated >= row.sampling.min_tokens:
            self.release(row, "stop")
        elif len(row.tokens) >= row.final:
            self.release(row, "length")

    def _settle(self) -> None:
        """After anything has changed: give back what is above a lowered budget, and measure."""
        if self.batch.over() and (chunks := self.batch.cache.trim()):
            self.runner.release_chunks(chunks)
        self._measure()

    # ------------------------------------------------------------------------------------------------ telling

    def report(self) -> Report:
        """Events since the last report, the knobs in force, the totals. The stats are live: encode before the next step."""
        now = self.clock()
        self.meter.read_memory(now)
        events, self._events = self._events, []
        stats, cache, swap = self.meter.stats, self.batch.cache, self.batch.swap
        if cache.prefix:
            stats.prefix_evictions, stats.adopted_evictions = cache.prefix.evictions, cache.prefix.adopted_evictions
        if swap:
            stats.swap_used_bytes, stats.swap_bytes = swap.used_bytes, swap.pool.usable * swap.pool.chunk_bytes
        stats.kv_stranded_bytes, stats.kv_free_by_type = cache.stranded_bytes, cache.free_by_type
        trace = [to_wire(d) for d in self._decisions] if self._trace_asked else None
        self._trace_asked = False
        return Report(now, events, self.effective, stats, trace)

    def _measure(self) -> None:
        batch, cache = self.batch, self.batch.cache
        decoding = sum(row.state is RowState.DECODING for row in batch.running)
        self.meter.advance(
            self.clock(),
            running=len(batch.running),
            prefilling=len(batch.running) - decoding,
            decoding=decoding > 0,
            waiting=batch.waiting,
            oldest_arrival=batch.oldest_arrival,
            bound=self._bound if batch.waiting else None,
            chunks=(cache.held, cache.cached, cache.pool.free),
            resident=cache.pool.resident,
        )


def _row_work(row: Row, n: int) -> RowWork:
    start, end = row.computed, row.computed + n
    sample = end == len(row.tokens)
    told = row.told if row.prompt_logprobs >= 0 else row.prompt_len
    asked = row.prompt_logprobs if told < row.prompt_len and told <= end else -1
    return RowWork(
        tokens=row.tokens[start:end], start=start, blocks=row.blocks, sample=sample, sampling=row.sampling, choice=row.choice,
        context=row.tokens if sample or asked >= 0 else row.tokens[:end], prompt_len=row.prompt_len, ring=row.ring,
        prompt_logprobs=asked,
    )
