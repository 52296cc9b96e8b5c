"""The engine's own books, read by the fuzz kit: who runs, who waits, what they hold, what the allocators count.

The only part of the kit that knows the engine from within; the counting is done anew here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from fuzz_runner import AuditRunner, Key

from weir_server.contract import Geometry, Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.exec.interface import FULL
from weir_server.policy.limits import Limits

if TYPE_CHECKING:
    from fuzz_kit import Setup


def build(runner: AuditRunner, setup: Setup, knobs: Knobs, clock: Callable[[], float], context: int) -> Engine:
    limits = Limits(setup.tokens, setup.pages, setup.chunk, setup.grant)
    return Engine(runner, EngineConfig(context, setup.chunks + 2, limits, "model", setup.prefix_cache), knobs, clock)


class Books:
    def __init__(self, engine: Engine, geometry: Geometry) -> None:
        self.engine, self.geometry = engine, geometry

    def running(self) -> list[Key]:
        return [(row.id, row.choice) for row in self.engine.batch.running]

    def waiting(self) -> list[Key]:
        return [(row.id, row.choice) for row in self.engine.batch.waiting]

    def check(self, usable: int) -> None:
        batch, size = self.engine.batch, self.geometry.block_tokens
        tables = [row.blocks for row in batch.running]
        assert not any(row.blocks or row.computed for row in batch.waiting), "a waiting row holds blocks"
        held = Counter(block for table in tables for block in table)
        assert held == Counter(batch.blocks.refs), "I1"
        cold = set(batch.blocks.prefix._cold)
        assert not cold & set(held) and batch.blocks.used == len(held) and batch.blocks.cached == len(cold), "I2"
        assert batch.pool.free == usable - len(held) - len(cold), "I2"
        assert all(2 <= block < usable + 2 for block in held), "a padding chunk was given out"
        for row in batch.running:
            assert all(held[block] == 1 for block in row.blocks[row.computed // size :]), "I3"
            assert row.published * size <= row.computed <= len(row.blocks) * size, "I5"
        assert not batch.blocks.prefix.faults(), "I4"
        stats = self.engine.meter.stats
        assert self.engine.busy or (batch.blocks.used == 0 and stats.kv_used_bytes == 0), "I9"
        assert batch.pool.resident <= max(batch.pool.limit, batch.pool.in_use), "memory above the budget that nothing uses"
        assert not any(stats.invariant_violations.values()), stats.invariant_violations
