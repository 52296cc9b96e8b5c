"""The Lease that says which replica leads, and the fencing epoch that comes from it.

Bounds: a leader stops writing LEASE_SECONDS − MARGIN after its last successful renewal, by a clock that runs while it is
stopped (CLOCK_BOOTTIME where there is one), and another takes over LEASE_SECONDS after that renewal as seen on its own
clock, also where somebody deletes the Lease; so two never write at once, since a write is given up when the hold ends. A
renewal that gets no answer in TURN_SECONDS is tried once more, over another connection, before the hold ends. On SIGTERM the
Lease is given back, and the other leads within RETRY_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from weir_operator.api.quantity import parse_time
from weir_operator.io.apply import Writer
from weir_operator.io.kube import ApiError, Kube, Unreachable
from weir_operator.io.metrics import LEADER, TAKEOVERS

log = logging.getLogger(__name__)
LEASE_SECONDS, RENEW_SECONDS, TURN_SECONDS, RETRY_SECONDS, MARGIN = 15.0, 5.0, 3.0, 2.0, 3.0


def clock() -> float:
    """Seconds that go on while the machine or this process sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _micro_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseLoop:
    """Acquire, renew, give back. `prepare` is awaited before each take-over, and nothing is taken where it fails; `led` is
    called once after it."""

    def __init__(
        self, kube: Kube, writer: Writer, namespace: str, name: str, identity: str, prepare: Callable[[], Awaitable[None]],
        led: Callable[[], None],
    ) -> None:
        self._kube, self._writer, self._namespace, self._name, self._identity = kube, writer, namespace, name, identity
        self._prepare, self._led = prepare, led
        self._until = 0.0
        self._epoch: int | None = None
        self._lease: dict[str, Any] | None = None
        self._seen: tuple[str, float] = ("", -LEASE_SECONDS)  # resourceVersion of another's lease, and when it was first seen

    def held(self) -> bool:
        """May this process write now?"""
        return self.left() > 0

    def left(self) -> float:
        """Seconds for which it may."""
        return max(0.0, self._until - clock())

    def epoch(self) -> int | None:
        """Creation second of the Lease · 2^16 + its transitions, while it is held; else None."""
        return self._epoch if self.held() else None

    async def run(self) -> None:
        """Until cancelled; then the Lease is given back."""
        try:
            while True:
                LEADER.set(self.held())
                pause = RETRY_SECONDS
                try:
                    async with asyncio.timeout(TURN_SECONDS):
                        await self._turn()
                    pause = RENEW_SECONDS if self.held() else RETRY_SECONDS
                except (ApiError, Unreachable, TimeoutError) as e:
                    log.warning("lease: %s", str(e) or f"no answer in {TURN_SECONDS:.0f} s", extra={"event": "lease-trouble"})
                LEADER.set(self.held())
                await asyncio.sleep(pause)
        finally:
            await self._give_back()

    async def _turn(self) -> None:
        asked = clock()
        lease = await self._kube.get("Lease", self._namespace, self._name)
        if lease is None:
            if not self.held() and clock() - self._seen[1] < LEASE_SECONDS:
                return  # somebody deleted it, and who holds it does not know yet
            await self._prepare()
            lease = await self._writer.create_lease(self._namespace, self._name, self._spec(0, None))
            self._hold(lease, asked)
            return
        spec = lease["spec"]
        mine = spec.get("holderIdentity") == self._identity
        if not mine and not self._free(lease):
            self._until = 0.0
            return
        if taking := not mine or not self.held():
            await self._prepare()
        transitions = spec.get("leaseTransitions", 0) + taking
        try:
            lease = await self._writer.update_lease(lease, self._spec(transitions, spec if mine else None))
        except ApiError as e:
            if e.status == 409:
                return  # somebody was faster; the next turn sees who
            raise
        self._hold(lease, asked)

    def _free(self, lease: dict[str, Any]) -> bool:
        """Has its holder let go, or not renewed it for LEASE_SECONDS of our own clock?"""
        if not lease["spec"].get("holderIdentity"):
            return True
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, clock())
        return clock() - self._seen[1] >= (lease["spec"].get("leaseDurationSeconds") or LEASE_SECONDS)

    def _spec(self, transitions: int, before: dict[str, Any] | None) -> dict[str, Any]:
        now = _micro_now()
        return {
            "holderIdentity": self._identity, "leaseDurationSeconds": int(LEASE_SECONDS), "renewTime": now,
            "acquireTime": (before or {}).get("acquireTime") or now, "leaseTransitions": transitions,
        }

    def _hold(self, lease: dict[str, Any], asked: float) -> None:
        """The hold counts from before the request, since its answer may have been slow."""
        created = parse_time(lease["metadata"]["creationTimestamp"])
        epoch = int(created.timestamp()) * 2**16 + lease["spec"]["leaseTransitions"]
        fresh = not self.held() or epoch != self._epoch
        self._lease, self._epoch, self._until = lease, epoch, asked + LEASE_SECONDS - MARGIN
        if fresh:
            TAKEOVERS.inc()
            log.info("leading, epoch %d", epoch, extra={"event": "leading"})
            self._led()

    async def _give_back(self) -> None:
        held, self._until = self.held(), 0.0
        if not held or self._lease is None:
            return
        spec = {**self._lease["spec"], "holderIdentity": "", "renewTime": _micro_now()}
        try:
            async with asyncio.timeout(3):
                await self._writer.update_lease(self._lease, spec)
            log.info("lease given back", extra={"event": "lease-released"})
        except (ApiError, Unreachable, TimeoutError) as e:
            log.warning("lease not given back: %s", e, extra={"event": "lease-trouble"})
