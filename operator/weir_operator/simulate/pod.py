"""A pod in virtual time: the server's own code over a plant that only takes time.

Engine, scheduler, cache, queue gate, knobs, latencies and window are what serves; only the forward pass is replaced by a clock
that jumps ahead by the plant's step time, and sockets by a list of arrivals. Rows have one choice each.
"""

from __future__ import annotations

from collections.abc import Sequence

from weir_operator.simulate.load import Arrival
from weir_operator.simulate.port import PodSetup, Port
from weir_server.contract import Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.interface import RowResult, RowWork
from weir_server.exec.null import NullRunner
from weir_server.http.observe import Row
from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.link.messages import Admitted, Finished, Sampling, SetKnobs, Submit, ToChild, Tokens


class _PlantRunner(NullRunner):
    """A Runner whose forward costs virtual time and nothing else."""

    def __init__(self, pod: Pod, setup: PodSetup) -> None:
        super().__init__(setup.geometry, vocab_size=1 << 40)
        self._pod = pod

    def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
        decode = [r for r in rows if len(r.tokens) == 1]
        prefill = sum(len(r.tokens) for r in rows) - len(decode)
        self._pod.now += self._pod.step_time(len(decode), sum(r.start + 1 for r in decode), prefill)
        return [RowResult(token=1 if r.sample else None) for r in rows]


class Pod(Port):
    """One pod, every step real. Prompts that name their parts (`Arrival.parts`) meet the prefix cache."""

    def __init__(self, setup: PodSetup) -> None:
        config = EngineConfig(setup.context, setup.kv_blocks + RESERVED_CHUNKS, setup.limits)
        self.now = 0.0  # the engine reads the clock at once
        self.engine = Engine(_PlantRunner(self, setup), config, setup.knobs, lambda: self.now)
        super().__init__(setup, self.engine.report().stats)
        self._rows: dict[int, tuple[Row, Arrival]] = {}
        self._next_id = 0

    @property
    def effective(self) -> Knobs:
        return self.engine.effective

    @property
    def idle(self) -> bool:
        return not self.engine.busy

    def run(self, until: float) -> None:
        while self.now < until:
            self.engine.handle(self._due())
            if self.engine.busy:
                self.engine.step(self._due)
            else:
                self.now = min(until, self.inbox[0].at) if self.inbox else until
            self._hear()

    def _due(self) -> list[ToChild]:
        out: list[ToChild] = []
        while self.inbox and self.inbox[0].at <= self.now:
            arrival = self.inbox.popleft()
            if self._lets_in(arrival, len(out)):
                out.append(self._submit(arrival))
        return out

    def _submit(self, arrival: Arrival) -> Submit:
        self._next_id += 1
        row = Row(arrival.at, arrival.prompt)
        self._rows[self._next_id] = row, arrival
        self.seen.queue([row], retry=arrival.retry)
        sampling = Sampling(max_tokens=arrival.output)
        return Submit(self._next_id, arrival.tokens(), sampling, arrival.at, cache_prompt=bool(arrival.parts))

    def _hear(self) -> None:
        report = self.engine.report()
        for event in report.events:
            row, arrival = self._rows[event.id]
            if isinstance(event, Admitted):
                self.seen.admit(row, event.t, event.cached_tokens)
            elif isinstance(event, Tokens):
                self.seen.tokens(row, event.t, len(event.ids))
            elif isinstance(event, Finished):
                good = self.seen.slo_good["both"]
                del self._rows[event.id]
                self.seen.finish(row, event.t, event.reason)
                if self.seen.slo_good["both"] > good:
                    self.good_arrivals.append(arrival.born)
        self._settle()

    def _set(self, target: Knobs) -> None:
        self.engine.handle([SetKnobs(target)])

    def _running(self, now: float) -> None:
        self.seen.overdue((row for row, _ in self._rows.values()), now)
