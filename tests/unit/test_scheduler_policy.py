"""decide() alone: numbers in, numbers out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir_server.kv.shape import Need, Room
from weir_server.link.errors import UserError
from weir_server.policy.admit import PASSES
from weir_server.policy.limits import BEGINNING, CHUNK_DECODING, CHUNK_IDLE, Limits, context_per_slot, token_budget
from weir_server.policy.pressure import stalled_victims
from weir_server.policy.state import Running, State
from weir_server.policy.state import Waiting as Asks
from weir_server.policy.step import decide


def decoding(need: int = 0, computed: int = 10, frees: int = 0, pages: int = 1, **more: int) -> Running:
    return Running(left=0, need=need, pages=pages, computed=computed, frees=Room(frees), **{"generated": 5, **more})


def Waiting(left: int, need: int, lane: int = 1, passed: int = 0) -> Asks:
    return Asks(left, Need(need), lane, passed)


def victims(running: list[Running], room: int, pressure: str = "least_progress") -> tuple[int, ...]:
    return stalled_victims(running, room, pressure)


def prefilling(left: int, computed: int = 0) -> Running:
    return Running(left=left, need=0, pages=1, computed=computed)


def state(running: list[Running] = (), waiting: list[Waiting] = (), **more: object) -> State:  # type: ignore[assignment]
    values: dict[str, object] = {
        "queued": more.pop("queued", None) or len(waiting), "rows": 8, "room": Room(more.pop("free", 100)), "growth": 100,  # type: ignore[arg-type]
        "budget": 100, "watermark": 0.0, "starved": 0, "limits": Limits(tokens=1000),
        "head_lane": waiting[0].lane if isinstance(waiting, list) and waiting else None,
    }  # fmt: skip
    return State(running=running, waiting=waiting, **{**values, **more})  # type: ignore[arg-type]


def test_nothing_to_do_is_an_empty_step_with_no_bound() -> None:
    plan = decide(state())
    assert plan.empty and plan.bound is None


def test_the_chunk_is_large_while_nothing_decodes_and_small_while_something_does() -> None:
    assert decide(state([prefilling(2000)])).take == (CHUNK_IDLE,)
    assert decide(state([decoding(), prefilling(2000)])).take == (1, CHUNK_DECODING)


def test_rows_that_have_just_begun_wait_for_those_that_came_with_them() -> None:
    begun = [decoding(generated=1), decoding(generated=BEGINNING)]
    assert decide(state([*begun, prefilling(2000)])).take == (1, 1, CHUNK_IDLE)
    assert decide(state([*begun, decoding(generated=BEGINNING + 1), prefilling(2000)])).take == (1, 1, 1, CHUNK_DECODING)


def test_prefill_first_takes_the_large_chunk_even_while_something_decodes() -> None:
    assert decide(state([decoding(), prefilling(2000)], limits=Limits(1000, prefill_first=True))).take == (1, CHUNK_IDLE)
    assert decide(state([decoding(), prefilling(2000)], limits=Limits(512, prefill_first=True))).take == (0, 512)


def test_an_explicit_chunk_pins_both() -> None:
    limits = Limits(tokens=1000, chunk=100)
    assert decide(state([prefilling(2000)], limits=limits)).take == (100,)
    assert decide(state([decoding(), prefilling(2000)], limits=limits)).take == (1, 100)


def test_chunk_zero_takes_prompts_whole_and_splits_only_what_no_step_could_hold() -> None:
    limits = Limits(tokens=1000, chunk=0)
    assert decide(state([prefilling(600), prefilling(600)], limits=limits)).take == (600, 0)
    assert decide(state([prefilling(600), prefilling(400)], limits=limits)).take == (600, 400)
    assert decide(state([decoding(), prefilling(3000)], limits=limits)).take == (1, 999)


def test_several_prompts_share_a_chunk_in_order() -> None:
    queue = [Waiting(left=20, need=2), Waiting(left=90, need=6)]
    plan = decide(state([decoding(), prefilling(40)], queue, limits=Limits(1000, chunk=64)))
    assert (plan.take, plan.admit, plan.bound) == ((1, 40), ((0, 20), (1, 4)), None)


def test_the_head_waits_for_prompt_tokens_when_the_chunk_is_spent() -> None:
    plan = decide(state([decoding(), prefilling(500)], [Waiting(left=20, need=2)]))
    assert (plan.admit, plan.bound) == ((), "prefill")


def test_slots_are_named_before_anything_else_and_a_lowered_cap_as_drain() -> None:
    assert decide(state([decoding()] * 2, [Waiting(5, 999)], rows=2)).bound == "slots"
    assert decide(state([decoding()] * 3, [Waiting(5, 1)], rows=2)).bound == "drain"


def test_the_watermark_is_kept_free_only_while_something_decodes() -> None:
    head = [Waiting(left=8, need=95)]
    assert decide(state([prefilling(5)], head, watermark=0.1)).admit == ((0, 8),)
    refused = decide(state([decoding()], head, watermark=0.1))
    assert (refused.admit, refused.bound) == ((), "kv")
    assert decide(state([decoding()], [Waiting(8, 90)], watermark=0.1)).admit == ((0, 8),)
    assert decide(state([decoding()], [Waiting(8, 91)], watermark=0.1)).admit == ()


def test_a_row_that_runs_alone_is_asked_nothing() -> None:
    assert decide(state([], [Waiting(8, 100)], watermark=0.5)).admit == ((0, 8),)
    assert decide(state([], [Waiting(8, 500)])).admit == ((0, 8),), "a preempted row above a lowered budget"
    assert decide(state([], [Waiting(8, 60), Waiting(8, 41)])).admit == ((0, 8),)


def test_growth_of_this_step_is_taken_before_admissions() -> None:
    assert decide(state([decoding(need=1)], [Waiting(8, 100)])).admit == ()
    assert decide(state([decoding(need=1)], [Waiting(8, 99)])).admit == ((0, 8),)


def test_a_bounded_few_pass_a_head_that_does_not_fit_and_then_nobody() -> None:
    others = [Waiting(8, 1)] * 20
    plan = decide(state([decoding()], [Waiting(8, 101), *others], rows=40, limits=Limits(1000, chunk=500, prompts=99)))
    assert [place for place, _ in plan.admit] == list(range(1, PASSES + 1)) and plan.bound == "kv"
    plan = decide(state([decoding()], [Waiting(8, 101, passed=PASSES - 2), *others], limits=Limits(1000, chunk=500)))
    assert [place for place, _ in plan.admit] == [1, 2]
    plan = decide(state([decoding()], [Waiting(8, 101, passed=PASSES), *others]))
    assert (plan.admit, plan.bound) == ((), "kv")


def test_every_row_that_is_passed_counts_not_the_head_alone() -> None:
    queue = [Waiting(8, 101), Waiting(8, 99, passed=PASSES - 1), Waiting(8, 60), Waiting(8, 1), Waiting(8, 1)]
    plan = decide(state([decoding()], queue, free=50, limits=Limits(1000, chunk=500)))
    assert [place for place, _ in plan.admit] == [3]


def test_past_a_head_that_waits_for_tokens_nobody_goes() -> None:
    plan = decide(state([decoding(), prefilling(500)], [Waiting(20, 2), Waiting(1, 1)]))
    assert (plan.admit, plan.bound) == ((), "prefill")


@pytest.mark.parametrize(("rows", "looks"), [(1, 0), (3, 2), (99, 2 + 1 + PASSES)])
def test_only_a_bounded_part_of_the_queue_is_looked_at(rows: int, looks: int) -> None:
    """None beyond the free slots; where the third does not fit, it and those that may pass it."""
    looked: list[int] = []

    def queue() -> object:
        for i in range(1000):
            looked.append(i)
            yield Waiting(left=4, need=40)

    decide(state([decoding()], queue(), queued=1000, rows=rows))  # type: ignore[arg-type]
    assert looked == list(range(looks))


def test_victims_are_those_who_lose_least_then_the_newest_never_the_oldest() -> None:
    rows = [decoding(1, 5, 3), decoding(1, 50, 3), decoding(1, 20, 3), decoding(1, 20, 3)]
    assert victims(rows, room=4) == ()
    assert victims(rows, room=3) == (3,)
    assert victims(rows, room=-1) == (3, 2)
    assert victims(rows, room=-100) == (3, 2, 1)


def test_what_a_victim_needed_itself_counts_as_freed() -> None:
    assert victims([decoding(1, 50), decoding(1, 9), decoding(1, 9, 4)], room=1) == (2,)
    assert victims([decoding(1, 50), decoding(1, 8), decoding(1, 9)], room=2) == (1,)


def test_a_victim_that_frees_nothing_is_spared() -> None:
    assert victims([decoding(1, 50), decoding(0, 1, 0), decoding(0, 9, 2)], room=0) == (2,)


def test_newest_stalled_takes_the_fewest_of_the_newest_that_were_denied() -> None:
    rows = [decoding(1, 5, 3), decoding(0, 50, 3), decoding(1, 1, 3), decoding(1, 90, 3), decoding(1, 80, 3)]
    assert victims(rows, 3, "newest_stalled") == (4,)
    assert victims(rows, 0, "newest_stalled") == (4,), "its three blocks and its own need are enough for all"
    assert victims(rows, -1, "newest_stalled") == (4, 3)
    assert victims(rows, -99, "newest_stalled") == (4, 3, 2, 1), "the stalled first; the oldest never"
    assert victims([decoding(1, 5), decoding(0, 9, 2), decoding(0, 1, 2)], 0, "newest_stalled") == (2,), "for the oldest alone"


LONGEST = Limits(1000, slot_victims="longest-first")


def test_only_strictly_lower_lanes_make_way_lowest_first_then_by_progress_and_the_oldest_stays() -> None:
    rows = [decoding(0, 1, 9, lane=2), decoding(0, 1, 9, lane=1), decoding(0, 9, 4, lane=2), decoding(0, 5, 4, lane=2)]
    rows.append(decoding(0, 1, 9, lane=0))

    def gone(need: int, **more: object) -> tuple[int, ...]:
        plan = decide(state(rows, [Waiting(8, need, lane=0), Waiting(8, 1, lane=0)], free=10, **more))
        assert plan.cause == ("priority" if plan.preempt else None)
        assert not plan.preempt or plan.admit == ((0, 8),), "the head alone joins, though the next would fit"
        return plan.preempt

    assert gone(10) == () and gone(13) == gone(14) == (3,) and gone(18) == (3, 2) and gone(27) == (3, 2, 1)
    assert gone(28) == (), "the oldest and the equal stay, and then nobody leaves for nothing"
    assert gone(18, limits=Limits(1000, pressure="newest_stalled")) == (3, 2)
    assert gone(14, limits=Limits(1000, pressure="newest_stalled"), watermark=0.04) == (3, 2), "the watermark is kept"


def test_a_slot_is_taken_from_the_longest_or_from_the_lowest_lane_and_the_head_alone_joins() -> None:
    rows = [decoding(0, 1, 1, lane=lane, generated=n) for lane, n in ((1, 9), (2, 5), (2, 7))]
    head = [Waiting(8, 3, lane=0), Waiting(8, 1, lane=0)]
    plan = decide(state(rows, head, rows=3, limits=LONGEST))
    assert (plan.preempt, plan.cause, plan.admit, plan.bound) == ((0,), "slots", ((0, 8),), "slots")
    lowest = Limits(1000, slot_victims="lowest-priority")
    assert decide(state(rows, head, rows=3, limits=lowest)).preempt == (2,)
    assert decide(state(rows, head, rows=3)).preempt == (), "off by default"
    assert decide(state(rows, head, rows=2, limits=LONGEST)).bound == "drain", "a lowered batch drains first"
    assert decide(state(rows, [Waiting(8, 3, lane=1)], rows=3, limits=LONGEST)).preempt == (2,), "strictly lower"
    assert decide(state(rows, head, rows=3, free=1, limits=LONGEST)).preempt == (0, 2), "and memory with it"
    assert decide(state(rows[:1], head, rows=1, free=-9, limits=LONGEST)).preempt == (0,), "who runs alone is asked nothing"


def test_a_step_that_preempts_admits_nobody() -> None:
    plan = decide(state([decoding(1, 9, 4), decoding(1, 2, 4)], [Waiting(4, 1)], growth=1))
    assert (plan.take, plan.preempt, plan.admit, plan.bound) == ((1, 0), (1,), (), "kv")


def test_the_token_budget_is_kept_and_the_oldest_go_first() -> None:
    plan = decide(state([decoding()] * 5, limits=Limits(tokens=3)))
    assert plan.take == (1, 1, 1, 0, 0)


def test_the_cache_budget_is_kept_but_one_row_always_goes() -> None:
    rows = [decoding(pages=9), decoding(pages=4), decoding(pages=1)]
    assert decide(state(rows, limits=Limits(tokens=10, pages=10))).take == (1, 0, 1)
    assert decide(state(rows, limits=Limits(tokens=10, pages=2))).take == (1, 0, 0)


@given(
    rows=st.integers(1, 40), chunks=st.integers(1, 6), chunk=st.integers(1, 16), grant=st.integers(1, 8),
    tokens=st.integers(2, 32),
)
def test_a_parked_prefill_is_through_within_its_bound(rows: int, chunks: int, chunk: int, grant: int, tokens: int) -> None:
    """C chunks, each the smaller of the chunk and half the budget, take at most C·(grant + 1) steps."""
    left, starved, steps = chunks * min(chunk, tokens // 2), 0, 0
    while left:
        limits = Limits(tokens, chunk=chunk, grant=grant)
        plan = decide(state([*[decoding()] * rows, prefilling(left)], starved=starved, limits=limits))
        assert sum(plan.take) <= tokens
        left, starved, steps = left - plan.take[-1], plan.starved, steps + 1
        assert steps <= chunks * (grant + 1)


def test_without_a_grant_decodes_may_keep_a_prefill_out() -> None:
    plan = decide(state([*[decoding()] * 4, prefilling(9)], starved=10**6, limits=Limits(4, grant=0)))
    assert plan.take == (1, 1, 1, 1, 0)


@given(
    running=st.lists(
        st.builds(
            Running, left=st.sampled_from([0, 0, 3, 40]), need=st.integers(0, 1), pages=st.integers(1, 9),
            computed=st.integers(0, 50), generated=st.integers(0, 9), lane=st.integers(0, 2),
            frees=st.integers(0, 9).map(Room),
        ),
        max_size=12,
    ),
    waiting=st.lists(
        st.builds(Waiting, st.integers(0, 50), st.integers(0, 20), lane=st.integers(0, 2), passed=st.integers(0, 8)), max_size=8
    ),
    rows=st.integers(1, 12), free=st.integers(-20, 60), growth=st.integers(-20, 60), watermark=st.floats(0, 0.5),
    starved=st.integers(0, 5),
    limits=st.builds(
        Limits, st.integers(1, 40), chunk=st.sampled_from([None, 0, 1, 7]), grant=st.integers(0, 3), prompts=st.integers(1, 5),
        padded=st.sampled_from([None, 0, 9]), prefill_first=st.booleans(),
        pressure=st.sampled_from(["newest_stalled", "least_progress"]),
        slot_victims=st.sampled_from([None, "longest-first", "lowest-priority"]),
    ),
)  # fmt: skip
def test_every_plan_keeps_its_budgets_and_is_empty_only_if_nothing_can_go(
    running: list[Running], waiting: list[Asks], rows: int, free: int, growth: int, watermark: float, starved: int,
    limits: Limits,
) -> None:  # fmt: skip
    s = state(
        running, waiting, rows=rows, free=free, growth=growth, watermark=watermark, starved=starved, limits=limits
    )  # fmt: skip
    plan = decide(s)
    prompts = [n for n, row in zip(plan.take, running, strict=True) if n and row.left]
    prompts += [n for place, n in plan.admit if waiting[place].left]
    assert sum(plan.take) + sum(n for _, n in plan.admit) <= limits.tokens
    assert not plan.admit or len(running) - len(plan.preempt) + len(plan.admit) <= rows
    assert all(0 <= n <= (row.left or 1) for n, row in zip(plan.take, running, strict=True))
    assert all(0 < n <= (waiting[place].left or 1) for place, n in plan.admit)
    assert len(prompts) <= 1 or (len(prompts) <= limits.prompts and len(prompts) * max(prompts) <= limits.padded_tokens)
    assert all(plan.take[i] == 0 for i in plan.preempt)
    assert 0 not in plan.preempt or plan.cause == "slots", "the oldest gives way in memory"
    assert plan.cause in (None, "kv") or all(running[i].lane > waiting[0].lane for i in plan.preempt)
    assert plan.cause in (None, "kv") or [place for place, _ in plan.admit] in ([], [0])
    passed = {j: sum(place > j for place, _ in plan.admit) for j in range(len(waiting)) if j not in dict(plan.admit)}
    assert all(n == 0 or waiting[j].passed + n <= PASSES for j, n in passed.items())
    assert (plan.bound is None) == (len(plan.admit) == len(waiting))
    assert decide(s) == plan, "the same input gives the same plan"
    if plan.empty:
        assert not running and not waiting


@pytest.mark.parametrize(
    ("ctx", "slots", "want"), [(8192, 4, 2048), (10_000, 3, 3333), (65536, 4, 16384), (512, 1, 512)]
)  # fmt: skip
def test_a_stated_context_is_shared_by_the_slots(ctx: int, slots: int, want: int) -> None:
    assert context_per_slot(ctx, slots) == want


def test_under_512_tokens_a_slot_is_refused_with_the_number_to_use() -> None:
    with pytest.raises(UserError, match=r"511 tokens each.*raise it to 2048"):
        context_per_slot(2047, 4)


@pytest.mark.parametrize(("chunk", "want"), [(None, 64 + CHUNK_IDLE), (128, 192), (0, 64 + 8192)])
def test_the_default_token_budget_holds_all_rows_and_a_chunk(chunk: int | None, want: int) -> None:
    assert token_budget(64, chunk, 8192) == want
