"""The knobs' targets: envelope, fence, lease, fallback and objectives. Pure: the time (monotonic seconds) is an argument.

Rules, as in the contract: a writer older than one seen is refused (409), so is one who means another process; the same
(epoch, seq) with the same content renews the lease; values outside the envelope change nothing (422); an expired or
returned lease puts the fallback in force. Objectives are not leased: they stay until the next write.

Memory: whatever puts a value in force, the KV budget never rises above what memory has room for. A write that asks for more is
refused; a fallback or a declared start value is taken as far as there is room, and whole once there is room for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from weir_server.contract import KNOBS, Envelope, Fence, Knobs, KnobsRequest, Slo


class KnobError(Exception):
    """A refused write: `status` and a JSON-ready `body`."""

    def __init__(self, status: int, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error"}, **details}


@dataclass(frozen=True, slots=True)
class _Seen:
    fence: Fence
    content: KnobsRequest | None


class KnobBoard:
    """What is asked of the engine now (`target`) and why. One writer: the control routes, and `tick` for expiry."""

    def __init__(
        self, instance: str, envelope: Envelope, boot: Knobs, slo: Slo, chunk_bytes: int, engine: Knobs | None = None,
        budget_room: int | None = None,
    ) -> None:  # fmt: skip
        """`engine`: what it started with, if that is not `boot`, which is then put in force."""
        self.instance = instance
        self.envelope = envelope
        self.boot = boot
        self.target = engine or boot
        self.fallback = boot
        self.slo = slo
        self.draining = False
        self.expirations = 0
        self._chunk = chunk_bytes
        self._expires: float | None = None
        self._seen = _Seen(Fence(), None)
        self._give_back(budget_room)

    @property
    def fence(self) -> Fence:
        return self._seen.fence

    def expires_in(self, now: float) -> float | None:
        return None if self._expires is None else max(0.0, self._expires - now)

    def put(self, request: KnobsRequest, now: float, budget_room: int | None = None) -> None:
        """Apply a write whole or raise KnobError and change nothing. `budget_room`: bytes that memory has for the KV budget."""
        self.check_fence(request.instance, request.epoch, request.seq)
        fence = Fence(request.epoch, request.seq)
        if fence == self.fence and self._seen.content is not None and _content(request) != _content(self._seen.content):
            raise KnobError(409, f"seq {request.seq} was seen with other content")
        if self.draining:
            raise KnobError(503, "the server is draining")
        knobs, fallback = self._checked(request.knobs), self._checked(request.fallback or {})
        self._check_memory(knobs.get("kv_cache_budget"), budget_room)
        self.slo = self._changed_slo(request.slo)
        self._seen = _Seen(fence, request)
        self.fallback = self.fallback.merged(fallback)
        if request.lease_seconds <= 0:
            self._give_back(budget_room)
        else:
            self.target = self.target.merged(knobs)
            self._expires = now + request.lease_seconds

    def check_fence(self, instance: str, epoch: int, seq: int) -> None:
        """Raises KnobError 409 for a writer who means another process or is older than one seen."""
        if instance != self.instance:
            raise KnobError(409, f"this is instance {self.instance}")
        if (epoch, seq) < (self.fence.epoch, self.fence.seq):
            raise KnobError(409, f"(epoch, seq) ({epoch}, {seq}) is older than ({self.fence.epoch}, {self.fence.seq})")

    def drain(self, instance: str, epoch: int, seq: int) -> None:
        self.check_fence(instance, epoch, seq)
        self._seen = _Seen(Fence(epoch, seq), None)
        self.draining = True

    def tick(self, now: float, budget_room: int | None = None) -> bool:
        """Is another target in force: because the lease expired, or because the whole fallback has room by now?"""
        if self._expires is not None:
            if now < self._expires:
                return False
            self.expirations += 1
        elif self.target == self.fallback or self._fitting(budget_room) != self.fallback:
            return False
        self._give_back(budget_room)
        return True

    def _give_back(self, budget_room: int | None) -> None:
        self._expires = None
        self.target = self._fitting(budget_room)

    def _fitting(self, budget_room: int | None) -> Knobs:
        """The fallback, its KV budget as far as memory has room for it."""
        wanted, most = self.fallback.kv_cache_budget, self._highest_budget(budget_room)
        return self.fallback if wanted is None or most is None else replace(self.fallback, kv_cache_budget=min(wanted, most))

    def _checked(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """`changes` with types and bounds checked; a budget in whole chunks."""
        out: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in KNOBS:
                raise KnobError(400, f"{name!r} is no knob; the knobs are {', '.join(KNOBS)}", knob=name)
            if name == "kv_cache_budget" and value is None and self.envelope.kv_cache_budget is None:
                continue  # what a server without this knob says of itself may be said back
            whole = name != "admission_watermark"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not math.isfinite(value):
                raise KnobError(400, f"{name} must be {'an integer' if whole else 'a number'}", knob=name)
            if (bound := self.envelope.violation(name, value)) is not None:
                raise KnobError(422, f"{name} {value} is outside the envelope", knob=name, value=value, bound=bound)
            out[name] = value // self._chunk * self._chunk if name == "kv_cache_budget" else value
        return out

    def _highest_budget(self, room: int | None) -> int | None:
        """The KV budget that may be in force, or None without a limit: never less than now, however short memory is."""
        if room is None or self.target.kv_cache_budget is None:
            return None
        return max(self.target.kv_cache_budget, room // self._chunk * self._chunk)

    def _check_memory(self, budget: int | None, room: int | None) -> None:
        """Only a raise is refused: a lease on the present value is renewed."""
        bound = self._highest_budget(room)
        if budget is not None and bound is not None and budget > bound:
            message = f"kv_cache_budget {budget} is above the {bound} bytes that the memory limit leaves to it now"
            raise KnobError(422, message, knob="kv_cache_budget", value=budget, bound=bound)

    def _changed_slo(self, values: Mapping[str, float] | None) -> Slo:
        if not values:
            return self.slo
        for name, value in values.items():
            if name not in ("ttft", "tpot"):
                raise KnobError(400, f"{name!r} is no objective; the objectives are ttft and tpot")
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise KnobError(400, f"slo.{name} must be a positive number of seconds")
        new = replace(self.slo, ttft=values.get("ttft", self.slo.ttft), tpot=values.get("tpot", self.slo.tpot))
        return self.slo if new == self.slo else replace(new, generation=self.slo.generation + 1)


def within(envelope: Envelope, wanted: Mapping[str, Any], chunk_bytes: int) -> dict[str, Any]:
    """Declared start values, moved to the nearest bound where they lie outside, a budget in whole chunks."""
    out = {}
    for name, value in wanted.items():
        if getattr(envelope, name) is not None:
            bound = envelope.violation(name, value)
            out[name] = value if bound is None else bound
            if name == "kv_cache_budget":
                out[name] = int(out[name]) // chunk_bytes * chunk_bytes
    return out


def _content(request: KnobsRequest) -> dict[str, Any]:
    return {k: v for k, v in asdict(request).items() if k != "lease_seconds"}
