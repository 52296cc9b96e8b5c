"""Events of resources: one object for each resource and reason, written on news only, and not too often.

Bounds: a resource may cause BURST warnings at once and one more every REFILL_SECONDS, and as many other Events, so that moves
hide no fault: under one a minute, whatever happens to it. A message that was just written for the same reason is no news for
REPEAT_SECONDS. At most MOST_WAITING wait to be written, and what finds no place is held back, too. What is held back, and what
is lost on its way, is counted, and added to the count of the next Event of its reason; the same message is news again then. No
pass waits for an Event, and a lost one is no error: it has used its room, since it has cost a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weir_operator.io.apply import NotLeader, Writer
from weir_operator.io.kube import ApiError, Unreachable
from weir_operator.io.metrics import EVENTS

log = logging.getLogger(__name__)
BURST, REFILL_SECONDS, REPEAT_SECONDS, MOST_WAITING = 3, 240.0, 600.0, 256
FORGET_SECONDS = 3600.0
"""An Event object lives for an hour: what was written before that is as good as never."""


@dataclass(slots=True)
class _Series:
    """Events of one reason: the last one written, and how many were held, or lost, since."""

    message: str
    at: float
    held: int = 0


@dataclass(slots=True)
class _Told:
    """Warnings, or the other Events, of one resource. `room`: how many it may still cause, as of `at`."""

    room: float
    at: float
    series: dict[str, _Series] = field(default_factory=dict)


class Recorder:
    """`tell` never waits and never fails; `run` writes."""

    def __init__(self, writer: Writer, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer, self._clock = writer, clock
        self._told: dict[tuple[str, bool], _Told] = {}  # by uid and whether they are warnings
        self._waiting: asyncio.Queue[tuple[Mapping[str, Any], str, str, bool, int]] = asyncio.Queue(MOST_WAITING)

    def tell(self, raw: Mapping[str, Any], reason: str, message: str, warning: bool = False) -> None:
        """Have an Event written, if it is news and there is room for it."""
        if count := self._admitted((raw["metadata"]["uid"], warning), reason, message, self._clock()):
            self._waiting.put_nowait((raw, reason, message, warning, count))
        else:
            EVENTS.labels("held").inc()

    def _admitted(self, key: tuple[str, bool], reason: str, message: str, now: float) -> int:
        """How many Events the next one stands for, itself included; 0: it is held back."""
        self._forget(now)
        told = self._told.setdefault(key, _Told(BURST, now))
        told.room, told.at = min(float(BURST), told.room + (now - told.at) / REFILL_SECONDS), now
        series = told.series.get(reason)
        repeated = series is not None and series.message == message and now - series.at < REPEAT_SECONDS
        if repeated or told.room < 1 or self._waiting.full():
            if series is None:
                series = told.series[reason] = _Series("", now)
            series.held += 1
            return 0
        told.room -= 1
        told.series[reason] = _Series(message, now)
        return 1 + (series.held if series else 0)

    def _lost(self, key: tuple[str, bool], reason: str, message: str, count: int) -> None:
        told = self._told.get(key)
        if told and (series := told.series.get(reason)):
            series.held += count
            if series.message == message:
                series.message = ""

    def _forget(self, now: float) -> None:
        if len(self._told) > MOST_WAITING:
            self._told = {key: told for key, told in self._told.items() if now - told.at < FORGET_SECONDS}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            raw, reason, message, warning, count = await self._waiting.get()
            try:
                await self._writer.event(raw, reason, message, warning, count)
                EVENTS.labels("written").inc()
            except (ApiError, NotLeader, Unreachable) as e:
                EVENTS.labels("lost").inc()
                meta = raw["metadata"]
                self._lost((meta["uid"], warning), reason, message, count)
                log.warning("event %s for %s not written: %s", reason, meta["name"], e,
                            extra={"event": "event-lost", "resource": f"{meta['namespace']}/{meta['name']}"})
