"""Random submits, cancels, stops, knob moves, famine and drains on the real engine, against an oracle of its own.

The oracle knows only what was asked for: every request's tokens follow from its seed, every id ends exactly once, and the
books of blocks and rows are counted anew from the rows' tables after each step. Numbers name the invariants.
"""

from __future__ import annotations

from collections import Counter

import pytest
from engine_kit import CHUNK, SIZE, VOCAB, Kit, expected
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from weir_server.link.messages import Cancel, Drain, Stop

CONTEXT = 60
STUCK = 60
"""Within so many steps something new must have been computed (I8): the longest prompt, a token a step."""
moved: Counter[str] = Counter()
PREFIXES = [list(range(n, n + 40)) for n in (0, 100, 200)]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(15, 40), rows=st.integers(1, 6), watermark=st.sampled_from([0.0, 0.1, 0.5]),
        tokens=st.integers(1, 24), chunk=st.sampled_from([None, 0, 1, 5, 16]), grant=st.sampled_from([0, 1, 3]),
        prefix_cache=st.booleans(),
    )
    def start(
        self, blocks: int, rows: int, watermark: float, tokens: int, chunk: int | None, grant: int, prefix_cache: bool
    ) -> None:
        self.kit = Kit(
            blocks=blocks, rows=rows, watermark=watermark, tokens=tokens, chunk=chunk, grant=grant,
            context=CONTEXT, prefix_cache=prefix_cache,
        )
        self.blocks, self.asked = blocks, {}
        self.new, self.stuck, self.tokens = 0.0, 0, tokens

    @rule(
        prefix=st.sampled_from(PREFIXES), shared=st.integers(0, 40), own=st.integers(0, 10), max_tokens=st.integers(0, 30),
        n=st.sampled_from([1, 1, 1, 2, 3]), cached=st.booleans(),
    )
    def submit(self, prefix: list[int], shared: int, own: int, max_tokens: int, n: int, cached: bool) -> None:
        prompt = [*prefix[:shared], *range(500, 500 + own)]
        id = self.kit.submit(prompt, max_tokens, n=n, cache_prompt=cached)
        self.asked[id] = (prompt, max_tokens, n)

    @precondition(lambda self: self.kit.engine.busy)
    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.kit.engine.busy:
                self.one_step()
                self.books()

    def one_step(self) -> None:
        queue = [(row.id, row.choice) for row in self.kit.engine.batch.waiting]
        running = set(map(id, self.kit.engine.batch.running))
        cap = self.kit.knobs.max_batch_size
        self.kit.step()
        fed = self.kit.runner.steps[-1]
        assert 0 < sum(len(row.tokens) for row in fed) <= self.tokens, "I6, I7"
        joined = [row for row in self.kit.engine.batch.running if id(row) not in running]
        assert not joined or len(self.kit.engine.batch.running) <= cap, "I6"
        waits = [(row.id, row.choice) for row in self.kit.engine.batch.waiting]
        left = [key for key in queue if key not in waits]
        assert left == queue[: len(left)], "I11: somebody was overtaken"
        step = self.kit.stats.step
        new = step["prefill_tokens"] + step["decode_rows"] - self.kit.stats.recomputed_tokens
        self.stuck = self.stuck + 1 if new <= self.new else 0
        self.new = new
        assert self.stuck < STUCK, "I8: no progress"

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.kit.engine.handle([Cancel(data.draw(st.sampled_from(sorted(self.asked))))])
        self.kit.report()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), n=st.integers(1, 5))
    def stop(self, data: st.DataObject, n: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.asked)))
        self.kit.engine.handle([Stop(id, 0, n)])
        self.kit.report()

    @rule(rows=st.integers(1, 6))
    def batch(self, rows: int) -> None:
        self.kit.knob(max_batch_size=rows)

    @rule(share=st.floats(0.1, 1.0))
    def budget(self, share: float) -> None:
        self.kit.knob(kv_cache_budget=int(share * self.blocks * CHUNK))

    @rule(watermark=st.sampled_from([0.0, 0.02, 0.3, 0.5]))
    def watermark(self, watermark: float) -> None:
        self.kit.knob(admission_watermark=watermark)

    @precondition(lambda self: len(self.asked) > 12)
    @rule()
    def drain(self) -> None:
        """A drain whose deadline is past ends everything; the engine of the next life starts empty."""
        self.kit.engine.handle([Drain(self.kit.clock.now)])
        self.kit.report()
        assert not self.kit.engine.busy
        self.kit.engine.deadline = float("inf")

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "kit"):
            return
        batch, faults = self.kit.engine.batch, self.kit.runner.faults
        assert not faults, faults
        tables = [row.blocks for row in batch.running]
        assert not any(row.blocks or row.computed for row in batch.waiting)
        held = Counter(block for table in tables for block in table)
        assert held == Counter(batch.blocks.refs), "I1"
        cold = set(batch.blocks.prefix._cold)
        assert not cold & set(held) and batch.blocks.used == len(held) and batch.blocks.cached == len(cold), "I2"
        assert batch.pool.free == self.blocks - len(held) - len(cold), "I2"
        assert all(2 <= block < self.blocks + 2 for block in held), "a padding chunk was given out"
        for row in batch.running:
            assert all(held[block] == 1 for block in row.blocks[row.computed // SIZE :]), "I3"
            assert row.published * SIZE <= row.computed <= len(row.blocks) * SIZE, "I5"
        assert not batch.blocks.prefix.faults(), "I4"
        assert self.kit.engine.busy or batch.blocks.used == 0, "I9"
        assert batch.pool.resident <= max(batch.pool.limit, batch.pool.in_use), "memory above the budget that nothing uses"
        assert sum(self.kit.stats.invariant_violations.values()) == 0
        self.answers()

    def answers(self) -> None:
        """I10, I12: each row says what its seed says, and ends once (Kit sees to that), with as many tokens as it should."""
        for id, (prompt, max_tokens, n) in self.asked.items():
            for choice in range(n):
                said = self.kit.said.get((id, choice), [])
                assert said == expected(id, choice, len(prompt), len(said)), "I12"
                end = self.kit.ended.get((id, choice))
                live = any(row.choice == choice for row in self.kit.engine.requests.get(id, ()))
                assert (end is None) == live, "I10"
                if end and end.reason == "length":
                    assert len(said) == min(max_tokens, CONTEXT - len(prompt))
                if end and end.reason == "error":
                    assert not prompt or len(prompt) >= CONTEXT or len(prompt) + max_tokens - 1 > self.blocks * SIZE

    def teardown(self) -> None:
        if hasattr(self, "kit"):
            for _ in range(4000):
                if not self.kit.engine.busy:
                    break
                self.one_step()
                self.books()
            assert not self.kit.engine.busy, "the engine never came to rest"
            stats, runner = self.kit.stats, self.kit.runner
            moved.update(
                steps=int(stats.step["steps"]), preempted=stats.preempted, recomputed=stats.recomputed_tokens,
                hits=stats.prefix_hits, evictions=stats.prefix_evictions, copies=len(runner.copies),
                released=len(runner.released),
            )
            assert len(self.kit.ended) == sum(n for _, _, n in self.asked.values()), "I10"


def test_a_random_walk_keeps_every_invariant() -> None:
    """Some 20,000 steps; at the end, each mechanism that the walk is about must have been at work."""
    moved.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)),
    )
    assert len(moved) == 7 and all(moved.values()), moved


def test_a_hash_of_four_bits_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collisions everywhere: the check of tokens and parents makes each a miss."""
    from weir_server.kv import prefix

    monkeypatch.setattr(prefix, "digest", lambda parent, payload: bytes([hash((parent, payload)) % 16]))
    kit = Kit(blocks=30, rows=4, context=CONTEXT)
    ids = {}
    for i in range(60):
        prompt = [*PREFIXES[i % 3][: i % 37 + 1], i % VOCAB]
        ids[kit.submit(prompt, 6)] = len(prompt)
        kit.step(2)
    kit.run()
    assert all(kit.said[id, 0] == expected(id, 0, n, 6) for id, n in ids.items())
    assert kit.stats.prefix_hits > 0 and not kit.runner.faults
