"""How often passes over one resource may write.

Bound: BURST passes that wrote something at once, and one more every REFILL_SECONDS; then the resource rests, and what comes in
waits for its next pass. Reason: whoever writes back whatever is written (another operator over the same resources, a controller
with another opinion of a field) would otherwise be answered as fast as the API server allows, without end. Cost: of a resource
that really changes so often, the status and the children follow up to REFILL_SECONDS later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST, REFILL_SECONDS = 30.0, 5.0


class Pace:
    """Told of every write, asked after every pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._room: dict[str, tuple[float, float]] = {}  # key → passes that it may still write in, as of when
        self._wrote: set[str] = set()

    def wrote(self, key: str) -> None:
        self._wrote.add(key)

    def rest(self, key: str) -> float:
        """Seconds until the next pass over `key`, after one that has ended."""
        if key not in self._wrote:
            return 0.0
        self._wrote.discard(key)
        now = self._clock()
        room, at = self._room.get(key, (BURST, now))
        room = min(BURST, room + (now - at) / REFILL_SECONDS) - 1
        self._room[key] = room, now
        return max(0.0, 1 - room) * REFILL_SECONDS

    def forget(self, key: str) -> None:
        self._room.pop(key, None)
        self._wrote.discard(key)
