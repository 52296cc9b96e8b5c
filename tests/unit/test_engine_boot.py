"""From boot values and a machine to a pool, knobs and an envelope; the cgroup's limit; the measured plant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from weir_server.contract import FULL, SLIDING, Geometry, Plant
from weir_server.engine.child import plan_boot
from weir_server.engine.memory import cgroup_limit, memory_used
from weir_server.engine.plant import measure, solve
from weir_server.exec.interface import RowResult, RowWork
from weir_server.exec.null import NullModel, NullRunner
from weir_server.kv.shape import Shape
from weir_server.kv.sizing import HEADROOM, Machine, SizingError, Wish, parse_quantity, size_pool
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot
from weir_server.policy.limits import PRESSURE, Limits

BLOCK = 737_280
GIB = 1 << 30
ONE = Shape(16)


def machine(limit: int = 4 * GIB) -> Machine:
    return Machine(limit, "the cgroup's", process=50 << 20, weights=513 << 20, activations=84 << 20)


def wish(budget: str = "auto", **more: object) -> Wish:
    values: dict[str, object] = {"budget_min": None, "num_blocks": None, "share": 0.9, "context": 8192, "slots": 4}
    return Wish(budget=budget, **{**values, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("129e6", 174), ("0.5Gi", 728), ("268435456", 364), ("524288Ki", 728), ("1G", 1356), ("128974848000m", 174),
        ("1.5G", 2034), ("1Gi", 1456), (".5Gi", 728), ("1E6", 1),
    ],
)
def test_every_legal_spelling_of_a_quantity(text: str, chunks: int) -> None:
    """As Kubernetes writes them (DataDog/integrations-core#17280, kubernetes-client/python#756)."""
    assert parse_quantity(text) // BLOCK == chunks


@pytest.mark.parametrize("text", ["1GB", "1gi", "-1Gi", "", "Gi", "1 Gi", "1e", "1KiB", "0x10", "1e3Gi", "nan"])
def test_a_malformed_quantity_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity of bytes"):
        parse_quantity(text)


def test_auto_takes_twice_the_boot_batch_where_memory_allows() -> None:
    sizing = size_pool(machine(16 * GIB), wish(), BLOCK, ONE)
    assert (sizing.num_chunks, sizing.budget, sizing.budget_range) == (4096 + 2, 3019898880, (377487360, 3019898880))


def test_auto_takes_what_the_limit_leaves_and_says_the_arithmetic() -> None:
    sizing = size_pool(machine(2 * GIB), wish(), BLOCK, ONE)
    left = int(2 * GIB * 0.9) - (50 << 20) - (513 << 20) - (84 << 20) - HEADROOM
    assert sizing.num_chunks == left // BLOCK
    assert "2048 MiB (the cgroup's) x 0.9" in sizing.lines[0] and "weights 513 MiB" in sizing.lines[1]


def test_a_stated_budget_is_rounded_down_and_may_be_raised_up_to_the_pool() -> None:
    sizing = size_pool(machine(16 * GIB), wish("0.5Gi"), BLOCK, ONE)
    assert sizing.budget == 728 * BLOCK and sizing.budget_range == (512 * BLOCK, 4096 * BLOCK)
    larger = size_pool(machine(16 * GIB), wish("4Gi"), BLOCK, ONE)
    assert larger.budget == larger.num_chunks * BLOCK - 2 * BLOCK == 4 * GIB // BLOCK * BLOCK


def test_a_fraction_is_one_of_what_is_left() -> None:
    whole = size_pool(machine(2 * GIB), wish("1.0"), BLOCK, ONE)
    half = size_pool(machine(2 * GIB), wish("0.5"), BLOCK, ONE)
    assert whole.budget and half.budget and half.budget // BLOCK == whole.budget // BLOCK // 2


@pytest.mark.parametrize("none", ["none", "0"])
def test_none_is_the_whole_memory_and_no_knob(none: str) -> None:
    sizing = size_pool(machine(16 * GIB), wish(none), BLOCK, ONE)
    assert sizing.budget is None and sizing.budget_range is None and sizing.num_chunks > 4098


@pytest.mark.parametrize(
    ("limit", "more", "words"),
    [
        (GIB, {}, "one full context of 8192 tokens needs 360 MiB.*lower --ctx-size"),
        (16 * GIB, {"budget": "100Mi"}, "one full context of 8192 tokens.*raise --kv-cache-budget"),
        (4 * GIB, {"budget": "64Gi"}, "does not fit.*lower --kv-cache-budget"),
        (4 * GIB, {"num_blocks": 100_000}, "does not fit"),
        (16 * GIB, {"budget": "lots"}, "--kv-cache-budget: 'lots' is not a quantity"),
        (16 * GIB, {"budget": "1Gi", "budget_min": 2 * GIB}, "--kv-cache-budget-min 2048 MiB is above"),
    ],
)
def test_what_does_not_fit_is_one_sentence_that_says_what_to_change(limit: int, more: dict[str, object], words: str) -> None:
    with pytest.raises(SizingError, match=words):
        size_pool(machine(limit), wish(**{"budget": "auto", **more}), BLOCK, ONE)  # type: ignore[arg-type]
    assert issubclass(SizingError, UserError)


def test_a_lower_least_budget_than_one_context() -> None:
    sizing = size_pool(machine(16 * GIB), wish("1Gi", budget_min=50_000_000), BLOCK, ONE)
    assert sizing.budget_range and sizing.budget_range[0] == 67 * BLOCK


def cgroup(tmp_path: Path, line: str, files: dict[str, str]) -> int | None:
    (tmp_path / "cgroup").write_text(line + "\n")
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return cgroup_limit(tmp_path / "cgroup", tmp_path / "fs")


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    files = {"pod/app/memory.max": "max\n", "pod/memory.max": "2147483648\n"}
    assert cgroup(tmp_path, "0::/pod/app", files) == 2 * GIB


def test_cgroup_v2_in_a_namespace_reads_the_mounted_root(tmp_path: Path) -> None:
    assert cgroup(tmp_path, "0::/../../kubepods/x", {"memory.max": "1073741824"}) == GIB


def test_cgroup_v1_reads_the_memory_controller(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/x"
    assert cgroup(tmp_path, lines, {"memory/memory.limit_in_bytes": "3221225472"}) == 3 * GIB


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert cgroup(tmp_path, "0::/x", {"x/memory.max": "max"}) is None
    assert cgroup(tmp_path, "4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}) is None
    assert cgroup_limit(tmp_path / "absent", tmp_path) is None


def test_memory_used_counts_anonymous_and_shared_pages(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmRSS:\t 99 kB\nRssAnon:\t   10 kB\nRssFile:\t 80 kB\nRssShmem:\t  2 kB\n")
    assert memory_used(status) == 12 * 1024 and memory_used() > 1 << 20


def boot(**more: object) -> Boot:
    return Boot(model="null", threads=1, null_model=True, **more)  # type: ignore[arg-type]


def test_boot_values_become_knobs_limits_and_an_envelope() -> None:
    plan = plan_boot(boot(max_batch_size=8, prefill_chunk=0, context_per_slot=1024), NullModel(16), 0)
    assert plan.envelope.max_batch_size == (1, 64) and plan.envelope.max_queue_depth == (1, 1024)
    assert plan.config.limits.tokens == 64 + 1024 and plan.config.context_per_slot == 1024
    assert plan.knobs.kv_cache_budget == 2 * 8 * 1024 * 256
    assert plan.envelope.violation("kv_cache_budget", 1024 * 256 - 1) == 1024 * 256


def test_a_slot_has_no_more_context_than_the_model() -> None:
    for asked, given in ((None, 8192), (16384, 8192), (1024, 1024)):
        assert plan_boot(boot(context_per_slot=asked), NullModel(16), 0).config.context_per_slot == given


def test_a_batch_above_the_stated_envelope_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="--max-batch-size 8 is above --max-requests-per-batch 4"):
        plan_boot(boot(max_batch_size=8, max_requests_per_batch=4), NullModel(16), 0)
    assert plan_boot(boot(max_batch_size=100), NullModel(16), 0).envelope.max_batch_size == (1, 100)


def test_without_a_budget_there_is_no_knob_and_no_watermark() -> None:
    plan = plan_boot(boot(kv_cache_budget="none", num_blocks=2000), NullModel(16), 0)
    assert plan.knobs.kv_cache_budget is None and plan.knobs.admission_watermark == 0.0
    assert plan.envelope.kv_cache_budget is None and plan.config.num_chunks == 2002


def test_without_batching_there_is_one_slot_with_the_whole_context() -> None:
    plan = plan_boot(boot(max_batch_size=8, batching=False, context_per_slot=4096), NullModel(16), 0)
    assert plan.envelope.max_batch_size == (1, 1) and plan.knobs.max_batch_size == 1
    assert plan.config.context_per_slot == 4096 and plan.knobs.kv_cache_budget == 2 * 4096 * 256


def test_the_envelope_has_no_more_rows_than_a_step_has_tokens() -> None:
    """Or a decoding row might sit out for ever."""
    assert plan_boot(boot(max_batch_tokens=16), NullModel(16), 0).envelope.max_batch_size == (1, 16)
    with pytest.raises(UserError, match="--max-batch-size 8 is above --max-batch-tokens 4"):
        plan_boot(boot(max_batch_size=8, max_batch_tokens=4), NullModel(16), 0)


def test_what_the_scheduler_is_told_at_boot() -> None:
    limits = plan_boot(boot(), NullModel(16), 0).config.limits
    assert (limits.prefill_first, limits.prompts, limits.padded_tokens) == (False, 4, 4096)
    assert (limits.slot_victims, limits.pressure) == (None, PRESSURE)
    limits = plan_boot(
        boot(scheduler="prefill_first", max_batch_prefill=2, max_batch_prefill_tokens=0, pressure_policy="newest_stalled",
             enable_preemption=True, preemption_policy="lowest-priority"), NullModel(16), 0,
    ).config.limits  # fmt: skip
    assert (limits.prefill_first, limits.prompts, limits.padded_tokens) == (True, 2, 0)
    assert (limits.slot_victims, limits.pressure) == ("lowest-priority", "newest_stalled")


@pytest.mark.parametrize(("chunk", "padded"), [(None, 4096), (64, 512), (2048, 4096), (0, 4096)])
def test_the_padded_cap_is_derived_from_the_chunk(chunk: int | None, padded: int) -> None:
    assert Limits(9000, chunk=chunk).padded_tokens == padded


def test_the_swap_pool_is_taken_off_the_memory_and_printed() -> None:
    plain = size_pool(machine(2 * GIB), wish(), BLOCK, ONE)
    swap = size_pool(machine(2 * GIB), wish(swap_bytes=100 << 20), BLOCK, ONE)
    assert plain.swap_chunks == 0 and swap.swap_chunks == (100 << 20) // BLOCK + 2
    assert plain.num_chunks - swap.num_chunks == pytest.approx(swap.swap_chunks - 2, abs=1)
    assert "swap pool 100 MiB" in swap.lines[1] and any(line.startswith("swap pool: 142 chunks") for line in swap.lines)
    with pytest.raises(SizingError, match="--cpu-offload-space of 1000 bytes is less than one chunk"):
        size_pool(machine(2 * GIB), wish(swap_bytes=1000), BLOCK, ONE)


def test_a_hybrid_is_sized_for_the_widest_scatter_of_one_full_context() -> None:
    shape = Shape(16, full_per_chunk=5, ring_per_chunk=1, window=512, piece=512)
    sizing = size_pool(machine(16 * GIB), wish(context=8000, slots=1), BLOCK, shape)
    slot = 8000 // 16 // 5 + 64
    assert sizing.budget == 2 * slot * BLOCK and sizing.budget_range == (slot * BLOCK, 2 * slot * BLOCK)
    assert size_pool(machine(16 * GIB), wish(num_blocks=1000, context=8000), BLOCK, shape).num_chunks == 1000 // 5 + 1000 + 2


# ---------------------------------------------------------------- the plant

class TimedRunner(NullRunner):
    """Its own clock: a step takes exactly what an affine plant says."""

    plant = Plant(0.040, 0.003, 2e-6, 0.002, 64)

    def __init__(self, model: NullModel, max_position: int) -> None:
        super().__init__(model.geometry(16))
        self.now, self.max_position, self.released = 0.0, max_position, 0

    def execute(self, rows: list) -> list[RowResult]:  # type: ignore[override,type-arg]
        prompt = sum(len(row.tokens) for row in rows if len(row.tokens) > 1)
        decoding = [row for row in rows if len(row.tokens) == 1]
        assert all(row.start + len(row.tokens) <= len(row.blocks) * 16 for row in rows)
        assert all(2 <= block < self.max_position for row in rows for block in row.blocks)
        self.now += self.plant.step_seconds(len(decoding), sum(row.start + 1 for row in decoding), prompt)
        return super().execute(rows)

    def release_chunks(self, chunks: list[int]) -> None:  # type: ignore[override]
        self.released += len(chunks)


@pytest.mark.parametrize(("usable", "rows"), [(4096, 64), (64, 64), (4096, 4)])
def test_the_measured_plant_is_the_runners_own(usable: int, rows: int) -> None:
    runner = TimedRunner(NullModel(16), usable + 2)
    plant, steps = measure(runner, usable=usable, context=8192, max_rows=rows, prefill_tokens=64, clock=lambda: runner.now)
    for name in "abcp":
        assert getattr(plant, name) == pytest.approx(getattr(runner.plant, name), rel=1e-6), name
    assert plant.prefill_tokens == 64 and len(steps) == 4 and runner.now < 2.5 and runner.released


@pytest.mark.parametrize("types", [{SLIDING: 1}, {FULL: 5, SLIDING: 1}])
@pytest.mark.parametrize("usable", [4096, 50, 3])
def test_a_plant_with_rings_is_measured_within_its_pool(types: dict[str, int], usable: int) -> None:
    chunks: dict[str, set[int]] = {FULL: set(), SLIDING: set()}

    class Watched(NullRunner):
        def execute(self, rows: Sequence[RowWork]) -> list[RowResult]:
            for row in rows:
                assert row.ring and bool(row.blocks) is (FULL in types)
                chunks[FULL] |= {block // types[FULL] for block in row.blocks}
                chunks[SLIDING] |= {block // types[SLIDING] for block in row.ring}
            return super().execute(rows)

    measure(Watched(Geometry(4096, 16, types), window=100), usable=usable, context=8192, max_rows=8, prefill_tokens=64)
    assert chunks[SLIDING] and not chunks[FULL] & chunks[SLIDING]
    assert all(2 <= chunk < usable + 2 for chunk in chunks[FULL] | chunks[SLIDING])


@pytest.mark.parametrize(("usable", "rows"), [(1, 64), (2, 64), (3, 8), (4096, 1)])
def test_a_pool_or_a_batch_too_small_to_measure_gives_what_it_can(usable: int, rows: int) -> None:
    runner = TimedRunner(NullModel(16), usable + 2)
    plant, _ = measure(runner, usable=usable, context=16 * usable, max_rows=rows, prefill_tokens=64, clock=lambda: runner.now)
    assert plant.a > 0 and min(plant.b, plant.c, plant.p) >= 0


def test_noise_never_makes_a_coefficient_negative() -> None:
    plant = solve(0.05, 0.04, 0.03, 0.01, rows=8, short=17, long=513, chunk=64, prefill_tokens=64)
    assert (plant.a, plant.b, plant.c, plant.p) == (0.05, 0.0, 0.0, 0.0)
