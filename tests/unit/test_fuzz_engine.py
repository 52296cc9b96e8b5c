"""Random walks of the whole engine against the oracle of fuzz_kit, and every failure that they ever found, by name."""

from __future__ import annotations

import logging
from collections import Counter

from fuzz_kit import GEOMETRIES, Setup, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

total: Counter[str] = Counter()
"""What the walks of this process came to: steps, and the counters of each mechanism."""
COUNTERS = (
    "preempted", "soft_resets", "recomputed_tokens", "prefix_hits", "prefix_evictions",
)
setups = st.builds(
    Setup,
    geometry=st.sampled_from(["full"]),
    chunks=st.integers(15, 40),
    rows=st.integers(1, 6),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    tokens=st.integers(1, 24),
    pages=st.sampled_from([float("inf"), 30]),
    chunk=st.sampled_from([None, 0, 1, 5, 16]),
    grant=st.sampled_from([0, 1, 3]),
    prefix_cache=st.booleans(),
)
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
        prefix=st.integers(0, 2), shared=st.integers(0, 40), own=st.integers(0, 10), max_tokens=st.integers(0, 30),
        n=st.sampled_from([1, 1, 1, 2, 3]), cache=st.booleans(), salt=st.sampled_from(["", "", "b"]), lane=st.sampled_from([1]),
        wait=st.sampled_from([None]), prompt_logprobs=st.sampled_from([-1]),
        logprobs=st.sampled_from([-1, 1]), stop_at=st.sampled_from([None, 0, 3]), min_tokens=st.sampled_from([0, 2]),
        times=st.integers(0, 6),
    )
    def submit(self, times: int, **request: object) -> None:
        self.world.submit(**request)
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


def walk(examples: int, machine: type[EngineMachine] = EngineMachine) -> None:
    """`examples` random walks of at most 40 things each, and then on until the engine is at rest."""
    logging.disable()  # hundreds of rows go wrong on purpose
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
        ),
    )


def test_random_walks_keep_every_invariant() -> None:
    """At least 10,000 steps; at their end each mechanism must have been at work."""
    total.clear()
    while total["steps"] < 10_000:
        walk(100)
    assert all(total[name] for name in (*COUNTERS, "released")), total
