"""What outlives a pod: settings that did well, by workload and class of pods.

A workload's fingerprint is its mix without its rate: output tokens per row, prefilled tokens per generated one, context. Two
are the same within a factor 1.6 in each. At most 16 are kept, for at most a week, the longest unverified dropped first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from weir_operator.tuner.types import Learned

MOST = 16
EXPIRES = 7 * 86400.0
SAME = math.log(1.6)
CLEARLY = math.log(1.3)
"""So near to what is known, and so far from the present means, one tick is enough to call a shift."""
CAUTION = 0.8
"""Of the batch that did well for a workload which is not the same."""


class Fingerprint(Protocol):
    """A Mix, or a Learned."""

    @property
    def output(self) -> float: ...
    @property
    def prefill(self) -> float: ...
    @property
    def context(self) -> float: ...


def distance(a: Fingerprint, b: Fingerprint) -> float:
    """The largest logarithm of a ratio; 0.05 prefilled tokens per generated one are as good as none."""
    pairs = ((a.output, b.output), (a.prefill + 0.05, b.prefill + 0.05), (a.context + 1.0, b.context + 1.0))
    return max(abs(math.log(x / y)) for x, y in pairs)


def nearest(learned: Sequence[Learned], pod_class: str, mix: Fingerprint | None) -> tuple[Learned, float] | None:
    """Of the same class of pods, the most like `mix` and how far from it; without a mix the last one that was verified."""
    known = [entry for entry in learned if entry.pod_class == pod_class]
    if not known:
        return None
    if mix is None:
        return max(known, key=lambda entry: entry.verified_at), math.inf
    return min(((entry, distance(entry, mix)) for entry in known), key=lambda pair: pair[1])


def largest(learned: Sequence[Learned], pod_class: str, mix: Fingerprint | None) -> int:
    """The largest batch that came out as predicted for this workload; 0 where none did."""
    found = nearest(learned, pod_class, mix)
    return found[0].largest if found and found[1] <= SAME else 0


def remember(learned: Sequence[Learned], entry: Learned) -> tuple[Learned, ...]:
    """With `entry` in the place of what was known of the same workload, whose largest batch stays known."""
    found = nearest(learned, entry.pod_class, entry)
    kept = [e for e in learned if entry.verified_at - e.verified_at < EXPIRES]
    if found and found[1] <= SAME:
        kept = [e for e in kept if e is not found[0]]
        entry = replace(entry, largest=max(entry.largest, found[0].largest))
    return (entry, *kept)[:MOST]
