"""Who gives way, for what, and what becomes of it: pressure, priorities, slots, the swap pool, deadlines, lanes.

Each test names the counter that must have moved; the audit runner sees every copy, and every token follows from its seed.
"""

from __future__ import annotations

import pytest
from engine_kit import CHUNK, RING, SIZE, Kit, expected

from weir_server.engine.core import MANY
from weir_server.link.messages import DEADLINE_EXCEEDED, Cancel
from weir_server.policy.queue import PROMOTE_AFTER

HYBRID = {"full_attention": 5, RING: 1}
POLICIES = ["newest_stalled", "least_progress"]


def right(kit: Kit, *ids: int, prompt: int, count: int) -> None:
    for id in ids:
        assert kit.said[id, 0] == expected(id, 0, prompt, count), id


# ---------------------------------------------------------------- pressure and the swap pool

@pytest.mark.parametrize("pressure", POLICIES)
@pytest.mark.parametrize("swap", [0, 40])
def test_under_pressure_every_row_says_the_same_and_the_oldest_stays(pressure: str, swap: int) -> None:
    kit = Kit(blocks=12, rows=6, swap=swap, pressure=pressure, prefix_cache=False)
    ids = [kit.submit(6, 30) for _ in range(6)]
    while kit.engine.busy:
        oldest = kit.engine.batch.running[:1]
        kit.step()
        assert all(row.state.value != "queued" for row in oldest)
    right(kit, *ids, prompt=6, count=30)
    s = kit.stats
    assert s.preempted == s.preemptions_by_cause["kv"] > 0
    if swap:
        assert s.offloads == s.preempted and s.soft_resets == 0
        assert s.recomputed_tokens == s.preempted_tokens == 0 and s.restored_tokens > 0, "nothing is computed again"
        assert s.swap_used_bytes == 0 and s.swap_bytes == 40 * CHUNK
    else:
        assert s.soft_resets == s.preempted and s.recomputed_tokens > 0 and s.offloads == 0


def test_each_policy_has_its_own_victims() -> None:
    gone = {}
    for pressure in POLICIES:
        kit = Kit(blocks=14, rows=3, pressure=pressure, prefix_cache=False)
        kit.submit(4, 40)
        kit.submit(4, 40)
        newest = kit.submit(20, 30)  # most computed, so the last to go by progress
        while not kit.stats.preempted:
            kit.step()
        gone[pressure] = {row.id for row in kit.engine.batch.queue}
        kit.run()
    assert gone == {"newest_stalled": {newest}, "least_progress": {newest - 1}}


def test_a_step_in_which_nothing_could_go_is_retried_at_once() -> None:
    """All rows come to the end of their blocks together: the very step that is short feeds a row."""
    kit = Kit(blocks=8, rows=4, prefix_cache=False)
    for _ in range(4):
        kit.submit(4, 20)
    while not kit.stats.preempted:
        steps = len(kit.runner.steps)
        kit.step()
    assert len(kit.runner.steps) == steps + 1 and kit.runner.steps[-1]
    kit.run()


def test_what_fits_the_swap_pool_goes_there_and_the_rest_is_computed_again() -> None:
    kit = Kit(blocks=16, rows=8, swap=3, prefix_cache=False)
    ids = [kit.submit(4, 24) for _ in range(8)]
    kit.run()
    right(kit, *ids, prompt=4, count=24)
    assert kit.stats.offloads > 0 and kit.stats.soft_resets > 0


def test_all_victims_of_a_step_go_in_one_transfer() -> None:
    kit = Kit(blocks=12, rows=6, swap=40, prefix_cache=False)
    for _ in range(6):
        kit.submit(4, 24)
    steps = 0
    while kit.engine.busy:
        before = len(kit.runner.swaps)
        kit.step()
        ways = [way for way, _ in kit.runner.swaps[before:]]
        assert len(ways) == len(set(ways)), "one copy each way and step"
        steps += 1
    assert max(n for _, n in kit.runner.swaps) > 1


def test_a_row_that_comes_back_decodes_in_that_step() -> None:
    kit = Kit(blocks=12, rows=4, swap=40, prefix_cache=False)
    for _ in range(4):
        kit.submit(4, 24)
    while not kit.stats.restored_tokens:
        prefilled, fed = kit.stats.step["prefill_tokens"], kit.stats.step["decode_rows"]
        kit.step()
    assert kit.stats.step["prefill_tokens"] == prefilled and kit.stats.step["decode_rows"] > fed


def test_an_offloaded_row_that_is_cancelled_leaves_the_swap_pool_empty() -> None:
    kit = Kit(blocks=12, rows=4, swap=40, prefix_cache=False)
    ids = [kit.submit(4, 30) for _ in range(4)]
    while not kit.stats.offloads:
        kit.step()
    assert kit.engine.batch.swap and kit.engine.batch.swap.held > 0
    kit.engine.handle([Cancel(id) for id in ids])
    assert kit.report().stats.swap_used_bytes == 0 and kit.engine.batch.swap.held == 0


def test_a_transfer_that_fails_costs_only_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(blocks=12, rows=4, swap=40, prefix_cache=False)
    ids = [kit.submit(4, 24) for _ in range(4)]

    def fail(pairs: object) -> None:
        raise OSError("no")

    kit.runner.swap_out = fail  # type: ignore[method-assign]
    kit.run()
    right(kit, *ids, prompt=4, count=24)
    assert kit.stats.recomputed_tokens > 0 and kit.stats.restored_tokens == 0


def test_prompts_that_were_preempted_half_way_go_on_where_they_were() -> None:
    kit = Kit(blocks=24, rows=3, swap=40, chunk=4, tokens=8, prefix_cache=False)
    a, b = kit.submit(10, 50), kit.submit(40, 8, lane=2)
    kit.step(5)
    high = kit.submit(36, 8, lane=0)
    kit.run()
    assert kit.stats.preemptions_by_cause["priority"] == kit.stats.offloads == 1
    assert kit.stats.recomputed_tokens == 0 and 0 < kit.stats.restored_tokens < 40
    right(kit, a, prompt=10, count=50)
    right(kit, b, prompt=40, count=8)
    right(kit, high, prompt=36, count=8)


# ---------------------------------------------------------------- lanes, slots, memory for a higher lane

def test_a_higher_lane_is_taken_first_and_order_of_arrival_holds_within_one() -> None:
    kit = Kit(rows=1)
    kit.submit(4, 4)
    kit.step()
    low, normal, high, high2 = (kit.submit(4, 2, lane=lane) for lane in (2, 1, 0, 0))
    kit.run()
    assert [id for id, _ in kit.order[1:]] == [high, high2, normal, low]


@pytest.mark.parametrize(("waited", "first"), [(PROMOTE_AFTER - 1, "new"), (PROMOTE_AFTER + 1, "old")])
def test_a_row_rises_one_lane_for_each_half_minute(waited: float, first: str) -> None:
    kit = Kit(rows=1)
    kit.submit(4, 4)
    kit.step()
    old = kit.submit(4, 2, lane=2)
    kit.clock.now += waited
    new = kit.submit(4, 2, lane=1)
    kit.run()
    assert kit.order[1] == ((old if first == "old" else new), 0)
    assert kit.stats.promoted == (first == "old")


@pytest.mark.parametrize(("policy", "victim"), [("longest-first", 0), ("lowest-priority", 1), (None, None)])
def test_a_slot_is_freed_for_a_strictly_higher_lane_where_switched_on(policy: str | None, victim: int | None) -> None:
    kit = Kit(rows=2, slot_victims=policy)
    ids = [kit.submit(4, 30, lane=1)]
    kit.step(3)
    ids.append(kit.submit(4, 30, lane=2))
    kit.step(2)
    equal = kit.submit(4, 2, lane=2)
    kit.step()
    assert kit.stats.preempted == 0, "never for an equal or a lower lane"
    high = kit.submit(4, 2, lane=0)
    kit.step()
    assert ((high, 0) in kit.cached) == (victim is not None)
    waits = {row.id for row in kit.engine.batch.queue}
    assert waits - {equal, high} == (set() if victim is None else {ids[victim]})
    assert kit.stats.preemptions_by_cause["slots"] == (victim is not None)
    kit.run()
    right(kit, *ids, prompt=4, count=30)


def test_memory_is_freed_for_a_strictly_higher_lane_after_cold_prefixes_and_the_oldest_stays() -> None:
    kit = Kit(blocks=20, rows=8)
    cold = kit.submit(16, 1)
    kit.run()
    oldest, low = kit.submit(20, 20, lane=2), kit.submit(20, 20, lane=2)
    kit.step(2)
    fits = kit.submit(20, 4, lane=0)
    kit.step()
    assert (fits, 0) in kit.cached and kit.stats.preempted == 0 and kit.stats.prefix_evictions > 0, "cold prefixes first"
    equal = kit.submit(24, 4, lane=2)
    kit.step()
    assert kit.stats.preempted == 0
    high = kit.submit(24, 4, lane=0)
    kit.step()
    assert (high, 0) in kit.cached and kit.stats.preemptions_by_cause["priority"] == 1
    assert {row.id for row in kit.engine.batch.queue} == {low, equal}
    kit.run()
    right(kit, oldest, low, prompt=20, count=20)
    assert kit.reason(cold) == "length"


def test_nobody_leaves_for_a_head_that_would_not_fit_even_then() -> None:
    kit = Kit(blocks=20, rows=8, prefix_cache=False)
    kit.submit(48, 20, lane=2)
    kit.submit(8, 20, lane=2)
    kit.step(2)
    kit.submit(48, 4, lane=0)
    kit.step(3)
    assert kit.stats.preempted == 0 and kit.stats.bound == "kv"


def test_rows_of_equal_lanes_never_take_turns() -> None:
    """mlxcel had 1,600 preemptions of one-token rows that drove each other out."""
    kit = Kit(blocks=16, rows=4, slot_victims="longest-first", prefix_cache=False)
    for _ in range(8):
        kit.submit(20, 6, lane=0)
    kit.run()
    assert kit.stats.preemptions_by_cause["slots"] == kit.stats.preemptions_by_cause["priority"] == 0


def test_a_head_that_does_not_fit_is_passed_by_eight_and_no_more() -> None:
    kit = Kit(blocks=40, rows=30, prefix_cache=False)
    runs = kit.submit(100, 60)
    kit.step(3)
    big = kit.submit(60, 4)
    small = [kit.submit(3, 1) for _ in range(12)]
    while (big, 0) not in kit.cached:
        assert kit.stats.bound in (None, "kv")
        kit.step()
    before = [id for id, _ in kit.order if id in small and kit.order.index((id, 0)) < kit.order.index((big, 0))]
    assert len(before) == 8 == kit.stats.bypassed and kit.reason(runs) == "length"
    kit.run()
    assert len(kit.ended) == 14


def test_a_spent_row_at_the_head_does_not_hold_up_the_queue() -> None:
    kit = Kit(blocks=16, rows=3, prefix_cache=False)
    for budget in (50, 40, 40):
        kit.submit(6, budget)
    while not any(row.credits == 0 for row in kit.engine.batch.queue):
        kit.step()
    small = kit.submit(3, 1)
    for _ in range(8):
        kit.step()
    assert kit.reason(small) == "length" and kit.stats.bypassed > 0
    kit.run()


# ---------------------------------------------------------------- deadlines

@pytest.mark.parametrize("rows", [1, 2])
def test_a_deadline_ends_a_request_queued_or_running(rows: int) -> None:
    kit = Kit(rows=rows)
    other = kit.submit(5, 60)
    late = kit.submit(5, 60, n=2, deadline=kit.clock.now + 5)
    kit.step(4)
    assert ((late, 0) in kit.cached) == (rows == 2)
    kit.clock.now += 5
    kit.step()
    assert [(kit.reason(late, i), kit.ended[late, i].message) for i in (0, 1)] == [("cancelled", DEADLINE_EXCEEDED)] * 2
    assert kit.stats.deadlines_exceeded == 1 and kit.engine.batch.waiting == 0
    kit.run()
    right(kit, other, prompt=5, count=60)


def test_a_request_that_ends_in_time_leaves_its_deadline_without_effect() -> None:
    kit = Kit()
    a = kit.submit(5, 3, deadline=kit.clock.now + 5)
    kit.run()
    kit.clock.now += 10
    kit.submit(5, 3)
    kit.run()
    assert kit.reason(a) == "length" and kit.stats.deadlines_exceeded == 0


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    kit = Kit()
    for _ in range(300):
        kit.submit(3, 1, deadline=kit.clock.now + 1000)
        kit.run()
    assert len(kit.engine._deadlines) <= MANY + 2
    late = kit.submit(3, 100, deadline=kit.clock.now + 5)
    kit.clock.now += 5
    kit.step()
    assert kit.ended[late, 0].message == DEADLINE_EXCEEDED


def test_a_deadline_that_is_past_at_submission_ends_it_at_once() -> None:
    kit = Kit()
    a = kit.submit(5, 3, deadline=kit.clock.now - 1)
    assert kit.ended[a, 0].message == DEADLINE_EXCEEDED and not kit.engine.busy


# ---------------------------------------------------------------- choices, prompts, logprobs of prompts

def test_rows_behind_their_sibling_hold_up_nobody() -> None:
    kit = Kit(rows=8)
    wide, other = kit.submit(40, 4, n=6), kit.submit(3, 4)
    assert kit.engine.batch.behind == 5 and kit.stats.waiting == 7
    kit.step()
    assert [len(row.tokens) for row in kit.runner.steps[0]] == [40, 3]
    kit.run()
    assert kit.order[:2] == [(wide, 0), (other, 0)]
    assert [kit.said[wide, i] for i in range(6)] == [expected(wide, i, 40, 4) for i in range(6)]
    assert [kit.cached[wide, i] for i in range(1, 6)] == [39 // SIZE * SIZE] * 5 or kit.runner.copies


def test_when_the_first_choice_is_stopped_before_its_prompt_is_computed_the_next_one_leads() -> None:
    kit = Kit(rows=8, chunk=4)
    a = kit.submit(40, 4, n=3)
    kit.step(2)
    row = kit.engine.requests[a][0]
    kit.engine.release(row, "cancelled")
    kit.run()
    assert [kit.reason(a, i) for i in range(3)] == ["cancelled", "length", "length"]
    assert kit.said[a, 2] == expected(a, 2, 40, 4)


@pytest.mark.parametrize(("prompts", "padded", "sizes"), [
    (4, None, [4, 4, 2]), (2, None, [2, 2, 2, 2, 2]), (4, 0, [1] * 10), (9, 18, [3, 3, 3, 1]),
])  # fmt: skip
def test_batched_prefill_keeps_its_count_and_its_padded_cap(prompts: int, padded: int | None, sizes: list[int]) -> None:
    kit = Kit(rows=10, tokens=200, prompts=prompts, padded=padded)
    for _ in range(10):
        kit.submit(6, 40)
    seen = []
    while len(kit.cached) < 10:
        kit.step()
        seen.append(sum(len(row.tokens) > 1 for row in kit.runner.steps[-1]))
    assert seen == sizes and kit.stats.batched_prefills == sum(n > 1 for n in sizes)


def test_a_grant_is_counted() -> None:
    kit = Kit(rows=6, tokens=4, grant=2, chunk=4)
    for _ in range(3):
        kit.submit(3, 30)
    kit.step(8)
    late = kit.submit(8, 2)
    kit.run()
    assert kit.stats.prefill_grants > 0 and kit.reason(late) == "length"


def test_prefill_first_feeds_prompts_before_decodes_and_with_the_large_chunk() -> None:
    fed = {}
    for first in (False, True):
        kit = Kit(rows=4, tokens=40, blocks=200, prefill_first=first)
        kit.submit(4, 30)
        kit.step(2)
        kit.submit(100, 4)
        kit.step(3)
        fed[first] = [[len(row.tokens) for row in step] for step in kit.runner.steps[2:5]]
        kit.run()
    assert fed[False] == [[1, 39], [1, 39], [1, 22]]
    assert fed[True] == [[1, 39], [40], [21, 1]] or fed[True] == [[1, 39], [40], [1, 21]]


def test_logprobs_of_the_prompt_come_once_in_order_and_bypass_what_is_cached() -> None:
    kit = Kit(blocks=14, rows=3, chunk=5)
    kit.submit(list(range(20, 33)), 4)
    kit.run()
    a = kit.submit(list(range(20, 33)), 20, prompt_logprobs=2, n=2)
    b = kit.submit(list(range(20, 33)), 20)
    kit.run()
    assert kit.cached[a, 0] == kit.cached[a, 1] == 0 and kit.cached[b, 0] == 12
    for choice in (0, 1):
        assert [entry.logprob for entry in kit.told[a, choice]] == [-float(i) for i in range(1, 13)]
        assert kit.said[a, choice] == expected(a, choice, 13, 20)
    assert kit.stats.preempted > 0, "a row that is computed again tells nothing twice"


def test_a_prompt_that_is_computed_anew_from_half_way_tells_only_what_it_had_not() -> None:
    kit = Kit(blocks=24, rows=3, chunk=4, tokens=8, prefix_cache=False)
    kit.submit(10, 50)
    a = kit.submit(40, 4, lane=2, prompt_logprobs=0)
    kit.step(6)
    assert 0 < len(kit.told[a, 0]) < 39
    kit.submit(36, 8, lane=0)
    kit.run()
    assert kit.stats.preemptions_by_cause["priority"] == 1 and kit.stats.recomputed_tokens > 0
    assert [entry.logprob for entry in kit.told[a, 0]] == [-float(i) for i in range(1, 40)]


def test_a_forward_that_leaves_out_prompt_logprobs_ends_the_row() -> None:
    kit = Kit()
    kit.runner.spoil = lambda results: [setattr(r, "prompt_logprobs", None) or r for r in results]
    a = kit.submit(9, 3, prompt_logprobs=0)
    kit.run()
    assert kit.reason(a) == "error"


# ---------------------------------------------------------------- attention types

TYPES = {
    "sliding": ({RING: 1}, 9), "hybrid": (HYBRID, 9), "hybrid of 2 and 3": ({"full_attention": 3, RING: 2}, 6),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("swap", [0, 60])
def test_rings_hold_the_window_through_chunks_wraps_forks_and_pressure(name: str, swap: int) -> None:
    per_chunk, window = TYPES[name]
    kit = Kit(
        per_chunk=per_chunk, window=window, blocks=24, rows=6, chunk=11, swap=swap, context=160, slot_victims="longest-first"
    )
    ids = [kit.submit(30 + i, 50, n=1 + i % 2, lane=2 - i % 3) for i in range(8)]
    kit.step(20)
    ids.append(kit.submit(40, 20, lane=0))
    kit.run()
    for i, id in enumerate(ids[:8]):
        for choice in range(1 + i % 2):
            assert kit.said[id, choice] == expected(id, choice, 30 + i, 50)
    s = kit.stats
    assert s.preempted > 0 and (s.restored_tokens if swap else s.recomputed_tokens) > 0
    assert any(row.start > 4 * len(row.ring) for step in kit.runner.steps for row in step), "no ring was written twice"
    assert kit.runner.copies, "no ring was forked"
    assert kit.engine.batch.cache.held == 0 and s.prefix_queries == 0


@pytest.mark.parametrize("late", [0, 40])
def test_a_fork_copies_the_ring_only_while_it_holds_all_that_it_needs(late: int) -> None:
    kit = Kit(per_chunk={RING: 1}, window=9, rows=2, chunk=7, blocks=60)
    a = kit.submit(33, 60, n=2)
    kit.step(2)
    if late:
        kit.knob(max_batch_size=1)
        kit.step(late)
        kit.knob(max_batch_size=2)
    kit.run()
    assert kit.cached[a, 1] == (0 if late else 32) and bool(kit.runner.copies) is not bool(late)
    assert kit.said[a, 1] == expected(a, 1, 33, 60)


def test_a_hybrid_takes_all_its_blocks_or_none_and_strands_bytes() -> None:
    kit = Kit(per_chunk=HYBRID, window=9, blocks=10, rows=4, chunk=7, context=120)
    a = kit.submit(8, 30)
    kit.step(2)
    cache = kit.engine.batch.cache
    assert (cache.full.used, cache.ring.used, cache.held) == (3, 4, 1 + 4)
    assert kit.report().stats.kv_stranded_bytes == 2 * CHUNK // 5
    b = kit.submit(16, 30)  # full blocks fit those begun, its ring of four does not fit five less the margin
    kit.knob(admission_watermark=0.2)
    kit.step()
    assert (b, 0) not in kit.cached and kit.stats.bound == "kv" and (cache.full.used, cache.ring.used) == (3, 4)
    kit.run()
    right(kit, a, prompt=8, count=30)
    right(kit, b, prompt=16, count=30)


def test_a_hybrid_row_that_could_be_scattered_too_wide_is_refused_with_both_numbers() -> None:
    kit = Kit(per_chunk=HYBRID, window=9, blocks=8, chunk=7, context=190)
    fits, wide = kit.submit(40, 41), kit.submit(40, 42)
    assert (fits, 0) not in kit.ended
    assert "82 tokens" in kit.ended[wide, 0].message and "80 tokens" in kit.ended[wide, 0].message


# ---------------------------------------------------------------- wanted prefixes

def test_what_a_waiting_row_has_matched_is_evicted_last_and_then_it_prefills_cold() -> None:
    kit = Kit(blocks=20, rows=2)
    shared = list(range(300, 320))
    for prompt in (shared, list(range(400, 424))):  # the wanted one is the older
        kit.submit(prompt, 1)
        kit.run()
    runs = kit.submit(12, 60)
    kit.step(20)
    waits = kit.submit([*shared, *range(500, 530)], 8)
    kit.step()
    assert kit.stats.bound == "kv" and kit.stats.waiting == 1
    while kit.engine.batch.cache.cached > 5:
        assert kit.report().stats.adopted_evictions == 0
        kit.step()
    assert kit.engine.batch.queue.head(0).matched
    while not kit.stats.adopted_evictions:
        kit.step()
    kit.run()
    assert kit.cached[waits, 0] < 20 and kit.said[runs, 0] == expected(runs, 0, 12, 60)
    assert kit.said[waits, 0] == expected(waits, 0, 50, 8)


def test_messages_of_lanes_beyond_the_range_are_taken_as_the_nearest() -> None:
    kit = Kit()
    a, b = kit.submit(4, 2, lane=9), kit.submit(4, 2, lane=-3)
    assert [row.lane for rows in kit.engine.requests.values() for row in rows] == [2, 0]
    kit.run()
    assert kit.reason(a) == kit.reason(b) == "length"
