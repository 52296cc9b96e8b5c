"""Random walks of the whole engine against the oracle of fuzz_kit, and every failure that they ever found, by name."""

from __future__ import annotations

import itertools
import logging
import math
import zlib
from collections import Counter
from typing import Any

import hypothesis
import pytest
from fuzz_kit import OVERTAKEN, Setup, World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from weir_server.kv import prefix

total: Counter[str] = Counter()
"""What the walks of this process came to: steps, and the counters of each mechanism."""
COUNTERS = (
    "preempted", "soft_resets", "offloads", "restored_tokens", "recomputed_tokens", "prefix_hits", "prefix_evictions",
    "adopted_evictions", "bypassed", "promoted", "batched_prefills", "deadlines_exceeded",
)
MOVED = (
    "released", "copied full_attention", "copied sliding_attention", "swapped out full_attention",
    "swapped out sliding_attention", "swapped in full_attention", "swapped in sliding_attention",
)
setups = st.builds(
    Setup,
    geometry=st.sampled_from(["full", "full", "sliding", "hybrid", "wide hybrid"]),
    chunks=st.integers(15, 28),
    rows=st.integers(1, 6),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    tokens=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]),
    pages=st.sampled_from([math.inf, math.inf, 30]),
    chunk=st.sampled_from([None, 0, 1, 5, 16]),
    grant=st.sampled_from([0, 1, 1, 3]),
    scheduler=st.sampled_from(["fifo", "prefill_first"]),
    prompts=st.sampled_from([1, 2, 4]),
    padded=st.sampled_from([None, 0, 20]),
    pressure=st.sampled_from(["newest_stalled", "least_progress"]),
    slot_victims=st.sampled_from([None, "longest-first", "lowest-priority"]),
    evict_newest=st.booleans(),
    swap=st.sampled_from([0, 0, 3, 30]),
    window=st.sampled_from([2, 5, 7, 12]),
    prefix_cache=st.sampled_from([True, True, False]),
)
OPTIONS: list[dict[str, Any]] = [
    *[{}] * 6, {"n": 2}, {"n": 3}, {"n": 2, "cache": False}, {"cache": False}, {"cache": False, "logprobs": 1}, {"salt": "b"},
    {"wait": 0.05}, {"wait": 40.0}, {"prompt_logprobs": 2}, {"prompt_logprobs": 0, "n": 2, "logprobs": 1}, {"stop_at": 0},
    {"stop_at": 3, "n": 2}, {"stop_at": 1, "min_tokens": 4},
]
"""What some requests ask for beside their length and lane."""
knobs = st.one_of(
    st.fixed_dictionaries({"max_batch_size": st.integers(1, 6)}),
    st.fixed_dictionaries({"share": st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7, 1.0])}),
    st.fixed_dictionaries({"admission_watermark": st.sampled_from([0.0, 0.02, 0.3, 0.5])}),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(setup=setups)
    def start(self, setup: Setup) -> None:
        self.world = World(setup)

    @rule(
        prefix=st.integers(0, 2), shared=st.integers(0, 40), own=st.integers(0, 10),
        max_tokens=st.sampled_from([0, 1, 2, 8, 20, 30, 40]), lane=st.integers(0, 2), options=st.sampled_from(OPTIONS),
        times=st.integers(0, 6),
    )
    def submit(self, times: int, options: dict[str, Any], **request: int) -> None:
        self.world.submit(**request, **options)
        self.world.step(times)

    @rule(lanes=st.lists(st.integers(0, 2), min_size=6, max_size=14), own=st.integers(1, 4), times=st.integers(0, 12))
    def crowd(self, lanes: list[int], own: int, times: int) -> None:
        """Many small requests: enough to overtake a large one more often than anybody may."""
        for lane in lanes:
            self.world.submit(own=own, max_tokens=2, lane=lane)
        self.world.step(times)

    @precondition(lambda self: self.world.engine.busy)
    @rule(times=st.integers(1, 40))
    def step(self, times: int) -> None:
        self.world.step(times)

    @rule(which=st.integers(0, 40), what=st.sampled_from(["cancel", "stop", "row error", "lost step"]), n=st.integers(1, 5),
          during=st.booleans(), times=st.integers(0, 12))
    def end(self, which: int, what: str, n: int, during: bool, times: int) -> None:
        """Somebody ends a request, or its computation goes wrong; perhaps just while a forward runs."""
        self.world.end(which, what, n, during)
        self.world.step(times)

    @rule(knob=knobs, seconds=st.sampled_from([0, 0, 0.02, 1.0, 31.0]), times=st.integers(0, 12))
    def move(self, knob: dict[str, float], seconds: float, times: int) -> None:
        self.world.wait(seconds)
        self.world.knob(**knob)
        self.world.step(times)

    @precondition(lambda self: len(self.world.runner.asked) > 12)
    @rule()
    def drain(self) -> None:
        self.world.drain()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            with self.world:
                pass
            stats = self.world.engine.meter.stats
            total.update({name: int(getattr(stats, name)) for name in COUNTERS})
            total.update(self.world.runner.moved)
            total.update(steps=self.world.steps, walks=1)


def walk(walks: int, seed: int, shrink: bool = True) -> None:
    """Random walks of at most 40 things each, and then on until the engine is at rest. The same seed walks the same way."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    logging.disable()  # hundreds of rows go wrong on purpose
    machine = hypothesis.seed(seed)(type("Walk", (EngineMachine,), {}))
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=walks, stateful_step_count=40, deadline=None, derandomize=False,
                suppress_health_check=list(HealthCheck), database=None, phases=phases,
            ),
        )
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.timeout(900)  # half a minute, where nothing else runs
def test_random_walks_keep_every_invariant() -> None:
    """At least 10,000 steps; at their end each mechanism must have been at work."""
    total.clear()
    seeds = itertools.count()
    while total["steps"] < 10_000 or not all(total[name] for name in (*COUNTERS, *MOVED)):
        assert total["steps"] < 100_000, f"never at work: {[name for name in (*COUNTERS, *MOVED) if not total[name]]}"
        walk(50, next(seeds))


def test_a_hash_of_four_bits_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collisions everywhere: the check of tokens and parents makes each a miss."""
    monkeypatch.setattr(prefix, "digest", lambda parent, payload: bytes([zlib.crc32(parent + payload) % 16]))
    total.clear()
    walk(25, 1)
    assert total["prefix_hits"]


def test_a_prompt_that_decodes_keep_waiting_gets_its_grant() -> None:
    """Too rare in random walks to be asked of them: three rows decode, and leave it one token of a step's four."""
    with World(chunks=40, rows=4, tokens=4, grant=1) as world:
        for _ in range(3):
            world.submit(own=1, max_tokens=30)
        world.submit(prefix=1, own=0, shared=20)
        world.step(10)
        assert world.engine.meter.stats.prefill_grants > 0


def test_a_large_head_is_overtaken_eight_times_and_no_more() -> None:
    with World(chunks=16, rows=6, tokens=64) as world:
        world.submit(own=20, max_tokens=30, lane=0)
        world.step()
        head = world.submit(prefix=1, own=0, shared=40)
        for _ in range(20):
            world.submit(own=3, max_tokens=2)
        while world.runner.reached[head, 0] == 0:
            most = max(world.overtaken.values(), default=0)
            world.step()
        assert most == OVERTAKEN == world.engine.meter.stats.bypassed


# ------------------------------------------------------------------------------------------------ failures that walks found


def test_rows_that_join_keep_the_cache_budget() -> None:
    """Pages that admitted rows read were not counted: two prompts of four pages joined in a step of six."""
    with World(pages=6, tokens=40, chunk=0) as world:
        ids = [world.submit(own=15), world.submit(prefix=1, shared=15, own=0)]
        world.step()
        assert [key for key, _, _ in world.runner.fed] == [(ids[0], 0)]


def test_what_a_head_shares_with_its_victim_does_not_become_free() -> None:
    """Blocks that a victim and the head both hold were counted as freed by the one and as free of charge for the other."""
    with World(chunks=9, tokens=64) as world:
        world.submit(prefix=1, shared=12, own=0, max_tokens=4, lane=0)
        world.submit(prefix=0, shared=12, own=0, max_tokens=4, lane=2)
        world.step()
        world.submit(prefix=0, shared=12, own=8, lane=0)
        world.step()
        assert world.engine.meter.stats.preempted == 0, "driving it out makes no room for the head"
