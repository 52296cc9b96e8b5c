"""Who gives way when memory or slots run out. Never the oldest running row where memory is short, so that one always ends.

Decodes reserve before the forward. If their needs exceed the room, rows are preempted until the others' are met:

- `least_progress`: the fewest computed tokens first (what it costs to compute them again), of equals the newest.
- `newest_stalled`: rows reserve in order of first admission; of those denied, the newest first, and so the fewest of them;
  then, for the oldest alone, the newest of the others.

Rows give way to a head of the queue only if their lane is strictly lower than its own, so that no two rows ever take turns in
driving each other out; and only if it then fits. Each arrival pays for at most one such round: there is no livelock in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from weir_server.kv.shape import Need, Room
from weir_server.policy.state import Running, State, Waiting


def stalled_victims(running: Sequence[Running], growth: int, pressure: str) -> tuple[int, ...]:
    """Rows to preempt so that the others can grow into `growth` blocks. The oldest may grow past it when it is left alone."""
    short = sum(row.need for row in running) - growth
    chosen: list[int] = []
    if short > 0:
        for i in _newest_stalled(running, growth) if pressure == "newest_stalled" else _least_progress(running):
            row = running[i]
            if gain := row.need + (row.frees.blocks if row.frees else 0):
                chosen.append(i)
                short -= gain
            if short <= 0:
                break
    return tuple(chosen)


def _least_progress(running: Sequence[Running]) -> Iterable[int]:
    return sorted(range(1, len(running)), key=lambda i: (running[i].computed, -i))


def _newest_stalled(running: Sequence[Running], growth: int) -> Iterable[int]:
    served, denied = [], []
    for i, row in enumerate(running):
        if row.need > growth:
            denied.append(i)
        else:
            growth -= row.need
            served.append(i)
    return [i for i in (*reversed(denied), *reversed(served)) if i]


def margin(state: State, gone: Sequence[int] = ()) -> int:
    """Chunks to keep free when admitting: the watermark, while any row but those of `gone` decodes."""
    decoding = any(not row.left and i not in gone for i, row in enumerate(state.running))
    return math.ceil(state.watermark * state.budget) if decoding else 0


def room_beside(state: State, gone: Sequence[int] = ()) -> Room:
    """What admissions may take when the running rows but those of `gone` have grown."""
    room = state.room
    for i in gone:
        if frees := state.running[i].frees:
            room = room.give(frees)
    return room.take(Need(sum(row.need for i, row in enumerate(state.running) if i not in gone)))


def make_way(state: State, head: Waiting) -> tuple[tuple[int, ...], str | None]:
    """Rows of strictly lower lanes that leave so that `head` is admitted, and whether for `slots` or for `priority` in memory.

    A slot is freed only where that is switched on: by the one with most generated tokens (`longest-first`), or first of the
    lowest lane (`lowest-priority`). Memory is freed lowest lane first, then in the order of the pressure policy.
    """
    running, limits = state.running, state.limits
    lower = [i for i, row in enumerate(running) if row.lane > head.lane]
    gone: list[int] = []
    if full := len(running) >= state.rows:
        by_lane = limits.slot_victims == "lowest-priority"
        gone.append(max(lower, key=lambda i: (running[i].lane if by_lane else 0, running[i].generated, i)))
    progress = limits.pressure != "newest_stalled"
    order = sorted(lower, key=lambda i: (-running[i].lane, running[i].computed if progress else 0, -i))
    more = [i for i in order if i and i not in gone]
    while not _fits(state, head, gone):
        if not more:
            return (), None
        gone.append(more.pop(0))
    return tuple(gone), ("slots" if full else "priority") if gone else None


def _fits(state: State, head: Waiting, gone: Sequence[int]) -> bool:
    alone = len(gone) == len(state.running)
    return alone or room_beside(state, gone).take(head.need).chunks >= margin(state, gone)
