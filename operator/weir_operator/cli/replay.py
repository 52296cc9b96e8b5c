"""`weir-operator replay`: the saved readings through the same function once more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import orjson
import typer

from weir_operator.cli.decision_log import outcome
from weir_operator.tuner.law import decide
from weir_operator.tuner.types import HISTORY_SECONDS, PodView, Poll, TunerSpec, TunerState
from weir_server.contract import ControlState, Window


class _Pods:
    """Views rebuilt from the log's lines, as the tuner loop builds them from the pods."""

    def __init__(self) -> None:
        self._polls: dict[str, deque[Poll]] = {}
        self._controls: dict[str, tuple[str, ControlState | None]] = {}

    def read(self, line: dict[str, Any]) -> None:
        name = line["pod"]
        if "control" in line:
            self._controls[name] = (line["class"], ControlState.from_wire(line["control"]) if line["control"] else None)
            return
        window = Window.from_wire(line["window"]) if line["window"] else None
        polls = self._polls.setdefault(name, deque())
        polls.append(Poll(line["at"], window))
        while polls[0].at < line["at"] - HISTORY_SECONDS:
            polls.popleft()

    def views(self, names: list[str]) -> dict[str, PodView]:
        for gone in set(self._polls) - set(names):
            del self._polls[gone]
        return {name: PodView(name, *self._controls[name], tuple(self._polls[name])) for name in names}


def _decisions(lines: Iterator[bytes]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(what was decided, what is decided now) for each decision of the log."""
    pods, state = _Pods(), TunerState()
    for text in lines:
        line = orjson.loads(text)
        if "now" not in line:
            pods.read(line)
            continue
        if "state" in line:
            state = TunerState.from_json(line["state"])
        decision = decide(state, pods.views(line["pods"]), TunerSpec.from_json(line["spec"]), line["now"])
        state = decision.state
        yield {"moves": line["moves"], "records": line["records"]}, outcome(decision)


def replay_log(log: Path, fail: Callable[[str], NoReturn]) -> int:
    """Exit status: 0 all decisions are the same, 1 one differs (printed)."""
    count = moves = 0
    try:
        with log.open("rb") as file:
            for then, again in _decisions(iter(file)):
                count += 1
                moves += len(then["moves"])
                if then != again:
                    typer.echo(f"decision {count} differs")
                    for label, value in (("then", then), ("again", again)):
                        typer.echo(f"{label}: {orjson.dumps(value).decode()}")
                    return 1
    except OSError as e:
        fail(f"cannot read {log}: {e.strerror}")
    except (ValueError, KeyError, TypeError) as e:
        fail(f"{log} is no decision log of this version: {type(e).__name__} {e}")
    typer.echo(f"{count} decisions with {moves} moves: the same again")
    return 0
