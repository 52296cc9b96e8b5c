"""Random submits, cancels, stops, knob moves, famine and drains on the real engine, against an oracle of its own.

The oracle knows only what was asked for: every request's tokens follow from its seed, every id ends exactly once, and the
books of blocks and rows are counted anew from the rows' tables after each step. Numbers name the invariants.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from engine_kit import CHUNK, SIZE, VOCAB, Kit, expected
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from weir_server.engine.invariants import violations
from weir_server.link.messages import Cancel, Drain, Stop
from weir_server.policy.state import State, StepPlan

CONTEXT = 60
STUCK = 60
"""Within so many steps something new must have been computed (I8): the longest prompt, a token a step."""
moved: Counter[str] = Counter()
LAYERS = [
    ({"full_attention": 1}, None), ({"full_attention": 1}, None), ({"sliding_attention": 1}, 9),
    ({"full_attention": 5, "sliding_attention": 1}, 9), ({"full_attention": 2, "sliding_attention": 3}, 13),
]  # fmt: skip
PREFIXES = [list(range(n, n + 40)) for n in (0, 100, 200)]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(15, 40), rows=st.integers(1, 6), watermark=st.sampled_from([0.0, 0.1, 0.5]),
        tokens=st.integers(1, 24), chunk=st.sampled_from([None, 0, 1, 5, 16]), grant=st.sampled_from([0, 1, 3]),
        prefix_cache=st.booleans(), layers=st.sampled_from(LAYERS), swap=st.sampled_from([0, 8, 30]),
        prefill_first=st.booleans(), pressure=st.sampled_from(["newest_stalled", "least_progress"]),
        slots=st.sampled_from([None, "longest-first", "lowest-priority"]), newest=st.booleans(),
    )
    def start(
        self, blocks: int, tokens: int, layers: tuple[dict[str, int], int | None], slots: str | None, **options: object
    ) -> None:
        self.per_chunk, self.window = layers
        blocks += 20 * (len(self.per_chunk) - 1)
        self.kit = Kit(
            blocks=blocks, tokens=tokens, context=CONTEXT, per_chunk=self.per_chunk, window=self.window, slot_victims=slots,
            **options,  # type: ignore[arg-type]
        )
        self.blocks, self.asked = blocks, {}
        self.passed: Counter[tuple[int, int]] = Counter()
        self.new, self.stuck, self.tokens = 0.0, 0, tokens
        full, ring = self.per_chunk.get("full_attention"), self.per_chunk.get("sliding_attention")
        self.servable = (blocks - 12 * bool(ring)) * SIZE * (full or 10**6)

    @rule(
        prefix=st.sampled_from(PREFIXES), shared=st.integers(0, 40), own=st.integers(0, 10), max_tokens=st.integers(0, 30),
        n=st.sampled_from([1, 1, 1, 2, 3]), cached=st.booleans(), lane=st.integers(0, 2),
        patience=st.sampled_from([None, None, None, 0.05, 0.5]), logprobs=st.sampled_from([-1, -1, -1, 2]),
    )
    def submit(
        self, prefix: list[int], shared: int, own: int, max_tokens: int, n: int, cached: bool, lane: int,
        patience: float | None, logprobs: int,
    ) -> None:  # fmt: skip
        prompt = [*prefix[:shared], *range(500, 500 + own)]
        id = self.kit.submit(
            prompt, max_tokens, n=n, cache_prompt=cached, lane=lane, prompt_logprobs=logprobs,
            deadline=None if patience is None else self.kit.clock.now + patience,
        )  # fmt: skip
        self.asked[id] = (prompt, max_tokens, n)

    @precondition(lambda self: len(self.asked) < 24)
    @rule(count=st.integers(3, 8), prefix=st.sampled_from(PREFIXES), own=st.integers(1, 9), lane=st.sampled_from([0, 1, 1, 2]))
    def burst(self, count: int, prefix: list[int], own: int, lane: int) -> None:
        """Famine: many that start alike and grow long."""
        for i in range(count):
            self.submit(prefix, 4 * i, own, 30, 1, i % 2 == 0, lane, None, -1)

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.kit.clock.now += seconds

    @precondition(lambda self: self.kit.engine.busy)
    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.kit.engine.busy:
                self.one_step()
                self.books()

    def one_step(self) -> None:
        queue = list(self.kit.engine.batch.queue)
        running = set(map(id, self.kit.engine.batch.running))
        cap = self.kit.knobs.max_batch_size
        self.kit.step()
        fed = self.kit.runner.steps[-1]
        assert 0 < sum(len(row.tokens) for row in fed) <= self.tokens, "I6, I7"
        joined = [row for row in self.kit.engine.batch.running if id(row) not in running]
        assert not joined or len(self.kit.engine.batch.running) <= cap, "I6"
        for i, row in enumerate(queue):
            passed = sum(other in joined and other.lane == row.lane for other in queue[i + 1 :])
            self.passed[row.id, row.choice] = 0 if row in joined else self.passed[row.id, row.choice] + passed
            assert self.passed[row.id, row.choice] <= 8, "I11: overtaken by more than eight"
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
        cache = batch.cache
        assert not faults, faults
        rows = [row for rows in self.kit.engine.requests.values() for row in rows]
        waits = [row for row in rows if row not in batch.running]
        assert not any(row.blocks or row.ring for row in waits) and len(waits) == batch.waiting
        held = Counter(block for row in batch.running for block in row.blocks)
        rings = Counter(block for row in batch.running for block in row.ring)
        assert held == Counter(cache.full.refs) and rings == Counter(cache.ring.refs), "I1"
        cold = {*cache.prefix._cold, *cache.prefix._cold_wanted} if cache.prefix else set()
        chunks = self.chunks(held, "full_attention"), self.chunks(rings, "sliding_attention")
        used = len(chunks[0] | chunks[1])
        assert not cold & set(held) and not chunks[0] & chunks[1], "I2"
        assert cache.held == used and cache.cached == len(cold) and cache.pool.free == self.blocks - used - len(cold), "I2"
        assert all(2 <= chunk < self.blocks + 2 for chunk in chunks[0] | chunks[1]), "a padding chunk was given out"
        for row in batch.running:
            assert all(held[block] == 1 for block in row.blocks[row.computed // SIZE :]), "I3"
            assert row.published * SIZE <= row.computed, "I5"
        assert all(count == 1 for count in rings.values()), "I3: a ring is shared"
        assert not cache.prefix or not cache.prefix.faults(), "I4"
        assert self.kit.engine.busy or cache.held == 0, "I9"
        assert cache.pool.resident <= max(cache.pool.limit, cache.pool.in_use), "memory above the budget that nothing uses"
        if batch.swap:
            for kind, allocator, i in (("full_attention", batch.swap.full, 0), ("sliding_attention", batch.swap.ring, 1)):
                swapped = Counter(block for row in waits if row.swapped for block in row.swapped[i])
                assert swapped == Counter(allocator.refs), f"I1: {kind} in the swap pool"
        for fault in violations(batch, *self.idle()):
            raise AssertionError(fault)
        assert sum(self.kit.stats.invariant_violations.values()) == 0
        self.answers()

    def chunks(self, blocks: Counter[int], kind: str) -> set[int]:
        return {block // self.per_chunk[kind] for block in blocks}

    def idle(self) -> tuple[State, StepPlan]:
        """A step of nothing: for the invariants that are of the books alone."""
        batch = self.kit.engine.batch
        state, _ = batch.view(self.kit.clock.now, self.kit.knobs, self.kit.engine.config.limits, 0)
        return replace(state, running=(), queued=0), StepPlan((), (), (), None, None, 0, False)

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
                    assert not prompt or len(prompt) >= CONTEXT or len(prompt) + max_tokens - 1 > self.servable

    def teardown(self) -> None:
        if hasattr(self, "kit"):
            for _ in range(8000):
                if not self.kit.engine.busy:
                    break
                self.one_step()
                self.books()
            assert not self.kit.engine.busy, "the engine never came to rest"
            stats, runner = self.kit.stats, self.kit.runner
            moved.update(
                steps=int(stats.step["steps"]), preempted=stats.preempted, recomputed=stats.recomputed_tokens,
                hits=stats.prefix_hits, evictions=stats.prefix_evictions, copies=len(runner.copies),
                released=len(runner.released), offloads=stats.offloads, resets=stats.soft_resets,
                restored=stats.restored_tokens, bypassed=stats.bypassed, promoted=stats.promoted,
                grants=stats.prefill_grants, batched=stats.batched_prefills, deadlines=stats.deadlines_exceeded,
                adopted=stats.adopted_evictions, told=sum(map(len, self.kit.told.values())),
                wrapped=sum(self.window is not None and row.start > 4 * len(row.ring) for step in runner.steps for row in step),
                **{f"preempted for {cause}": n for cause, n in stats.preemptions_by_cause.items()},
            )
            assert len(self.kit.ended) == sum(n for _, _, n in self.asked.values()), "I10"


def test_a_random_walk_keeps_every_invariant() -> None:
    """Some 20,000 steps; at the end, each mechanism that the walk is about must have been at work."""
    moved.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.generate, Phase.shrink],
        ),
    )
    assert len(moved) == 21 and moved["preempted for kv"] and moved["hits"], moved


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
