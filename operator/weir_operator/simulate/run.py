"""Runs of a pod in virtual time: with knobs that stay, with the tuner's own decide(), and over a grid of settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weir_operator.simulate.load import Arrival, Phase, arrivals
from weir_operator.simulate.pod import Pod, PodSetup
from weir_operator.tuner.law import decide
from weir_operator.tuner.types import HISTORY_SECONDS, Move, PodView, Poll, Record, TunerSpec, TunerState
from weir_server.contract import Knobs

WARM_UP = 0.2
"""Share of a run that is not counted: every law starts from the same wrong setting."""
FINISH_SECONDS = 600.0


@dataclass(frozen=True)
class Result:
    goodput: float  # share of the rows offered after the warm-up that met both objectives
    boot_batch: int
    knobs: Knobs  # at the end
    moves: tuple[tuple[float, Move], ...] = ()
    records: tuple[Record, ...] = ()
    good: tuple[float, ...] = ()  # arrival times of good rows

    @property
    def reversals(self) -> int:
        """Changes of the batch's direction."""
        sizes = [m.knobs["max_batch_size"] for _, m in self.moves if "max_batch_size" in m.knobs]
        signs = [b > a for a, b in pairwise([self.boot_batch, *sizes])]
        return sum(a != b for a, b in pairwise(signs))


def static(setup: PodSetup, phases: Sequence[Phase], seed: int) -> Result:
    """Knobs stay at the boot values."""
    pod = Pod(setup)
    incoming = arrivals(phases, seed, setup.context)
    pod.run(phases[-1].end, incoming, [])
    return _result(pod, phases, seed)


def tuned(setup: PodSetup, phases: Sequence[Phase], seed: int, spec: TunerSpec) -> Result:
    """The operator's loop: a window at every poll, decide(), and its moves through the control port."""
    pod, state, polls = Pod(setup), TunerState(), deque[Poll]()
    incoming = arrivals(phases, seed, setup.context)
    ahead: list[Arrival] = []
    moves: list[tuple[float, Move]] = []
    records: list[Record] = []
    now = 0.0
    while now < phases[-1].end:
        pod.run(now, incoming, ahead)
        polls.append(Poll(now, pod.window()))
        while polls[0].at < now - HISTORY_SECONDS:
            polls.popleft()
        decision = decide(state, {"pod": PodView("pod", "simulated", pod.control(), tuple(polls))}, spec, now)
        state = decision.state
        records += decision.records
        for move in decision.moves:
            pod.set_knobs(move.knobs, seq=len(moves) + 1)
            moves.append((now, move))
        now += spec.poll_seconds
    pod.run(phases[-1].end, incoming, ahead)
    return replace(_result(pod, phases, seed), moves=tuple(moves), records=tuple(records))


def grid(
    setup: PodSetup, phases: Sequence[Phase], seed: int, batches: Sequence[int], depths: Sequence[int]
) -> tuple[Knobs, Result]:
    """The best setting that stays, by trying them all on the same arrivals."""
    knobs = [replace(setup.knobs, max_batch_size=b, max_queue_depth=q) for b in batches for q in depths]
    results = [(k, static(replace(setup, boot=k), phases, seed)) for k in knobs]
    return max(results, key=lambda pair: pair[1].goodput)


def _result(pod: Pod, phases: Sequence[Phase], seed: int) -> Result:
    """What the run came to, after what was accepted has finished."""
    end = pod.now + FINISH_SECONDS
    while not pod.idle and pod.now < end:
        pod.run(min(end, pod.now + 5.0), iter(()), [])
    start = WARM_UP * phases[-1].end
    offered = sum(a.at >= start for a in arrivals(phases, seed, pod.setup.context))
    share = sum(t >= start for t in pod.good_arrivals) / offered if offered else 0.0
    return Result(share, pod.setup.boot.max_batch_size, pod.board.target, good=tuple(pod.good_arrivals))
