"""Keys that wait for a pass: each at most once, never two passes of one key at a time, failures with growing delays.

Bound: a key that fails again and again is tried after 1, 2, 4 … 60 s, with jitter; any event tries it at once. A key whose pass
asked for rest gets it, whatever comes in meanwhile.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable

from weir_operator.io.metrics import QUEUED_KEYS, RECONCILE_SECONDS, RECONCILES

log = logging.getLogger(__name__)
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
SETTLE_SECONDS = 0.05
"""Events come in bursts: a key rests so long before its pass, so that one pass serves the burst."""
WORKERS = 8


class Retry(Exception):
    """The pass could not finish; its text says why, in words for the log."""


class WorkQueue:
    """`work` makes a pass over a key, and returns for how many seconds the key shall rest after it."""

    def __init__(self, work: Callable[[str], Awaitable[float]], workers: int = WORKERS) -> None:
        self._work, self._workers = work, workers
        self._due: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []  # a heap of what does not run; an entry that `_due` has changed since is void
        self._running: set[str] = set()
        self._failures: dict[str, int] = {}
        self._rests: dict[str, float] = {}  # key → until when
        self._wake = asyncio.Event()

    def add(self, key: str, delay: float = SETTLE_SECONDS) -> None:
        """Have `key` passed over in `delay` seconds, or earlier if it was already due earlier."""
        due = max(time.monotonic() + delay, self._rests.get(key, 0.0))
        if due < self._due.get(key, math.inf):
            self._put(key, due)
            self._wake.set()
        QUEUED_KEYS.set(len(self._due))

    def _put(self, key: str, due: float) -> None:
        self._due[key] = due
        if key not in self._running:
            heapq.heappush(self._order, (due, key))

    def _next(self, now: float) -> str | None:
        """A key that is due, no longer in the queue; None: there is none, or all workers are busy."""
        while self._order and self._order[0][0] <= now and len(self._running) < self._workers:
            due, key = heapq.heappop(self._order)
            if self._due.get(key) == due and key not in self._running:
                del self._due[key]
                self._rests.pop(key, None)
                return key
        return None

    async def run(self) -> None:
        """Until cancelled; passes that run are cancelled with it."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                now = time.monotonic()
                while key := self._next(now):
                    self._running.add(key)
                    group.create_task(self._one(key))
                free = len(self._running) < self._workers
                timeout = max(0.01, self._order[0][0] - now) if self._order and free else None
                try:
                    async with asyncio.timeout(timeout):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _one(self, key: str) -> None:
        try:
            with RECONCILE_SECONDS.time():
                rest = await self._work(key)
            self._failures.pop(key, None)
            if rest > 0:
                self._rests[key] = time.monotonic() + rest
                if key in self._due:  # an event came during the pass
                    self._due[key] = max(self._due[key], self._rests[key])
            RECONCILES.labels("ok").inc()
        except Exception as e:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(count - 1, 10)) * random.uniform(0.8, 1.2)
            expected = isinstance(e, Retry)
            RECONCILES.labels("retry" if expected else "error").inc()
            log.log(logging.INFO if expected else logging.ERROR, "%s: again in %.0f s: %s", key, delay, e,
                    exc_info=None if expected else e, extra={"event": "retry", "resource": key})
            self.add(key, delay)
        finally:
            self._running.discard(key)
            if key in self._due:
                self._put(key, self._due[key])
            QUEUED_KEYS.set(len(self._due))
            self._wake.set()
