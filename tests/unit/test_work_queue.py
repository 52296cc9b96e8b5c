"""The queue of keys: de-duplicated, never two passes of one key at once, failures later, others undisturbed."""

import asyncio
from typing import Any

import pytest
from fake_server import until

from weir_operator.loops import queue as module
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
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, key: str) -> None:
        self.clashes += key in self.now
        self.now.add(key)
        try:
            await self.gate.wait()
            self.passes.append(key)
            if self.failures.get(key, 0) > 0:
                self.failures[key] -= 1
                raise Retry("not yet")
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

    async def work(key: str) -> None:
        seen.append(key)
        if len(seen) == 1:
            raise RuntimeError("a fault of ours")

    queue = WorkQueue(work)
    task = asyncio.create_task(queue.run())
    queue.add("a", 0)
    await until(lambda: len(seen) == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
