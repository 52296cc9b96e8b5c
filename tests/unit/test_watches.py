"""kopf's place in our process: whatever becomes of it, its watches begin again and a stop is a stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import pytest
from kubernetes.aio.client import Configuration

from weir_operator.handlers import watches
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.store import Store


async def _deaf(**_: Any) -> None:
    """A part of kopf that swallows its cancellation, as its streams do once in a while."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def _ends_at_once(**_: Any) -> None:
    raise kopf.PermanentError("a definition is gone")


async def _until(served: Callable[[], Awaitable[bool]], moment: Callable[[], Awaitable[object]]) -> None:
    """Watch until `moment`, then stop; the stop ends it."""
    stop, queue = asyncio.Event(), WorkQueue(lambda _key: asyncio.sleep(0, 0.0))
    watching = asyncio.create_task(watches.watch(Configuration(), served, Store(), queue, ["ns"], lambda: None, stop))
    await moment()
    stop.set()
    await asyncio.wait_for(watching, 5)


@pytest.mark.parametrize("operator", [_deaf, _ends_at_once])
def test_a_stop_ends_the_watches_whatever_kopf_does(monkeypatch: pytest.MonkeyPatch, operator: Any) -> None:
    monkeypatch.setattr(watches, "END_SECONDS", 0.2)
    monkeypatch.setattr(watches, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(kopf, "operator", operator)
    asked = 0

    async def served() -> bool:
        nonlocal asked
        asked += 1
        return True

    asyncio.run(_until(served, lambda: asyncio.sleep(0.2)))
    assert (asked > 1) == (operator is _ends_at_once)


def test_a_kopf_that_never_ends_is_left_behind_and_watches_begin_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    """Its watches are over (its cleanup is called), yet it does not end."""

    async def over_but_there(registry: kopf.OperatorRegistry, **_: Any) -> None:
        for handler in registry._activities.get_all_handlers():
            if handler.activity and handler.activity.value == "cleanup":
                await handler.fn()  # type: ignore[call-arg]
        await _deaf()

    monkeypatch.setattr(watches, "END_SECONDS", 0.1)
    monkeypatch.setattr(watches, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(kopf, "operator", over_but_there)
    begun = asyncio.Event()
    asked = 0

    async def served() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            begun.set()
        return True

    asyncio.run(_until(served, lambda: asyncio.wait_for(begun.wait(), 5)))
    assert "is left behind" in caplog.text


def test_kopf_does_not_end_our_process() -> None:
    """Where its own watches end, it would kill the process that it runs in after a while."""
    assert watches._settings().process.ultimate_exiting_timeout is None
