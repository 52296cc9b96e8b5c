"""Which names are taken by objects that are not ours, of which no watch tells.

One list of a kind's names answers for every new resource of its namespace: a thousand new ones ask a few hundred times instead
of four thousand. Bound: an answer is FRESH_SECONDS old at most, and MOST names long: in a namespace with more, each name is
asked for by itself. Cost: what was made since is not seen; it is applied without force then, so that its fields stay, and a
conflict is looked into (`io/apply.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from weir_operator.api import names
from weir_operator.io.kube import ApiError, Kube

FRESH_SECONDS, MOST = 3.0, 500


class Census:
    """Asked by passes side by side: those who come while a list is on its way share it."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._asked: dict[tuple[str, str], tuple[float, asyncio.Task[frozenset[str] | None]]] = {}

    async def free(self, kind: str, namespace: str, name: str) -> bool:
        """Whether nobody else's object has this name. False also where a list cannot tell. Raises ApiError, Unreachable."""
        at, task = self._asked.get((kind, namespace), (-FRESH_SECONDS, None))
        if task is None or self._clock() - at >= FRESH_SECONDS:
            self._forget()
            task = asyncio.create_task(self._list(kind, namespace))
            self._asked[kind, namespace] = self._clock(), task
        try:
            taken = await asyncio.shield(task)
        except ApiError:
            self._asked.pop((kind, namespace), None)
            raise
        return taken is not None and name not in taken

    async def _list(self, kind: str, namespace: str) -> frozenset[str] | None:
        """The names, or None where there are too many."""
        try:
            return await self._kube.names(kind, namespace, f"{names.MANAGED_LABEL}!=true", MOST)
        except ApiError as e:
            if e.status == 404:  # a kind that the cluster lacks has no objects
                return frozenset()
            raise

    def _forget(self) -> None:
        self._asked = {k: known for k, known in self._asked.items() if self._clock() - known[0] < FRESH_SECONDS}
