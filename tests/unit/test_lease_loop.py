"""The Lease by a clock that the test moves: who may write when, and the epoch that fences the knobs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from fake_server import until

from weir_operator.io.apply import NotLeader, Writer
from weir_operator.io.kube import ApiError
from weir_operator.loops import lease as module
from weir_operator.loops.lease import LEASE_SECONDS, MARGIN, LeaseLoop

CREATED, SECOND = "2026-01-02T03:04:05Z", 1767323045


class Server:
    """One Lease behind an API server that checks resourceVersions."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False

    def _store(self, meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        known = {**meta, "resourceVersion": str(self.version), "creationTimestamp": CREATED}
        self.lease = {"metadata": known, "spec": dict(spec)}
        return self.lease

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.down:
            raise ApiError(503, "ServiceUnavailable", "down")
        return self.lease

    async def create_lease(self, namespace: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        return self._store({"namespace": namespace, "name": name}, spec)

    async def update_lease(self, lease: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        if self.lease is None or lease["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "changed")
        return self._store(lease["metadata"], spec)


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.server, self.led = 1000.0, Server(), []
        self.prepared: list[str] = []
        self.unfit: Exception | None = None
        monkeypatch.setattr(module, "clock", lambda: self.now)

    def replica(self, name: str) -> LeaseLoop:
        server: Any = self.server

        async def prepare() -> None:
            self.prepared.append(name)
            if self.unfit:
                raise self.unfit

        return LeaseLoop(server, server, "ns", "weir-operator", name, prepare, lambda: self.led.append(name))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def turn(loop: LeaseLoop) -> None:
    with contextlib.suppress(ApiError):
        await loop._turn()


async def test_a_lease_that_is_deleted_is_made_anew_by_who_holds_it(bench: Bench) -> None:
    a, b = bench.replica("a"), bench.replica("b")
    await turn(a)
    await turn(b)
    bench.server.lease = None
    await turn(b)
    assert (a.held(), b.held(), bench.server.lease) == (True, False, None), "two would write until the first one looks"
    await turn(a)
    await turn(b)
    assert (a.held(), b.held()) == (True, False)
    bench.server.lease = None
    bench.now += LEASE_SECONDS  # and if that one is gone, too
    await turn(b)
    assert (a.held(), b.held(), bench.led) == (False, True, ["a", "b"])


async def test_the_hold_ends_before_another_may_take_it(bench: Bench) -> None:
    a, b = bench.replica("a"), bench.replica("b")
    await turn(a)
    await turn(b)
    assert (a.held(), b.held()) == (True, False)
    bench.now += LEASE_SECONDS - MARGIN  # a sleeps: by its own clock it may no longer write …
    assert not a.held()
    assert a.epoch() is None
    await turn(b)  # … while nobody else may yet
    assert not b.held()
    bench.now += MARGIN
    await turn(b)
    assert b.held()
    await turn(a)
    assert not a.held()
    assert bench.led == ["a", "b"]


async def test_what_a_leader_needs_is_got_before_each_time_as_leader_and_not_at_renewals(bench: Bench) -> None:
    a, b = bench.replica("a"), bench.replica("b")
    for loop in (a, b, a):
        await turn(loop)
    assert bench.prepared == bench.led == ["a"]
    bench.server.lease = None  # somebody deleted it
    await turn(a)
    await a._give_back()
    await turn(b)
    bench.now += 100  # b slept through its own lease and nobody took it
    await turn(b)
    assert bench.prepared == ["a", "a", "b", "b"] and bench.led[-2:] == ["b", "b"]


async def test_who_cannot_lead_takes_no_lease(bench: Bench) -> None:
    a, b = bench.replica("a"), bench.replica("b")
    bench.unfit = ApiError(403, "Forbidden", "no")
    await turn(a)
    assert bench.server.lease is None
    bench.unfit = None
    await turn(b)
    await b._give_back()
    bench.unfit, free = ApiError(403, "Forbidden", "no"), bench.server.lease
    await turn(a)
    assert bench.server.lease == free and not a.held()


async def test_a_renewed_lease_is_not_taken(bench: Bench) -> None:
    a, b = bench.replica("a"), bench.replica("b")
    for _ in range(20):
        await turn(a)
        await turn(b)
        bench.now += 5
        assert a.held()
    assert bench.led == ["a"]


async def test_the_epoch_grows_with_every_change_of_hands_and_stays_while_renewed(bench: Bench) -> None:
    a, b = bench.replica("a"), bench.replica("b")
    await turn(a)
    first = a.epoch()
    assert first == SECOND * 2**16
    bench.now += 5
    await turn(a)
    assert a.epoch() == first
    await a._give_back()
    assert a.epoch() is None
    await turn(b)  # at once, since it was given back
    assert b.epoch() == first + 1
    bench.now += 100  # b slept through its own lease and nobody took it
    await turn(b)
    assert b.epoch() == first + 2


async def test_an_api_server_that_is_away_ends_the_hold_in_time(bench: Bench) -> None:
    a = bench.replica("a")
    await turn(a)
    bench.server.down = True
    bench.now += 5
    await turn(a)
    assert a.held()
    bench.now += 8
    await turn(a)
    assert not a.held()
    bench.server.down = False
    await turn(a)
    assert a.held()


async def test_a_request_that_is_never_answered_is_tried_again_while_the_hold_lasts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert module.RENEW_SECONDS + module.TURN_SECONDS + module.RETRY_SECONDS < LEASE_SECONDS - MARGIN
    for name in ("RENEW_SECONDS", "TURN_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)
    a, asked, get = bench.replica("a"), [], bench.server.get

    async def swallow(*where: str) -> Any:
        asked.append(where)
        return await (asyncio.sleep(60) if len(asked) == 2 else get(*where))

    monkeypatch.setattr(bench.server, "get", swallow)
    task = asyncio.create_task(a.run())
    await until(lambda: len(asked) > 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.led == ["a"]


async def test_a_write_is_given_up_when_the_hold_ends() -> None:
    class Black:
        async def request(self, *_: Any, **__: Any) -> None:
            await asyncio.sleep(60)

    black: Any = Black()
    with pytest.raises(NotLeader):
        async with asyncio.timeout(10):
            await Writer(black, lambda: 0.02).patch_spec("ns", "a", {}, "m")


async def test_of_two_that_reach_for_a_free_lease_one_gets_it(bench: Bench) -> None:
    a, b = bench.replica("a"), bench.replica("b")
    await turn(a)
    await a._give_back()
    stale = bench.server.lease
    await turn(a)
    with pytest.raises(ApiError):
        await bench.server.update_lease(stale, {})
    await turn(b)
    assert (a.held(), b.held()) == (True, False)
