"""The engine's own books, read by the fuzz kit: who runs, who waits, what they hold, what the allocators count.

The only part of the kit that knows the engine from within; all counting is done anew here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fuzz_runner import AuditRunner, Key

from weir_server.contract import FULL, SLIDING, Geometry, Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.engine.rows import Row
from weir_server.kv.cache import Cache
from weir_server.policy.limits import Limits

if TYPE_CHECKING:
    from fuzz_kit import Setup


def build(runner: AuditRunner, setup: Setup, knobs: Knobs, clock: Callable[[], float], context: int) -> Engine:
    limits = Limits(
        setup.tokens, setup.pages, setup.chunk, setup.grant, setup.prompts, setup.padded, setup.scheduler == "prefill_first",
        setup.pressure, setup.slot_victims,
    )  # fmt: skip
    config = EngineConfig(
        context, setup.chunks + 2, limits, "model", setup.prefix_cache, evict_newest=setup.evict_newest,
        swap_chunks=setup.swap and setup.swap + 2,
    )
    return Engine(runner, config, knobs, clock)


class Books:
    def __init__(self, engine: Engine, geometry: Geometry) -> None:
        self.engine, self.per, self.size = engine, geometry.blocks_per_chunk, geometry.block_tokens

    def running(self) -> list[Key]:
        return [(row.id, row.choice) for row in self.engine.batch.running]

    def queued(self) -> list[Key]:
        """Rows that may be taken now, in the order of nothing in particular."""
        return [(row.id, row.choice) for row in self.engine.batch.queue]

    def waiting(self) -> list[Key]:
        """With them those whose prompt another row of their request is computing."""
        behind = [(row.id, row.choice) for rows in self.engine.requests.values() for row in rows if row.behind]
        return self.queued() + behind

    def piece(self) -> int:
        """Most tokens that a row is fed in one step."""
        return self.engine.config.limits.piece

    def check(self, usable: int, swap: int) -> None:
        batch, stats = self.engine.batch, self.engine.meter.stats
        waiting = [row for rows in self.engine.requests.values() for row in rows if row not in batch.running]
        assert not any(row.blocks or row.ring for row in waiting), "a waiting row holds blocks"
        held = self._pool(batch.cache, usable, [row.blocks for row in batch.running], [row.ring for row in batch.running])
        assert stats.kv_used_bytes == held * batch.cache.pool.chunk_bytes, "I2"
        swapped = [row.swapped for row in waiting if row.swapped]
        if batch.swap:
            there = self._pool(batch.swap, swap, [table.full for table in swapped], [table.ring for table in swapped])
            assert swapped or not there, "I9"
        else:
            assert not swapped
        for row in batch.running:
            self._row(row, Counter(block for other in batch.running for block in other.blocks))
        assert self.engine.busy or not held, "I9"
        pool = batch.cache.pool
        assert pool.resident <= max(pool.limit, pool.in_use), "memory above the budget that nothing uses"
        assert not any(stats.invariant_violations.values()), stats.invariant_violations

    def _pool(self, cache: Cache, usable: int, full: Iterable[list[int]], ring: Iterable[list[int]]) -> int:
        """One pool against the tables of its rows; returns how many chunks rows hold."""
        cold = {*cache.prefix._cold, *cache.prefix._cold_wanted} if cache.prefix else set()
        chunks: dict[str, set[int]] = {FULL: set(), SLIDING: set()}
        for kind, allocator, tables in ((FULL, cache.full, full), (SLIDING, cache.ring, ring)):
            held = Counter(block for table in tables for block in table)
            assert held == Counter(allocator.refs), f"I1 {kind}"
            if held:
                per = self.per[kind]
                chunks[kind] = {block // per for block in held}
                assert allocator.loose == len(chunks[kind]) * per - len(held), f"I2 {kind}: loose blocks"
                assert all(2 <= chunk < usable + 2 for chunk in chunks[kind]), "a padding chunk was given out"
            else:
                assert not allocator.loose, f"I2 {kind}: loose blocks"
        both = chunks[FULL] | chunks[SLIDING]
        assert not chunks[FULL] & chunks[SLIDING] and not both & cold, "I2: a chunk has two owners"
        assert cache.held == len(both) and cache.cached == len(cold), "I2"
        assert cache.pool.free == usable - len(both) - len(cold), "I2"
        assert not cache.prefix or not cache.prefix.faults(), "I4"
        return len(both)

    def _row(self, row: Row, held: Counter[int]) -> None:
        assert all(held[block] == 1 for block in row.blocks[row.computed // self.size :]), "I3"
        assert row.published * self.size <= row.computed, "I5"
        if FULL in self.per:
            assert row.computed <= len(row.blocks) * self.size, "more computed than the table holds"
