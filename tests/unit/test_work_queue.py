"""The queue of keys: de-duplicated, never two passes of one key at once, failures later, others undisturbed."""

import asyncio
import time
from typing import Any

import pytest
from fake_server import until

from weir_operator.loops import queue as module
from weir_operator.loops.pace import BURST, REFILL_SECONDS, Pace
from weir_operator.loops.queue import Retry, WorkQueue


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY", 0.02)


class Work:
    def __init__(self) -> None:
        self.passes: list[str] = []
        self.now: set[str] = set()
        self.clashes = 0
        self.failures: dict[str, int] = {}
        self.rest = 0.0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, key: str) -> float:
        self.clashes += key in self.now
        self.now.add(key)
        try:
            await self.gate.wait()
            self.passes.append(key)
            if self.failures.get(key, 0) > 0:
                self.failures[key] -= 1
                raise Retry("not yet")
            return self.rest
        finally:
            self.now.discard(key)


async def idle(queue: WorkQueue) -> None:
    await until(lambda: not queue._due and not queue._running)


@pytest.fixture
async def running() -> Any:
    work = Work()
    queue = WorkQueue(work, workers=2)
    task = asyncio.create_task(queue.run())
    yield work, queue
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_burst_of_one_key_is_one_pass(running: Any) -> None:
    work, queue = running
    for _ in range(100):
        queue.add("a")
    await idle(queue)
    assert work.passes == ["a"]


async def test_an_event_during_a_pass_makes_another_one_after_it(running: Any) -> None:
    work, queue = running
    work.gate.clear()
    queue.add("a")
    await until(lambda: "a" in work.now)
    queue.add("a", 0)
    queue.add("b", 0)
    await until(lambda: "b" in work.now)
    work.gate.set()
    await idle(queue)
    assert sorted(work.passes) == ["a", "a", "b"]
    assert work.clashes == 0


async def test_a_failing_key_is_tried_again_and_disturbs_nobody(running: Any) -> None:
    work, queue = running
    work.failures["bad"] = 3
    queue.add("bad")
    for i in range(20):
        queue.add(f"k{i}")
    await idle(queue)
    assert work.passes.count("bad") == 4
    assert len(work.passes) == 24


async def test_more_keys_than_workers_are_all_served(running: Any) -> None:
    work, queue = running
    for i in range(50):
        queue.add(f"k{i}", 0)
    await idle(queue)
    assert sorted(work.passes) == sorted(f"k{i}" for i in range(50))


async def test_an_error_in_a_pass_does_not_end_the_queue() -> None:
    seen = []

    async def work(key: str) -> float:
        seen.append(key)
        if len(seen) == 1:
            raise RuntimeError("a fault of ours")
        return 0.0

    queue = WorkQueue(work)
    task = asyncio.create_task(queue.run())
    queue.add("a", 0)
    await until(lambda: len(seen) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("during", [False, True])
async def test_a_key_that_asked_for_rest_gets_it_and_its_news_are_not_lost(running: Any, during: bool) -> None:
    work, queue = running
    work.rest = 0.4
    if during:
        work.gate.clear()
    queue.add("a", 0)
    await until(lambda: "a" in queue._running or work.passes)
    queue.add("a", 0)
    work.gate.set()
    await until(lambda: work.passes == ["a"])
    began = time.monotonic()
    if not during:
        queue.add("a", 0)
    queue.add("b", 0)
    await until(lambda: work.passes == ["a", "b"])
    await until(lambda: work.passes == ["a", "b", "a"])
    assert time.monotonic() - began > 0.3


def test_a_resource_rests_once_it_was_written_to_again_and_again() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    for _ in range(int(BURST)):
        pace.wrote("a")
        assert pace.rest("a") <= REFILL_SECONDS
    pace.wrote("a")
    assert pace.rest("a") > REFILL_SECONDS
    assert pace.rest("a") == 0, "a pass that wrote nothing needs no rest"
    pace.wrote("b")
    assert pace.rest("b") == 0, "each has its own"
    now[0] += 10 * REFILL_SECONDS
    pace.wrote("a")
    assert pace.rest("a") == 0
