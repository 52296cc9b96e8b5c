"""The decision log: every reading and every decision as JSON lines, small enough to keep and enough to decide again.

Each line names its deployment (`of`). `{"begin": state, "again": bool}` opens what can be replayed from there: it comes where
the law's memory is not what the last decision left (a start, a change of leader), and `again` every BEGIN_EVERY, so that an
excerpt is enough. Then `{"pod", "class", "control"}` when a pod's state was read,
`{"pod", "at", "window"}` for each reading, and `{"now", "spec", "pods", "moves", "records"}` for each decision.
Bound: a file is renamed to FILE.1 once it holds MOST_BYTES, so two of them are the most; `-` is standard output.
A line that cannot be written costs the log a gap and never the operator a tick.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from weir_operator.loops.tuner import Round
from weir_operator.tuner.types import Decision, TunerState
from weir_server.contract import ControlState

log = logging.getLogger(__name__)
MOST_BYTES = 256 * 2**20
BEGIN_EVERY = 600.0


def outcome(decision: Decision) -> dict[str, Any]:
    """What a replay must reproduce, in JSON's types."""
    found = {"moves": [asdict(m) for m in decision.moves], "records": [r.to_json() for r in decision.records]}
    return dict(orjson.loads(orjson.dumps(found)))


class DecisionLog:
    """Appends; each round is flushed. OSError: the file cannot be opened."""

    def __init__(self, file: Path) -> None:
        self._path = None if str(file) == "-" else file
        self._file: BinaryIO = sys.stdout.buffer if self._path is None else self._path.open("ab")
        self._controls: dict[tuple[str, str], ControlState | None] = {}
        self._begun: dict[str, float] = {}
        self._after: dict[str, TunerState] = {}  # what the last decision written left
        self._broken = False

    def write(self, of: str, round_: Round) -> None:
        try:
            self._round(of, round_)
            self._file.flush()
            self._broken = False
            if self._path is not None and self._file.tell() > MOST_BYTES:
                self._turn_over(self._path)
        except OSError as e:
            self._after.pop(of, None)  # what follows the gap must be replayable without what was before it
            if not self._broken:
                log.warning("the decision log has a gap from here on: %s", e)
            self._broken = True

    def _round(self, of: str, round_: Round) -> None:
        again = round_.before is self._after.get(of)
        fresh = not again or round_.now - self._begun[of] >= BEGIN_EVERY
        if fresh:
            self._line({"of": of, "begin": round_.before.to_json(), "again": again})
        for name, view in round_.pods.items():
            known = (of, name)
            if fresh or known not in self._controls or view.control is not self._controls[known]:
                self._controls[known] = view.control
                control = view.control.to_wire() if view.control else None
                self._line({"of": of, "pod": name, "class": view.pod_class, "control": control})
            for poll in view.polls if fresh else view.polls[-1:]:
                self._line({"of": of, "pod": name, "at": poll.at, "window": poll.window.to_wire() if poll.window else None})
        self._after[of] = round_.decision.state
        if fresh:
            self._begun[of] = round_.now
        for gone in [known for known in self._controls if known[0] == of and known[1] not in round_.pods]:
            del self._controls[gone]
        spec, pods = round_.spec.to_json(), list(round_.pods)
        line = {"of": of, "now": round_.now, "spec": spec, "pods": pods, **outcome(round_.decision)}
        if (count := round_.count) and count.decision.outcome:  # told, not decided again by a replay
            told = {k: getattr(count.decision, k) for k in ("desired", "outcome", "reason", "offered", "capacity")}
            line["replicas"] = {"before": count.before, **told}
        self._line(line)

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS) + b"\n")

    def _turn_over(self, path: Path) -> None:
        self._file.close()
        path.replace(path.with_name(path.name + ".1"))
        self._file = path.open("ab")
        self._after.clear()

    def close(self) -> None:
        if self._path is not None:
            self._file.close()
