"""The tuner loop: poll every pod, decide, move, report. One loop for all deployments, in a cluster and on one machine alike.

What differs is given: where the deployments come from (`subjects`), whether this process may steer and under which fence
(`epoch`, None = not now), and where the news goes (`Sink`). The decision itself is `tuner.law.decide`, which is pure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prometheus_client import Gauge

from weir_operator.io.metrics import DECISIONS, KNOB, LOAD, MOVES, POLLS, READ_AT, REPLICAS
from weir_operator.io.scrape import ControlClient
from weir_operator.loops.replicas import Counted
from weir_operator.loops.steering import Pod, Steering, Subject, poll, request_for, send
from weir_operator.plan.observed import TuningReport
from weir_operator.plan.tuning import (
    came_out,
    counted,
    knobs_status,
    proposed,
    remembered,
    report,
    resumable,
    scaled,
    tuner_spec,
)
from weir_operator.tuner.envelope import propose
from weir_operator.tuner.law import decide
from weir_operator.tuner.replicas import LEAST_TICK, load_ratio
from weir_operator.tuner.types import Decision, Outcome, PodView, Record, TunerSpec, TunerState

log = logging.getLogger(__name__)

KNOB_FIELDS = ("maxBatchSize", "maxQueueDepth", "admissionWatermarkPercent")
_START = time.time() - time.monotonic()


def wall_clock() -> float:
    """Seconds since 1970 that never jump while this process lives, and go on after a restart."""
    return _START + time.monotonic()


@dataclass(frozen=True, slots=True)
class TunerSettings:
    """Seconds. A lease must outlast a few polls: it is renewed after a third of it."""

    tick: float = 30.0
    poll: float = 5.0
    lease: float = 180.0
    spread: float = 0.0  # share of the poll interval over which the deployments' polls are spread
    replicas: float = LEAST_TICK  # between two looks at the number of pods, if not four ticks are longer
    report: float | None = None  # least time between two published reports of one deployment; None: as fits a cluster

    @property
    def report_every(self) -> float:
        return self.report if self.report is not None else 30.0 if self.tick >= 30.0 else 10.0


@dataclass(frozen=True, slots=True)
class Round:
    """What one poll of one deployment saw, decided and brought about: for displays and logs."""

    now: float
    spec: TunerSpec
    before: TunerState
    pods: dict[str, PodView]
    decision: Decision
    failed: dict[str, str]  # pod → why its move was not applied
    records: tuple[Record, ...]  # the decision's, as they came out
    count: Counted | None = None  # the number of pods, where the operator sets it


def _phase(uid: str) -> float:
    """In 0 … 1, the same at every poll: so a deployment's polls keep their distance, and those of a thousand do not fall on
    one moment."""
    return zlib.crc32(uid.encode()) / 2**32


class Sink(Protocol):
    """Where the news goes."""

    def polled(self, subject: Subject, round_: Round) -> None: ...
    def publish(self, subject: Subject, news: TuningReport) -> None: ...
    def forgotten(self, key: str) -> None: ...


def _show(key: str, name: str, pod: Pod | None) -> None:
    """The gauges of one pod: what it said at this poll. None: it is gone, and so are they; likewise while it is silent."""
    window = pod.polls[-1].window if pod else None
    for knob in KNOB_FIELDS:
        labels = (*key.split("/", 1), name, knob)
        if window:
            KNOB.labels(*labels).set(knobs_status(window.effective)[knob])
        else:
            with contextlib.suppress(KeyError):
                KNOB.remove(*labels)


def _show_reading(key: str, ready: Sequence[Pod], now: float) -> None:
    """When the ready pod that was read longest ago was last read; never read, it counts from the first attempt. `now` and the
    polls' times never jump; what is shown goes by the time of day, as those who read it do."""
    read = [next((poll.at for poll in reversed(pod.polls) if poll.window), pod.polls[0].at) for pod in ready]
    _show_number(key, READ_AT, time.time() - (now - min(read)) if read else None)


def _show_number(key: str, name: Gauge, value: float | None) -> None:
    """A gauge of one resource; None: there is nothing to say."""
    labels = key.split("/", 1)
    if value is not None:
        name.labels(*labels).set(value)
    else:
        with contextlib.suppress(KeyError):
            name.remove(*labels)


class TunerLoop:
    """Steers every subject each poll interval. One that fails does not touch the others; one that hangs takes no more of the
    interval than the spread leaves, unless more pods hang than are asked at once (`scrape.CONCURRENT`)."""

    def __init__(
        self, client: ControlClient, subjects: Callable[[], Iterable[Subject]], epoch: Callable[[], int | None], sink: Sink,
        settings: TunerSettings, clock: Callable[[], float] = wall_clock,
    ) -> None:
        self._client, self._subjects, self._epoch, self._sink = client, subjects, epoch, sink
        self._settings, self._clock = settings, clock
        self._steerings: dict[tuple[str, str], Steering] = {}
        self._led_as: int | None = None

    async def run(self) -> None:
        """Until cancelled. Polls keep their pace: a slow round delays the next one, it is never doubled."""
        while True:
            began = time.monotonic()
            await self.once()
            await asyncio.sleep(max(0.05, self._settings.poll - (time.monotonic() - began)))

    async def once(self) -> None:
        """One poll of everything. Not leading, or leading anew, it forgets: the last leader's state is in the status."""
        epoch = self._epoch()
        subjects = [] if epoch is None else list(self._subjects())
        known = set() if epoch != self._led_as else {s.identity for s in subjects}
        self._led_as = epoch
        for gone in set(self._steerings) - known:
            for pod in self._steerings.pop(gone).pods:
                _show(gone[0], pod, None)
            self._sink.forgotten(gone[0])
            _show_reading(gone[0], [], self._clock())
            for gauge in (REPLICAS, LOAD):
                _show_number(gone[0], gauge, None)
        results = await asyncio.gather(*(self._steer(s) for s in subjects), return_exceptions=True)
        for subject, result in zip(subjects, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                raise result
            if isinstance(result, BaseException):
                log.error("tuning %s failed", subject.key, exc_info=result)

    async def _steer(self, subject: Subject) -> None:
        steering = self._steerings.get(subject.identity)
        if steering is None:
            steering = self._steerings[subject.identity] = Steering.resumed(subject.saved)
        spec = tuner_spec(subject.resource.spec, self._settings.tick, self._settings.poll)
        names = {e.name for e in subject.endpoints}
        for gone in set(steering.pods) - names:
            _show(subject.key, gone, None)
        steering.pods = {name: steering.pods.get(name) or Pod() for name in sorted(names)}
        await asyncio.sleep(self._settings.spread * self._settings.poll * _phase(subject.resource.metadata.uid))
        now = self._clock()
        await asyncio.gather(*(poll(self._client, e, steering.pods[e.name], now) for e in subject.endpoints))
        for name, pod in steering.pods.items():
            POLLS.labels("silent" if pod.silent else "ok").inc()
            _show(subject.key, name, pod)
        _show_reading(subject.key, [steering.pods[e.name] for e in subject.endpoints if e.ready], now)
        views = {name: pod.view(name) for name, pod in steering.pods.items()}
        decision = decide(steering.state, views, spec, now)
        failed = await self._apply(subject, steering, spec, decision, now)
        serving = {e.name: views[e.name] for e in subject.endpoints if e.ready}
        count = self._count(subject, steering, serving, decision, spec, now)
        if decision.records:
            steering.proposal = propose(steering.proposal, serving, decision.state, spec, now)
        round_ = Round(now, spec, steering.state, views, decision, failed, came_out(decision.records, failed), count)
        self._absorb(subject, steering, round_)
        self._sink.polled(subject, round_)
        self._publish(subject, steering, now)

    def _count(
        self, subject: Subject, steering: Steering, serving: dict[str, PodView], decision: Decision, spec: TunerSpec,
        now: float,
    ) -> Counted | None:
        """How many pods, after the knobs were decided; and once a tick the load, for autoscalers of others."""
        wish, generation = subject.resource.spec.autoscaling, subject.resource.status.get("observedGeneration", -1)
        found = steering.count.decide(
            wish, subject.replicas, generation, serving, decision.state, spec, self._settings.replicas, now,
        )
        _show_number(subject.key, REPLICAS, found.decision.desired if found else None)
        if decision.records or wish.mode == "Disabled":
            load = load_ratio(serving, decision.state, spec, now) if wish.mode != "Disabled" else None
            _show_number(subject.key, LOAD, load)
        return found

    async def _apply(
        self, subject: Subject, steering: Steering, spec: TunerSpec, decision: Decision, now: float,
    ) -> dict[str, str]:
        """Set what was decided, renew what is due. Returns pod → why its move was not applied."""
        epoch = self._epoch()
        if epoch is None:  # leadership was lost while polling
            return {move.pod: "this operator no longer leads" for move in decision.moves}
        moves = {move.pod: move for move in decision.moves}

        async def one(name: str, pod: Pod) -> str | None:
            if pod.silent:
                return pod.silent
            move, why = moves.get(name), None
            if move and not (move.emergency or endpoints[name].ready):
                move, why = None, "the pod is not ready"
            request = request_for(pod, spec, subject.resource, move, epoch, self._settings.lease, now)
            return (await send(self._client, endpoints[name], pod, request, now) if request else None) or why

        endpoints = {e.name: e for e in subject.endpoints}
        names = list(steering.pods)
        answers = await asyncio.gather(*(one(name, steering.pods[name]) for name in names))
        return {name: why for name, why in zip(names, answers, strict=True) if why and name in moves}

    def _absorb(self, subject: Subject, steering: Steering, round_: Round) -> None:
        """The one place where what came of a round goes into memory, metrics and the log."""
        steering.state = round_.decision.state
        steering.history = remembered(steering.history, round_.records)
        if (count := round_.count) and count.decision.outcome:
            DECISIONS.labels("replicas", count.decision.outcome.value).inc()
            if count.changed:
                steering.history = scaled(steering.history, count.before, count.decision, round_.now)
                log.info("%s: %s: %s", subject.key, count.decision.outcome, count.decision.reason, extra={
                    "event": "decision", "resource": subject.key, "rule": "replicas", "outcome": count.decision.outcome.value,
                    "changes": {"replicas": [count.before, count.decision.desired]},
                })
        for move in round_.decision.moves:
            for knob in move.knobs:
                MOVES.labels(knob, "refused" if move.pod in round_.failed else "set").inc()
        for record in round_.records:
            steering.outcomes[record.pod] = record
            DECISIONS.labels(record.rule, record.outcome.value).inc()
            if record.changes and record.outcome is not Outcome.ADVISED:
                level = logging.WARNING if record.outcome is Outcome.NOT_SET else logging.INFO
                said = {
                    "event": "decision", "resource": subject.key, "pod": record.pod, "rule": record.rule,
                    "outcome": record.outcome.value, "changes": record.changes,
                }
                log.log(level, "%s: %s: %s (%s): %s", subject.key, record.pod, record.outcome, record.rule, record.reason,
                        extra=said)
        steering.outcomes = {name: r for name, r in steering.outcomes.items() if name in steering.pods}

    def _publish(self, subject: Subject, steering: Steering, now: float) -> None:
        """Report when something worth a write changed, not too often; another number of pods is not held back."""
        pods, count, wait = steering.pods, steering.count, self._settings.report_every
        urgent = count.wanted != (steering.published.desired if steering.published else None)
        if steering.published_at is not None and now - steering.published_at < wait and not urgent:
            return
        count.leaving = tuple(name for name in count.leaving if name in pods)
        news = report(
            subject.resource, {name: pod.view(name) for name, pod in pods.items()},
            {e.name for e in subject.endpoints if e.ready}, steering.outcomes, steering.state, steering.history,
            {name: pod.silent for name, pod in pods.items() if pod.silent},
            "; ".join(f"{name}: {pod.drift}" for name, pod in pods.items() if pod.drift),
            tuple(name for name, pod in pods.items() if pod.other_contract),
        )
        news = proposed(news, steering.proposal.standing)
        if count.wanted is not None:
            news = counted(news, count.wanted, count.last, count.status(), count.generation)
        worth = replace(news, reason="")  # a reason has figures in it, other ones at each tick
        if worth != steering.published:
            steering.published, steering.published_at = worth, now
            self._sink.publish(subject, resumable(news, steering.state, count.state if count.wanted is not None else None))
