"""The lists: at first, now and then, and when something was missed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from weir_operator.api import names
from weir_operator.io.kube import ApiError, Unreachable
from weir_operator.io.metrics import LOST_NAMESPACES
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.reconcile import Reconciler
from weir_operator.loops.store import Store, key_of

log = logging.getLogger(__name__)
RESYNC_SECONDS, RELIST_SECONDS, DISCOVER_SECONDS = 600.0, 5.0, 20.0
LOST_SECONDS = 30.0
"""Between two looks at a namespace that did not let itself be listed."""
OWED_SECONDS = 10.0
"""A watch that has not told of what a list showed: by then another list looks whether it owes it."""


class Resync:
    """Lists everything, at first and every RESYNC_SECONDS. `wrong`: why that did not work the last time, or None; `lost`: the
    namespaces that the operator is to serve and has no right to; `rescoped` is set when these are others than before."""

    def __init__(self, reconciler: Reconciler, queue: WorkQueue, namespaces: Sequence[str]) -> None:
        self._reconciler, self._queue, self._namespaces = reconciler, queue, tuple(namespaces)
        self.wrong: str | None = "nothing has been listed yet"
        self.lost: frozenset[str] = frozenset()
        self.rescoped = asyncio.Event()
        self._listed, self._again = asyncio.Event(), asyncio.Event()

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those to watch; none: all of the cluster."""
        return tuple(name for name in self._namespaces if name not in self.lost)

    def soon(self) -> None:
        """List anew now: something was missed."""
        self._again.set()

    async def run(self) -> None:
        while True:
            gap = self._again.is_set()
            self._again.clear()
            try:
                self._serve_without(await self._reconciler.refresh(self._namespaces, gap))
                self.wrong = None
                self._listed.set()
            except (ApiError, Unreachable) as e:
                absent = isinstance(e, ApiError) and e.status == 404
                self.wrong = f"the CRD {names.CRD_NAME} is not installed" if absent else f"listing failed: {e}"
                log.warning("resync: %s", self.wrong, extra={"event": "resync-failed"})
            enqueue_all(self._reconciler.store, self._queue)
            await self._rest(time.monotonic() + self._pause())

    def _serve_without(self, lost: frozenset[str]) -> None:
        """One namespace that is gone, or whose rights are, must not take the others with it."""
        for name in sorted(lost - self.lost):
            log.warning("namespace %s cannot be listed: nothing is served there now", name, extra={"event": "namespace-lost"})
        for name in sorted(self.lost - lost):
            log.warning("namespace %s can be listed, and is served again", name, extra={"event": "namespace-back"})
        if lost != self.lost:
            self.lost = lost
            self.rescoped.set()
        LOST_NAMESPACES.set(len(lost))

    def _pause(self) -> float:
        if self.wrong:
            return RELIST_SECONDS
        return LOST_SECONDS if self.lost else RESYNC_SECONDS

    async def _rest(self, until: float) -> None:
        """Until a list is asked for, or due, or a watch owes news for OWED_SECONDS. What was listed and went before the watch
        began, no watch can tell: another list shows it, and clears the watch of what it does not owe."""
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), min(left, OWED_SECONDS))
                return
            if self._reconciler.store.lag() > OWED_SECONDS:
                self.soon()
                return

    async def discover(self) -> None:
        """Notice the optional kinds' definitions as they come and go."""
        while True:
            await asyncio.sleep(DISCOVER_SECONDS * random.uniform(0.8, 1.2))
            try:
                if await self._reconciler.discover():
                    here = ", ".join(sorted(self._reconciler.children.kinds))
                    log.info("optional kinds that are here now: %s", here or "none")
                    enqueue_all(self._reconciler.store, self._queue)
            except (ApiError, Unreachable) as e:
                log.warning("looking for optional kinds: %s", e)

    async def then(self, part: Callable[[], Awaitable[None]]) -> None:
        """Begin `part` once everything was listed: what is not known yet must not be taken for gone."""
        await self._listed.wait()
        await part()


def enqueue_all(store: Store, queue: WorkQueue) -> None:
    for raw in store.resources():
        queue.add(key_of(raw["metadata"]["namespace"], raw["metadata"]["name"]))
