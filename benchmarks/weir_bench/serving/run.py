"""What every table does around its own loads: the setting, the roofs, and the raw JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weir_bench import results, roofs
from weir_bench.roofs import Roofs
from weir_bench.servers import ServerError
from weir_bench.serving.peers import CONTENDERS, Contender, Setting
from weir_bench.serving.record import Cell, Claim, Document, Server, Share

say = partial(print, flush=True)


class Load(NamedTuple):
    """Clients at a time, requests in all, tokens to generate for each."""

    clients: int
    requests: int
    output: int


@dataclass(frozen=True, slots=True)
class Form:
    """How long a run is. `each`: requests of a client, by the number of clients."""

    name: str
    rounds: int
    each: dict[int, int]
    waves: int
    seconds: float
    """Of an open loop."""


SHORT = Form("short", rounds=2, each={1: 2, 8: 1, 32: 1}, waves=1, seconds=30)
FULL = Form("full", rounds=5, each={1: 4, 8: 2, 16: 2, 32: 1}, waves=4, seconds=90)


@dataclass(slots=True)
class Run:
    """One invocation: what it was asked for, and what it has skipped and measured so far."""

    setting: Setting
    form: Form
    output: Path
    traces: Path | None = None
    add: bool = False
    """Rounds of a table of contenders are added to those in its raw JSON, instead of taking their place."""
    say: Callable[[str], None] = say
    skipped: list[str] = field(default_factory=list)
    roofs: list[Roofs] = field(default_factory=list)
    gemm: float | None = None
    _program: Path | None = None

    def begin(self) -> None:
        """Another table."""
        self.skipped, self.roofs = [], []

    def contenders(self, wanted: Iterable[Contender]) -> list[Contender]:
        """Those that can run here; each of the others is skipped by name, in one line."""
        able = []
        for contender in wanted:
            if why := contender.missing(self.setting):
                self.skipped.append(f"{contender.name}: {why}")
                self.say(f"skipped {self.skipped[-1]}")
            else:
                able.append(contender)
        return able

    async def measure_roofs(self, seconds: float = 0.3) -> Roofs | None:
        """Once more; the first time also the best matrix product. None without a C compiler."""
        if self._program is None:
            self._program = await asyncio.to_thread(roofs.build, self.setting.folder)
            if self._program is None:
                self.say("no roofs: there is no C compiler")
                return None
            self.gemm = max(self.gemm or 0.0, await asyncio.to_thread(roofs.gemm_peak))
        self.roofs.append(await asyncio.to_thread(roofs.measure, self._program, seconds))
        return self.roofs[-1]

    def before(self, name: str) -> Document | None:
        """What the table's raw JSON holds already, if it is to be added to. Raises ServerError where that was measured with
        other code or on another machine."""
        path = self.output / f"serving-{name}.json"
        if not self.add or not path.exists():
            return None
        doc, now = msgspec.json.decode(path.read_bytes(), type=Document), results.machine()
        for what in ("cpu", "isa", "commit", "versions"):
            if doc.machine.get(what) != now[what]:
                raise ServerError(f"{path} can't be added to: its {what} is {doc.machine.get(what)}, here it is {now[what]}")
        self.roofs = [*doc.roofs_measured, *self.roofs]
        self.gemm = max((r.gemm for r in (doc.roofs, self.best_roofs()) if r and r.gemm), default=None)
        return doc

    def best_roofs(self) -> Roofs | None:
        return roofs.best(self.roofs, self.gemm) if self.roofs else None

    def write(
        self, name: str, figures: dict[str, Any], work: dict[str, Any], servers: Sequence[Server] = (),
        cells: Sequence[Cell] = (), claims: Sequence[Claim] = (), shares: Sequence[Share] = (),
    ) -> Path:
        """The table's raw JSON, of the shape of record.Document."""
        best = self.best_roofs()
        return results.write(f"serving-{name}", msgspec.to_builtins({
            "form": self.form.name, "work": {"model": self.setting.model, "slots": self.setting.slots, **work},
            "skipped": self.skipped, "roofs": best, "roofs_measured": self.roofs, "servers": servers, "cells": cells,
            "claims": claims, "shares": shares, "figures": figures,
        }), self.output)  # fmt: skip


def named(system: str, *precisions: str) -> list[Contender]:
    return [c for c in CONTENDERS if c.system == system and (not precisions or c.precision in precisions)]
