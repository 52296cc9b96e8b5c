"""Runs of a pod in virtual time: with knobs that stay, with a law that moves them, and over a grid of settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from weir_operator.simulate.load import Arrival
from weir_operator.simulate.pod import Pod
from weir_operator.simulate.port import PodSetup, Port
from weir_operator.simulate.twin import Pressed, Twin
from weir_operator.tuner.law import decide
from weir_operator.tuner.types import Decision, Move, PodView, Poll, Record, TunerSpec, TunerState
from weir_operator.tuner.window import remember
from weir_server.contract import Knobs, Window

WARM_UP = 0.2
"""Share of a run that is not counted: every law starts from the same wrong setting."""
FINISH_SECONDS = 600.0
POD = "pod"
Law = Callable[[TunerState, Mapping[str, PodView], TunerSpec, float], Decision]


@dataclass(frozen=True)
class Result:
    goodput: float  # share of the rows offered after the warm-up that met both objectives
    boot_batch: int
    knobs: Knobs  # at the end
    moves: tuple[tuple[float, Move], ...] = ()
    records: tuple[Record, ...] = ()
    good: tuple[float, ...] = ()  # when good rows were offered, in order
    window: Window | None = field(default=None, compare=False)  # the last one

    @property
    def turns(self) -> tuple[float, ...]:
        """When the batch's direction changed."""
        steps = [(at, m.knobs["max_batch_size"]) for at, m in self.moves if "max_batch_size" in m.knobs]
        grows = [(at, size > before) for (_, before), (at, size) in pairwise([(0.0, self.boot_batch), *steps])]
        return tuple(at for (_, before), (at, now) in pairwise(grows) if now != before)

    @property
    def reversals(self) -> int:
        return len(self.turns)


def static(setup: PodSetup, rows: Sequence[Arrival], end: float, warm_up: float = WARM_UP) -> Result:
    """Knobs stay at the boot values."""
    def go(pod: Port) -> Result:
        pod.run(end)
        return _result(pod, rows, end, warm_up)

    return _fastest(setup, rows, go, watched=False)


def tuned(
    setup: PodSetup, rows: Sequence[Arrival], end: float, spec: TunerSpec, law: Law = decide, warm_up: float = WARM_UP,
    state: TunerState | None = None,
) -> Result:
    """The operator's loop: a window at every poll, the law, and its moves through the control port."""
    def go(pod: Port) -> Result:
        known, polls = state or TunerState(), deque[Poll]()
        moves: list[tuple[float, Move]] = []
        records: list[Record] = []
        now = 0.0
        while now < end:
            pod.run(now)
            remember(polls, Poll(now, pod.window()))
            decision = law(known, {POD: PodView(POD, "simulated", pod.control(), tuple(polls))}, spec, now)
            known = decision.state
            records += decision.records
            for move in decision.moves:
                pod.set_knobs(move.knobs, seq=len(moves) + 1)
                moves.append((now, move))
            now += spec.poll_seconds
        pod.run(end)
        return replace(_result(pod, rows, end, warm_up), moves=tuple(moves), records=tuple(records))

    return _fastest(setup, rows, go)


def _fastest(setup: PodSetup, rows: Sequence[Arrival], go: Callable[[Port], Result], watched: bool = True) -> Result:
    """On the twin; where KV is short or prompts share content, once more on the pod whose every step is real."""
    if not any(row.parts for row in rows):
        try:
            return go(_filled(Twin(setup, watched), rows))
        except Pressed:
            pass
    return go(_filled(Pod(setup), rows))


def _filled(pod: Port, rows: Iterable[Arrival]) -> Port:
    pod.inbox.extend(rows)
    return pod


def finish(pod: Port) -> None:
    """Serve what it has, within FINISH_SECONDS."""
    last = pod.now + FINISH_SECONDS
    while not pod.idle and pod.now < last:
        pod.run(min(last, pod.now + 5.0))


def goodput(good: Iterable[float], rows: Iterable[Arrival], start: float, end: float) -> float:
    """Share of the rows offered from `start` to `end` that were good; `good`: when those had been offered."""
    offered = sum(start <= row.at < end for row in rows)
    return sum(start <= t < end for t in good) / offered if offered else 0.0


def grid(
    setup: PodSetup, rows: Sequence[Arrival], end: float, batches: Sequence[int], depths: Sequence[int],
    warm_up: float = WARM_UP,
) -> tuple[Knobs, Result]:
    """The best setting that stays, by trying them all on the same arrivals."""
    knobs = [replace(setup.knobs, max_batch_size=b, max_queue_depth=q) for b in batches for q in depths]
    results = [(k, static(replace(setup, boot=k), rows, end, warm_up)) for k in knobs]
    return max(results, key=lambda pair: pair[1].goodput)


def _result(pod: Port, rows: Sequence[Arrival], end: float, warm_up: float) -> Result:
    """What the run came to, after what was accepted has finished."""
    pod.inbox.clear()
    finish(pod)
    share = goodput(pod.good_arrivals, rows, warm_up * end, end)
    return Result(
        share, pod.setup.boot.max_batch_size, pod.board.target, good=tuple(sorted(pod.good_arrivals)), window=pod.window()
    )
