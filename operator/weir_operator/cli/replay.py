"""`weir-operator replay`: the saved readings through the law once more, or through another one."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import orjson
import typer

from weir_operator.cli.decision_log import outcome
from weir_operator.tuner.law import decide
from weir_operator.tuner.types import HISTORY_SECONDS, Decision, PodView, Poll, TunerSpec, TunerState
from weir_server.contract import ControlState, Window

Law = Callable[[TunerState, Mapping[str, PodView], TunerSpec, float], Decision]
MOST_SHOWN = 50


@dataclass
class _Replayed:
    """One deployment: its views rebuilt from the lines as the tuner loop builds them from the pods, and the law's memory."""

    state: TunerState
    polls: dict[str, deque[Poll]] = field(default_factory=dict)
    controls: dict[str, tuple[str, ControlState | None]] = field(default_factory=dict)

    def read(self, line: dict[str, Any]) -> None:
        name = line["pod"]
        if "control" in line:
            self.controls[name] = (line["class"], ControlState.from_wire(line["control"]) if line["control"] else None)
            return
        polls = self.polls.setdefault(name, deque())
        if polls and line["at"] <= polls[-1].at:
            return  # told once more, for those who begin here
        polls.append(Poll(line["at"], Window.from_wire(line["window"]) if line["window"] else None))
        while polls[0].at < line["at"] - HISTORY_SECONDS:
            polls.popleft()

    def decide(self, line: dict[str, Any], law: Law) -> dict[str, Any]:
        for gone in set(self.polls) - set(line["pods"]):
            del self.polls[gone]
        views = {name: PodView(name, *self.controls[name], tuple(self.polls[name])) for name in line["pods"]}
        decision = law(self.state, views, TunerSpec.from_json(line["spec"]), line["now"])
        self.state = decision.state
        return outcome(decision)


def _decisions(lines: Iterator[bytes], law: Law) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(the line of a decision, what is decided now) for each. Lines of others, and cut ones, are passed over: a log may be an
    excerpt of a container's output."""
    found: dict[str, _Replayed] = {}
    for text in lines:
        try:
            line = orjson.loads(text)
        except ValueError:
            continue
        if not isinstance(line, dict) or "of" not in line:
            continue
        of = line["of"]
        if "begin" in line:
            if of not in found or not line["again"]:
                found[of] = _Replayed(TunerState.from_json(line["begin"]))
        elif of in found and "now" in line:
            yield line, found[of].decide(line, law)
        elif of in found:
            found[of].read(line)


def law_named(name: str, fail: Callable[[str], NoReturn]) -> Law:
    """A function with the signature of `tuner.law.decide`, from `package.module:function`."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as e:
        fail(f"--with-law {name}: {e}; write it as package.module:function")
    if not callable(found):
        fail(f"--with-law {name} is no function")
    return found


def replay_log(log: Path, with_law: str | None, fail: Callable[[str], NoReturn]) -> int:
    """Exit status: 0 all decisions are the same, 1 some differ (printed: the first, or with another law up to MOST_SHOWN)."""
    law = law_named(with_law, fail) if with_law else decide
    count = moves = differ = 0
    try:
        with log.open("rb") as file:
            for line, again in _decisions(iter(file), law):
                count += 1
                moves += len(line["moves"])
                then = {"moves": line["moves"], "records": line["records"]}
                if then == again:
                    continue
                differ += 1
                if with_law is None:
                    typer.echo(f"decision {count} differs, of {line['of']}")
                    for label, value in (("then", then), ("again", again)):
                        typer.echo(f"{label}: {orjson.dumps(value).decode()}")
                    return 1
                if differ <= MOST_SHOWN:
                    typer.echo(_difference(line, again))
    except OSError as e:
        fail(f"cannot read {log}: {e.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        fail(f"{log} is no decision log of this version: {type(e).__name__} {e}")
    if not count:
        fail(f"{log} holds no decision with its beginning")
    if not differ:
        typer.echo(f"{count} decisions with {moves} moves: the same again")
        return 0
    if differ > MOST_SHOWN:
        typer.echo(f"… and {differ - MOST_SHOWN} more")
    typer.echo(f"{differ} of {count} decisions differ. The readings are what came of the law that ran, not of the other one.")
    return 1


def _difference(line: dict[str, Any], again: dict[str, Any]) -> str:
    """Both laws' records of one decision, in two lines for each pod on which they differ."""
    clock = datetime.fromtimestamp(line["now"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = []
    then, now = ({r["pod"]: r for r in records} for records in (line["records"], again["records"]))
    for pod in sorted({*then, *now}):
        if then.get(pod) != now.get(pod):
            text += [f"{clock} {line['of']} {pod}", f"  then: {_said(then.get(pod))}", f"  new:  {_said(now.get(pod))}"]
    return "\n".join(text)


def _said(record: dict[str, Any] | None) -> str:
    if record is None:
        return "nothing"
    changes = "".join(f", {knob} {a:g} → {b:g}" for knob, (a, b) in record["changes"].items())
    return f"{record['outcome']} ({record['rule']}){changes}: {record['reason']}"
