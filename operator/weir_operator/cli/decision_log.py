"""The decision log: every reading and every decision as JSON lines, small enough to keep and enough to decide again.

Lines: `{"pod", "class", "control"}` when a pod's state was read, `{"pod", "at", "window"}` for each reading, and
`{"now", "spec", "pods", "moves", "records"}` for each decision; the first decision carries the `state` before it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from weir_operator.loops.tuner import Round
from weir_operator.tuner.types import Decision
from weir_server.contract import ControlState


def outcome(decision: Decision) -> dict[str, Any]:
    """What a replay must reproduce, in JSON's types."""
    found = {"moves": [asdict(m) for m in decision.moves], "records": [r.to_json() for r in decision.records]}
    return dict(orjson.loads(orjson.dumps(found)))


class DecisionLog:
    """Appends to a file; each round is flushed."""

    def __init__(self, file: Path) -> None:
        self._file: BinaryIO = file.open("ab")
        self._controls: dict[str, ControlState | None] = {}
        self._begun = False

    def write(self, round_: Round) -> None:
        for name, view in round_.pods.items():
            if name not in self._controls or view.control is not self._controls[name]:
                self._controls[name] = view.control
                self._line({"pod": name, "class": view.pod_class, "control": view.control.to_wire() if view.control else None})
            last = view.polls[-1]
            self._line({"pod": name, "at": last.at, "window": last.window.to_wire() if last.window else None})
        line = {"now": round_.now, "spec": round_.spec.to_json(), "pods": list(round_.pods), **outcome(round_.decision)}
        self._line(line if self._begun else {**line, "state": round_.before.to_json()})
        self._begun = True
        self._file.flush()

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS) + b"\n")

    def close(self) -> None:
        self._file.close()
