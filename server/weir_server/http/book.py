"""The book of all calls: rows by the engine's ids, the counts that the gate looks at, and the engine's latest word.

Books balance: every queued row is in `rows` until its one `Finished`, and is then in `seen.finished`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from weir_server.http.gate import Load, Pace
from weir_server.http.live import Call, Entry, LiveRow
from weir_server.http.observe import Observations, Row
from weir_server.kv.shape import Shape
from weir_server.link.messages import (
    Admitted,
    Cancel,
    Finished,
    PromptLogprobs,
    Ready,
    Report,
    Stats,
    Stop,
    Submit,
    ToChild,
    Tokens,
)
from weir_server.policy.queue import effective_lane
from weir_server.text.detok import RowText
from weir_server.text.tokenizer import Tokenizer


class Book:
    """`send` reaches the engine. Everything runs on the event loop, so nothing here is locked."""

    def __init__(
        self, tokenizer: Tokenizer, seen: Observations, ready: Ready, send: Callable[[ToChild], None]
    ) -> None:
        self.seen = seen
        self.effective = ready.boot
        self.stats = Stats()
        self.rows: dict[tuple[int, int], LiveRow] = {}
        self.calls: dict[str, Call] = {}
        self.ids = count(1)
        self._seqs = count()
        self._tokenizer = tokenizer
        self._chunk = ready.geometry.chunk_bytes
        self._shape = Shape.of(ready.geometry, ready.window, ready.piece)
        self._plant = ready.plant
        self._send = send
        self._waiting = 0  # rows never admitted
        self._running = 0  # rows admitted and not finished, preempted ones included
        self._preempted = 0
        self._queued_tokens = 0
        self.slots: dict[int, LiveRow] = {}  # admitted rows, each at the lowest number that was free

    # ---- the queue

    def queue(self, call: Call) -> None:
        """Hand a call to the engine; from here on each of its rows gets exactly one terminal event."""
        for submit in call.submits:
            limit, echo = submit.sampling.max_tokens * call.generates, call.prompts.get(submit.id) if call.echo else None
            for choice in range(submit.n):
                seen, text = Row(call.arrived, len(submit.prompt)), RowText(self._tokenizer, call.stops)
                row = LiveRow(call, submit, choice, len(call.rows), next(self._seqs), limit, seen, text, echo)
                call.rows.append(row)
                self.rows[submit.id, choice] = row
            self._send(submit)
        self.calls[call.name] = call
        self._waiting += len(call.rows)
        self._queued_tokens += sum(row.seen.prompt_tokens for row in call.rows)
        self.seen.queue([row.seen for row in call.rows], call.retry)

    def leave(self, call: Call) -> None:
        """The call's handler is through; whatever still lives is cancelled."""
        self.calls.pop(call.name, None)
        self.cancel(call)

    def cancel(self, call: Call) -> None:
        for id in {row.id for row in call.rows if row.reason is None}:
            self._send(Cancel(id))

    # ---- the engine's word

    def apply(self, report: Report) -> None:
        """One report: rows, counts, and what is in force."""
        for event in report.events:
            if (row := self.rows.get((event.id, event.row))) is not None:
                match event:
                    case Tokens():
                        self._tokens(row, event)
                    case Admitted():
                        self._admitted(row, event)
                    case PromptLogprobs():
                        row.call.prompts[event.id].tell(event.start, event.logprobs)
                        continue  # they go out with the row's first token
                    case Finished():
                        self._finished(row, event)
                row.call.wake.set()
        self.effective = report.effective
        self.stats = report.stats
        self._preempted = max(0, self._running - report.stats.running)

    def fail_all(self, t: float, message: str) -> None:
        """The engine is gone: everybody's terminal event, from us."""
        for (id, choice), row in list(self.rows.items()):
            self._finished(row, Finished(id, choice, t, "error", row.text.tokens, message))
            row.call.wake.set()
        self.stats = Stats()

    def _admitted(self, row: LiveRow, event: Admitted) -> None:
        row.admitted = True
        row.cached = event.cached_tokens
        row.slot = next(i for i in range(len(self.slots) + 1) if i not in self.slots)
        self.slots[row.slot] = row
        self._unqueue(row)
        self._running += 1
        self.seen.admit(row.seen, event.t, event.cached_tokens)

    def _tokens(self, row: LiveRow, event: Tokens) -> None:
        before = row.text.tokens
        row.put_prompt()
        for i, token in enumerate(event.ids):
            if row.reason is not None or row.text.tokens >= row.limit:
                self.seen.surplus_tokens += 1
                continue
            if event.logprobs:
                row.entries.append(Entry(token, event.logprobs[i], row.chars))
            row.put(row.text.feed(token))
            if row.text.stopped_at is not None:
                self._send(Stop(row.id, row.choice, row.text.stopped_at))
                row.end("stop")
        self.seen.tokens(row.seen, event.t, row.text.tokens - before)

    def _finished(self, row: LiveRow, event: Finished) -> None:
        row.end(event.reason, event.message)
        del self.rows[row.id, row.choice]
        if row.slot is not None:
            self._running -= 1
            del self.slots[row.slot]
        else:
            self._unqueue(row)
        self.seen.finish(row.seen, event.t, row.reason or event.reason)

    def _unqueue(self, row: LiveRow) -> None:
        self._waiting -= 1
        self._queued_tokens -= row.seen.prompt_tokens

    # ---- what the gate looks at

    @property
    def load(self) -> Load:
        waiting = self._waiting + self._preempted
        bound = (self.stats.bound or "slots") if waiting else None
        return Load(waiting, self._running - self._preempted, bound)

    @property
    def oldest_arrival(self) -> float | None:
        return min((row.seen.arrived for row in self.rows.values() if not row.admitted), default=self.stats.oldest_arrival)

    def pace(self, now: float) -> Pace:
        uncached = 1 - (self.seen.cached_tokens / self.seen.prompt_tokens if self.seen.prompt_tokens else 0.0)
        left = [row.limit - row.text.tokens for row in self.slots.values()]
        remaining = sum(left) / len(left) if left else 0.0
        return Pace(self.seen.rows_per_second(now), self._queued_tokens * uncached, remaining, self._plant)

    def needs(self, prompt_tokens: int, limit: int) -> int:
        """Bytes of KV memory that a row needs to be admitted to an empty pool: for its prompt and the next token, unless that
        is its last of `limit`. It is what the engine asks of a row before it lets it wait.
        """
        final = prompt_tokens + limit - 1
        return self._shape.chunks(self._shape.need(min(prompt_tokens + 1, final), final)) * self._chunk

    def over_budget(self, prompt_tokens: int, limit: int, budget: int | None) -> bool:
        """Could the live KV budget never hold it?"""
        return budget is not None and self.needs(prompt_tokens, limit) > budget

    def ahead(self, row: LiveRow, now: float) -> int:
        """Rows that are taken from the queue before this waiting one, as far as is known here: those of its lane and of lanes
        before it that came earlier, and rows that were preempted, which came earlier still.
        """
        own = effective_lane(row, now), row.seq
        others = (r for r in self.rows.values() if not r.admitted)
        return self._preempted + sum((effective_lane(r, now), r.seq) < own for r in others)

    def submits(self, prompts: Sequence[list[int]], **common: object) -> list[Submit]:
        return [Submit(id=next(self.ids), prompt=p, **common) for p in prompts]  # type: ignore[arg-type]
