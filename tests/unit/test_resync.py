"""When everything is listed anew."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weir_operator.loops import resync
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.resync import Resync
from weir_operator.loops.store import Store

POD = {"metadata": {"namespace": "a", "name": "p", "uid": "u", "resourceVersion": "7", "labels": {}}}


class Lists:
    """A reconciler whose lists show a pod at first and then no more."""

    def __init__(self, *shown: list[dict[str, Any]]) -> None:
        self.store, self.shown, self.gaps = Store(), list(shown), list[bool]()
        self.left, self.done = 0, asyncio.Event()

    async def refresh(self, namespaces: tuple[str, ...], gap: bool = False) -> frozenset[str]:
        self.gaps.append(gap)
        self.left -= 1
        if not self.left:
            self.done.set()
        found = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        self.store.replace("Pod", found, self.store.known("Pod"), True, gap)
        return frozenset()


async def after(lists: Lists, count: int) -> None:
    async def work(_: str) -> float:
        return 0.0

    lists.left = count
    running = asyncio.create_task(Resync(lists, WorkQueue(work), ()).run())  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        await lists.done.wait()
    running.cancel()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "OWED_SECONDS", 0.05)


async def test_what_went_before_the_watch_began_is_not_owed_for_ever() -> None:
    lists = Lists([POD], [])
    await after(lists, 2)
    assert lists.gaps == [False, True] and lists.store.lag() == 0 and lists.store.known("Pod") == {}


async def test_what_is_there_and_no_watch_tells_of_is_owed_the_more() -> None:
    lists = Lists([POD])
    await after(lists, 4)
    assert lists.store.lag() > 0.1
