"""Several pods behind a router, clients that come back after a refusal, and pods that start slowly.

Time goes from one event to the next (an arrival, a retry, a poll); every pod is run up to it, then it happens. A router sees
each pod's rows as they are after the step that is under way.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from weir_operator.simulate.load import Arrival
from weir_operator.simulate.pod import Pod
from weir_operator.simulate.port import PodSetup, Port
from weir_operator.simulate.run import WARM_UP, Law, finish, goodput
from weir_operator.simulate.twin import Pressed, Twin
from weir_operator.tuner.law import decide
from weir_operator.tuner.types import Move, PodView, Poll, Record, TunerSpec, TunerState
from weir_operator.tuner.window import remember


class Router(Protocol):
    """Chooses one of the ready pods for a row."""

    def choose(self, pods: Sequence[Port], arrival: Arrival) -> Port: ...


class RoundRobin:
    def __init__(self) -> None:
        self._turn = 0

    def choose(self, pods: Sequence[Port], arrival: Arrival) -> Port:
        self._turn += 1
        return pods[self._turn % len(pods)]


class LeastLoaded:
    """The pod with the fewest rows; of equals, the first one after the last choice."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, pods: Sequence[Port], arrival: Arrival) -> Port:
        self._turn += 1
        order = [pods[(self._turn + i) % len(pods)] for i in range(len(pods))]
        return min(order, key=_rows)


class PrefixAware:
    """The pod that has seen most of the prompt's start, unless it has `slack` rows more than the least loaded one."""

    def __init__(self, slack: int = 4, remembers: int = 4096) -> None:
        self._least, self._slack, self._remembers = LeastLoaded(), slack, remembers
        self._known: dict[int, dict[int, None]] = {}

    def choose(self, pods: Sequence[Port], arrival: Arrival) -> Port:
        best = max(pods, key=lambda pod: (self._overlap(pod, arrival), -_rows(pod)))
        light = self._least.choose(pods, arrival)
        if not self._overlap(best, arrival) or _rows(best) > _rows(light) + self._slack:
            best = light
        known = self._known.setdefault(id(best), {})
        for part in arrival.parts:
            known.pop(part, None)
            known[part] = None
        while len(known) > self._remembers:
            del known[next(iter(known))]
        return best

    def _overlap(self, pod: Port, arrival: Arrival) -> int:
        known = self._known.get(id(pod), {})
        return next((i for i, part in enumerate(arrival.parts) if part not in known), len(arrival.parts))


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin, "least-loaded": LeastLoaded, "prefix-aware": PrefixAware,
}


def _rows(pod: Port) -> int:
    return pod.load.running + pod.load.waiting + len(pod.inbox)


@dataclass(frozen=True, slots=True)
class Retries:
    """A refused client comes back after `delay` seconds, twice as long each time, ± 25 %, at most `times`."""

    delay: float = 1.0
    times: int = 2


@dataclass(frozen=True)
class FleetResult:
    goodput: float  # share of distinct rows offered after the warm-up that met both objectives
    replica_seconds: float
    good: tuple[float, ...]
    offered: int  # distinct rows, whole run
    attempts: int
    moves: tuple[tuple[float, Move], ...] = ()
    records: tuple[Record, ...] = ()
    replicas: tuple[tuple[float, int], ...] = ()  # (time, pods wanted), at each change

    @property
    def replica_seconds_per_good(self) -> float:
        return self.replica_seconds / len(self.good) if self.good else float("inf")


Scaler = Callable[[float, Sequence[PodView], int, TunerState], int]
"""(now, views of the ready pods, pods started, what the tuner knows) → pods wanted."""


@dataclass
class _Member:
    name: str
    pod: Port
    ready_at: float
    polls: deque[Poll] = field(default_factory=deque)
    leaving: bool = False
    gone_at: float | None = None

    def view(self) -> PodView:
        return PodView(self.name, "simulated", self.pod.control(), tuple(self.polls))


class Fleet:
    """`setups`: one a pod, the last one also for those that a scaler adds. `kind`: Twin or Pod."""

    def __init__(
        self, kind: Callable[[PodSetup], Port], setups: Sequence[PodSetup], router: Router, retries: Retries | None, seed: int,
    ) -> None:
        self._kind, self._setups, self._router, self._retries = kind, setups, router, retries
        self._rng = random.Random(seed)
        self._again: list[tuple[float, int, Arrival]] = []
        self._count = itertools.count()
        self.members: list[_Member] = []
        self.moves: list[tuple[float, Move]] = []
        self.records: list[Record] = []
        self.replicas: list[tuple[float, int]] = []
        self.attempts = self._made = 0
        for _ in setups:
            self._start(0.0)

    def _start(self, now: float) -> None:
        setup = self._setups[min(self._made, len(self._setups) - 1)]
        setup = replace(setup, seed=setup.seed + self._made)
        pod = self._kind(setup)
        pod.now = now + setup.starts_after
        pod.instance = pod.board.instance = f"pod-{self._made}"
        pod.refused = self._come_back
        self.members.append(_Member(pod.instance, pod, pod.now))
        self._made += 1

    def _come_back(self, arrival: Arrival) -> None:
        if self._retries and arrival.tries < self._retries.times:
            at = arrival.at + self._retries.delay * 2**arrival.tries * self._rng.uniform(0.75, 1.25)
            again = replace(arrival, at=at, tries=arrival.tries + 1, first=arrival.born)
            heapq.heappush(self._again, (at, next(self._count), again))

    def run(self, rows: Sequence[Arrival], end: float, spec: TunerSpec | None, law: Law, scaler: Scaler | None) -> None:
        state, poll, incoming = TunerState(), spec.poll_seconds if spec else 5.0, deque(rows)
        at = 0.0
        while at < end:
            self._route_until(at, incoming)
            self._advance(at)
            self._poll(at)
            if spec is not None:
                state = self._tune(state, spec, law, at)
            if scaler is not None:
                self._scale(scaler, state, at)
            at += poll
        self._route_until(end, incoming)
        self._advance(end)

    def _route_until(self, at: float, incoming: deque[Arrival]) -> None:
        while (following := self._following(incoming)) is not None and following < at:
            self._route(self._next(incoming), following)

    def _following(self, incoming: deque[Arrival]) -> float | None:
        times = [incoming[0].at] if incoming else []
        times += [self._again[0][0]] if self._again else []
        return min(times, default=None)

    def _next(self, incoming: deque[Arrival]) -> Arrival:
        if self._again and (not incoming or self._again[0][0] < incoming[0].at):
            return heapq.heappop(self._again)[2]
        return incoming.popleft()

    def _route(self, arrival: Arrival, now: float) -> None:
        """A row that meets no ready pod is lost, as a Service without endpoints loses it."""
        ready = [m.pod for m in self.members if m.ready_at <= now and not m.leaving]
        for pod in ready:
            pod.run(now)
        self.attempts += 1
        if ready:
            self._router.choose(ready, arrival).inbox.append(arrival)
        else:
            self._come_back(arrival)

    def _advance(self, now: float) -> None:
        for member in self.members:
            if member.ready_at <= now and member.gone_at is None:
                member.pod.run(now)
                if member.leaving and member.pod.idle and not member.pod.inbox:
                    member.gone_at = now

    def _poll(self, now: float) -> None:
        for member in self.members:
            if member.ready_at <= now and member.gone_at is None:
                remember(member.polls, Poll(now, member.pod.window()))

    def _present(self, now: float) -> list[_Member]:
        return [m for m in self.members if m.ready_at <= now and not m.leaving]

    def _tune(self, state: TunerState, spec: TunerSpec, law: Law, now: float) -> TunerState:
        present = {m.name: m for m in self._present(now)}
        decision = law(state, {name: m.view() for name, m in present.items()}, spec, now)
        self.records += decision.records
        for move in decision.moves:
            self.moves.append((now, move))
            present[move.pod].pod.set_knobs(move.knobs, seq=len(self.moves))
        return decision.state

    def _scale(self, scaler: Scaler, state: TunerState, now: float) -> None:
        staying = [m for m in self.members if not m.leaving]
        wanted = scaler(now, [m.view() for m in self._present(now)], len(staying), state)
        if not self.replicas or self.replicas[-1][1] != wanted:
            self.replicas.append((now, wanted))
        for _ in range(wanted - len(staying)):
            self._start(now)
        for member in sorted(staying, key=lambda m: -m.ready_at)[:max(0, len(staying) - wanted)]:
            member.leaving = True
            member.gone_at = now if member.ready_at > now else None

    def result(self, rows: Sequence[Arrival], end: float, warm_up: float) -> FleetResult:
        for member in self.members:
            finish(member.pod)
        good = sorted(t for m in self.members for t in m.pod.good_arrivals)
        share = goodput(good, rows, warm_up * end, end)
        started = [(m.ready_at - m.pod.setup.starts_after, m.gone_at if m.gone_at is not None else end) for m in self.members]
        seconds = sum(max(0.0, min(b, end) - a) for a, b in started)
        return FleetResult(
            share, seconds, tuple(good), len(rows), self.attempts, tuple(self.moves), tuple(self.records),
            tuple(self.replicas),
        )


def fleet(
    setups: Sequence[PodSetup], rows: Sequence[Arrival], end: float, *, router: str = "least-loaded",
    retries: Retries | None = None, spec: TunerSpec | None = None, law: Law = decide,
    scaler: Callable[[], Scaler] | None = None, seed: int = 0, warm_up: float = WARM_UP,
) -> FleetResult:
    """Run it. Without a `spec` knobs stay. `scaler` makes a fresh one, since a run may be repeated with real steps."""
    kinds: Iterable[Callable[[PodSetup], Port]] = (Pod,) if any(row.parts for row in rows) else (Twin, Pod)
    for kind in kinds:
        pods = Fleet(kind, setups, ROUTERS[router](), retries, seed)
        try:
            pods.run(rows, end, spec, law, scaler() if scaler else None)
            return pods.result(rows, end, warm_up)
        except Pressed:
            continue
    raise AssertionError("a pod with real steps is never pressed")
