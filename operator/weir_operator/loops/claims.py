"""Whose a resource is, where more operators than one serve its namespace: two releases, or one that is run by hand.

An operator (all replicas that share a Lease are one, and go by it) writes its name into `status.operator`, with
what it writes there anyway, and leaves alone what carries another's. Now and then it asks for that: it writes its own name
there and nothing else. Who holds a resource, and lives, writes its name back, and so the asker knows; who is gone does not.

Bounds: a resource that another holds is asked for once in REST_SECONDS, which costs who asks one write and the other two (it
writes the pods' Secret, too, which it cannot read). Who holds one answers ANSWERS times in REST_SECONDS and then gives way, so
that two who both believe that they hold it, as after an absence of one, do not go on for ever. Reason: each has its Lease
where the other may not read; the resource both read and write. Cost: where an operator is gone for good and another takes its
place, from another namespace, that one begins ASK_SECONDS later. That is longer than a second replica needs to lead, so that
it can still answer.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

from weir_operator.api import names

log = logging.getLogger(__name__)
ASK_SECONDS, REST_SECONDS, ANSWERS = 25.0, 570.0, 3


class Stand(enum.Enum):
    OURS = "ours"
    ASK = "ask"
    WAIT = "wait"  # it was asked for
    LEAVE = "leave"


def operator_name(namespace: str, lease: str) -> str:
    """How an operator is told from others: by its Lease, whose name is left out where it is the usual one."""
    return namespace if lease == names.LEASE_NAME else f"{namespace}/{lease}"


class Claims:
    """What this operator holds, by key. `name`: as its Lease has it. Forgotten at each beginning to lead: another may
    have taken everything since."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._clock = name, clock
        self.forget_all()

    def forget_all(self) -> None:
        self._held: set[str] = set()
        self._asked: dict[str, float] = {}
        self._left: dict[str, float] = {}  # since when
        self._answers: dict[str, list[float]] = {}
        self._rivals: dict[str, tuple[str, float]] = {}  # who wrote its name last, and when

    def forget(self, key: str) -> None:
        self._held.discard(key)
        for known in (self._asked, self._left, self._answers, self._rivals):
            known.pop(key, None)

    def look(self, key: str, holder: str) -> Stand:
        """What to do about a resource whose status names `holder`; empty: nobody."""
        now = self._clock()
        if holder == "":
            return Stand.OURS  # once our name stands there
        if holder == self.name:
            if now - self._asked.get(key, -ASK_SECONDS) < ASK_SECONDS:
                return Stand.WAIT
            self._asked.pop(key, None)
            self._held.add(key)
            return Stand.OURS
        if key in self._held:
            self._rivals[key] = holder, now
            if len(self._recent(key)) < ANSWERS:
                return Stand.OURS  # the status that is written now has our name again
        elif key not in self._asked and now - self._left.get(key, -REST_SECONDS) >= REST_SECONDS:
            return Stand.ASK
        elif key not in self._asked:
            return Stand.LEAVE
        self.forget(key)
        self._left[key] = now
        log.warning("%s is left to the operator %s, which serves it, too", key, holder,
                    extra={"event": "left", "resource": key})
        return Stand.LEAVE

    def wrote(self, key: str, holder: str) -> None:
        """Our name was written, where `holder` stood."""
        if holder == "":
            self._held.add(key)
        elif holder != self.name and key in self._held:
            self._answers[key] = [*self._recent(key), self._clock()]
        elif holder != self.name:
            self._asked[key] = self._clock()

    def _recent(self, key: str) -> list[float]:
        return [at for at in self._answers.get(key, ()) if self._clock() - at < REST_SECONDS]

    def holds(self, key: str) -> bool:
        return key in self._held

    def rival(self, key: str) -> str:
        """Who else wants what we hold, and asked for it lately; empty: nobody."""
        name, at = self._rivals.get(key, ("", 0.0))
        return name if self._clock() - at < 2 * REST_SECONDS else ""
