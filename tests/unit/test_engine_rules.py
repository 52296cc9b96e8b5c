"""Each rule of the engine by name, on the real engine with the audit runner."""

from __future__ import annotations

import pytest
from engine_kit import CHUNK, SIZE, VOCAB, Kit, expected

from weir_server.exec.interface import RowResult
from weir_server.link.messages import KV_BUDGET_EXCEEDED, Boot, Cancel, Drain, Quit, SetKnobs, Stop

PROMPT = list(range(20, 33))  # 13 tokens: three full blocks and a tail


def test_a_request_says_what_its_seed_says_and_ends_once() -> None:
    kit = Kit()
    a = kit.submit(13, max_tokens=9)
    kit.run()
    assert kit.said[a, 0] == expected(a, 0, 13, 9)
    assert (kit.reason(a), kit.ended[a, 0].generated) == ("length", 9)
    assert kit.stats.running == kit.stats.waiting == kit.stats.kv_used_bytes == 0


def test_end_of_sequence_ids_end_a_row_but_not_before_min_tokens() -> None:
    kit = Kit()
    third = expected(5, 0, 4, 3)[2]
    a = kit.submit(4, 20, seed=5, stop_ids=(third,))
    b = kit.submit(4, 20, seed=5, stop_ids=(third,), min_tokens=4)
    kit.run()
    assert (kit.reason(a), kit.ended[a, 0].generated) == ("stop", 3)
    assert (kit.reason(b), kit.ended[b, 0].generated) == ("length", 20)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [([], "Empty prompt"), (200, "200 tokens"), ([3, VOCAB], "vocabulary"), ([-1], "vocabulary")],
)
def test_a_prompt_that_can_never_run_ends_at_once_with_a_sentence(prompt: int | list[int], word: str) -> None:
    kit = Kit(context=200)
    a = kit.submit(prompt)
    assert kit.reason(a) == "error" and word in kit.ended[a, 0].message
    assert not kit.engine.busy


def test_a_prompt_that_leaves_one_token_of_context_gets_one_token() -> None:
    kit = Kit(context=40)
    a = kit.submit(39, max_tokens=100)
    kit.run()
    assert (kit.reason(a), kit.said[a, 0]) == ("length", expected(a, 0, 39, 1))


def test_a_row_longer_than_the_whole_pool_ends_with_both_numbers() -> None:
    kit = Kit(blocks=5, context=200)
    a = kit.submit(10, max_tokens=100)
    assert "110 tokens" in kit.ended[a, 0].message and f"{5 * SIZE} tokens" in kit.ended[a, 0].message


def test_no_tokens_asked_for_is_an_answer_of_none() -> None:
    kit = Kit()
    a = kit.submit(4, max_tokens=0)
    assert (kit.reason(a), kit.ended[a, 0].generated) == ("length", 0)


# ---------------------------------------------------------------- prefixes and choices

def test_a_cached_prefix_is_not_computed_again_and_never_the_whole_prompt() -> None:
    kit = Kit()
    a = kit.submit(PROMPT[:12], 4)
    kit.run()
    b = kit.submit(PROMPT[:12], 4)
    kit.run()
    assert (kit.cached[a, 0], kit.cached[b, 0]) == (0, 8)  # the third block would leave nothing to compute
    assert (kit.stats.prefix_queries, kit.stats.prefix_hits) == (24, 8)


def test_two_identical_prompts_in_one_step_compute_both_and_then_hold_their_blocks_once() -> None:
    kit = Kit()
    a, b = kit.submit(PROMPT, 6), kit.submit(PROMPT, 6)
    kit.step()
    assert [len(step) for step in kit.runner.steps] == [2]
    assert kit.cached[a, 0] == kit.cached[b, 0] == 0, "nothing is published before the forward"
    assert kit.engine.batch.cache.held == 3 + 1 + 1
    kit.run()
    assert kit.said[a, 0] == expected(a, 0, 13, 6) and kit.said[b, 0] == expected(b, 0, 13, 6)


def test_cache_prompt_false_neither_reads_nor_writes() -> None:
    kit = Kit()
    kit.submit(PROMPT, 2, cache_prompt=False)
    kit.run()
    b = kit.submit(PROMPT, 2)
    kit.run()
    c = kit.submit(PROMPT, 2, cache_prompt=False)
    kit.run()
    assert kit.cached[b, 0] == kit.cached[c, 0] == 0 and kit.stats.prefix_queries == 13


def test_a_salt_keeps_caches_apart() -> None:
    kit = Kit()
    kit.submit(PROMPT, 2, cache_salt="a")
    kit.run()
    b, c = kit.submit(PROMPT, 2, cache_salt="b"), kit.submit(PROMPT, 2, cache_salt="a")
    kit.run()
    assert (kit.cached[b, 0], kit.cached[c, 0]) == (0, 12)


def test_choices_share_the_prompt_and_copy_its_tail() -> None:
    kit = Kit(rows=4)
    a = kit.submit(PROMPT, 6, n=4)
    kit.step()
    assert len(kit.runner.steps[0]) == 1, "the others wait for the first one's prefill"
    assert kit.stats.bound == "prefill"
    kit.step()
    assert [len(row.tokens) for row in kit.runner.steps[1]] == [1, 1, 1, 1]
    assert kit.engine.batch.cache.held == 3 + 4
    kit.run()
    for choice in range(4):
        assert kit.said[a, choice] == expected(a, choice, 13, 6)
    assert [kit.cached[a, i] for i in range(4)] == [0, 12, 12, 12]


def test_choices_copy_a_partial_tail_that_is_more_than_the_last_token() -> None:
    kit = Kit(rows=4)
    a = kit.submit([*PROMPT, 99], 6, n=3)
    kit.run()
    assert len(kit.runner.copies) == 2
    assert [kit.cached[a, i] for i in range(3)] == [0, 13, 13]
    for choice in range(3):
        assert kit.said[a, choice] == expected(a, choice, 14, 6)


def test_choices_without_the_prefix_cache_still_share() -> None:
    kit = Kit(rows=4, prefix_cache=False)
    a = kit.submit(PROMPT, 6, n=4)
    kit.run()
    assert kit.cached[a, 3] == 12 and kit.said[a, 3] == expected(a, 3, 13, 6)


def test_more_choices_than_slots_take_turns() -> None:
    kit = Kit(rows=2)
    a = kit.submit(PROMPT, 6, n=5)
    kit.run()
    assert [kit.said[a, i] for i in range(5)] == [expected(a, i, 13, 6) for i in range(5)]
    assert len(kit.ended) == 5


def test_an_error_in_the_first_choice_leaves_the_others_to_prefill_for_themselves() -> None:
    kit = Kit()
    kit.runner.spoil = lambda results: [RowResult(error="nan")]
    a = kit.submit(PROMPT, 3, n=3)
    kit.step()
    kit.runner.spoil = lambda results: results
    kit.run()
    assert [kit.reason(a, i) for i in range(3)] == ["error", "length", "length"]
    assert kit.said[a, 2] == expected(a, 2, 13, 3)


# ---------------------------------------------------------------- cancelling, stopping, failing

@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        (0, {"queued"}), (1, {"prefilling", "queued"}), (2, {"decoding", "prefilling", "queued"}), (5, {"decoding", "queued"}),
    ],
)
def test_cancel_in_every_state_frees_all_and_reports_without_a_step(steps: int, seen: set[str]) -> None:
    kit = Kit(rows=2, chunk=8)
    ids = [kit.submit(13, 20) for _ in range(4)]
    kit.step(steps)
    states = {row.state.value for rows in kit.engine.requests.values() for row in rows}
    assert states == seen
    kit.engine.handle([Cancel(id) for id in ids])
    report = kit.report()
    assert [kit.reason(id) for id in ids] == ["cancelled"] * 4
    s = report.stats
    assert (s.running, s.waiting, s.kv_used_bytes, s.oldest_arrival, s.bound) == (0, 0, 0, None, None)


def test_a_cancel_during_the_forward_comes_before_its_output() -> None:
    kit = Kit()
    a, b = kit.submit(5, 9), kit.submit(5, 9)
    kit.step(2)
    kit.engine.step(lambda: [Cancel(a)])
    kit.report()
    assert kit.reason(a) == "cancelled" and len(kit.said[a, 0]) == 2
    kit.run()
    assert kit.said[b, 0] == expected(b, 0, 5, 9)


def test_stop_counts_to_the_token_that_completed_it_and_drops_the_rest() -> None:
    kit = Kit()
    a = kit.submit(5, 30)
    kit.step(6)
    kit.engine.handle([Stop(a, 0, 4)])
    kit.report()
    assert (kit.reason(a), kit.ended[a, 0].generated) == ("stop", 4)


def test_when_the_head_of_the_queue_leaves_nothing_is_said_of_what_the_next_one_waits_for() -> None:
    kit = Kit(rows=1)
    kit.submit(10, 50)
    head, second = kit.submit(10), kit.submit(10)
    kit.step()
    assert kit.stats.bound == "slots"
    kit.engine.handle([Cancel(second)])
    assert kit.stats.bound == "slots", "the head still waits for the same"
    kit.engine.handle([Cancel(head)])
    kit.submit(10)
    assert kit.stats.waiting == 1 and kit.stats.bound is None
    kit.step()
    assert kit.stats.bound == "slots"


def test_messages_out_of_order_and_unknown_ids_are_no_error() -> None:
    kit = Kit()
    a = kit.submit(5, 3)
    kit.engine.handle([Cancel(99), Stop(99, 0, 1), Stop(a, 7, 1), Boot(model="x", threads=1), Quit()])
    kit.run()
    kit.engine.handle([Cancel(a), Stop(a, 0, 2)])
    kit.report()
    assert kit.reason(a) == "length"


def test_one_rows_error_ends_that_row_alone() -> None:
    kit = Kit()
    a, b = kit.submit(5, 6), kit.submit(5, 6)
    kit.step(2)
    kit.runner.spoil = lambda results: [RowResult(error="NaN in the logits"), results[1]]
    kit.step()
    kit.runner.spoil = lambda results: results
    kit.run()
    assert (kit.reason(a), kit.ended[a, 0].message) == ("error", "inference backend error")
    assert (kit.reason(b), kit.said[b, 0]) == ("length", expected(b, 0, 5, 6))


def test_a_step_that_fails_whole_ends_its_rows_and_the_engine_goes_on() -> None:
    def explode(results: list[RowResult]) -> list[RowResult]:
        raise MemoryError("no")

    kit = Kit(rows=2)
    ids = [kit.submit(5, 6) for _ in range(3)]
    kit.runner.spoil = explode
    kit.step()
    kit.runner.spoil = lambda results: results
    kit.run()
    assert [kit.reason(id) for id in ids] == ["error", "error", "length"]
    assert kit.said[ids[2], 0] == expected(ids[2], 0, 5, 6)


# ---------------------------------------------------------------- pressure and knobs

def test_rows_that_outgrow_the_budget_are_preempted_and_say_the_same() -> None:
    kit = Kit(blocks=12, rows=4)
    ids = [kit.submit(8, 20) for _ in range(4)]
    kit.run()
    assert kit.stats.preempted > 0 and kit.stats.recomputed_tokens > 0 and kit.stats.recompute_seconds > 0
    for id in ids:
        assert kit.said[id, 0] == expected(id, 0, 8, 20)


def test_the_oldest_is_never_preempted() -> None:
    kit = Kit(blocks=10, rows=8)
    ids = [kit.submit(6, 30) for _ in range(6)]
    while kit.engine.busy:
        oldest = kit.engine.batch.running[:1]
        kit.step()
        for row in oldest:
            assert row.state.value in ("decoding", "prefilling", "finished")
    assert all(kit.said[id, 0] == expected(id, 0, 6, 30) for id in ids)


def test_a_preempted_row_keeps_its_place_before_those_that_came_later() -> None:
    kit = Kit(blocks=12, rows=3)
    ids = [kit.submit(8, 24) for _ in range(3)]
    while not kit.stats.preempted:
        kit.step()
    late = kit.submit(4, 4)
    waits = [row.id for row in kit.engine.batch.queue]
    assert waits[-1] == late and waits[0] in ids
    kit.run()
    assert kit.order[-1] == (late, 0)


def test_cold_prefixes_go_before_anybody_is_preempted() -> None:
    kit = Kit(blocks=12, rows=2)
    kit.submit(30, 2)
    kit.run()
    assert kit.engine.batch.cache.cached >= 7
    a, b = kit.submit(8, 14), kit.submit(8, 14)
    kit.run()
    assert kit.stats.preempted == 0 and kit.stats.prefix_evictions > 0
    assert kit.said[a, 0] == expected(a, 0, 8, 14) and kit.said[b, 0] == expected(b, 0, 8, 14)


def test_a_lowered_batch_drains_and_nobody_joins_until_below_it() -> None:
    kit = Kit(rows=4)
    first = [kit.submit(5, 10 + 5 * i) for i in range(4)]
    kit.step(2)
    late = kit.submit(5, 3)
    kit.knob(max_batch_size=2)
    kit.step()
    assert kit.engine.effective.max_batch_size == 4 and kit.stats.bound == "drain"
    while kit.engine.batch.running and len(kit.engine.batch.running) > 2:
        assert (late, 0) not in kit.cached
        kit.step()
    assert kit.engine.effective.max_batch_size == 2 and kit.stats.preempted == 0
    kit.step()
    assert kit.stats.bound == "slots"
    kit.run()
    assert all(kit.reason(id) == "length" for id in [*first, late])


def test_a_lowered_budget_lets_runners_finish_above_it_and_gives_memory_back() -> None:
    kit = Kit(blocks=50, rows=4)
    ids = [kit.submit(30, 12) for _ in range(4)]
    kit.step(2)
    used = kit.engine.batch.cache.held
    kit.knob(kv_cache_budget=12 * CHUNK + CHUNK // 2)
    assert kit.engine.batch.cache.held == used and kit.engine.effective.kv_cache_budget == 50 * CHUNK
    kit.run()
    assert all(kit.said[id, 0] == expected(id, 0, 30, 12) for id in ids) and kit.stats.preempted == 0
    pool = kit.engine.batch.cache.pool
    assert kit.engine.effective.kv_cache_budget == 12 * CHUNK, "whole chunks, rounded down"
    assert pool.resident <= 12 and len(set(kit.runner.released)) >= used - 12


def test_a_lowered_budget_evicts_cold_prefixes_at_once() -> None:
    kit = Kit(blocks=40)
    kit.submit(60, 2)
    kit.run()
    assert kit.engine.batch.cache.cached == 15
    kit.knob(kv_cache_budget=5 * CHUNK)
    assert kit.engine.batch.cache.cached == 5 and len(kit.runner.released) == 11


def test_queued_rows_that_the_lowered_budget_cannot_hold_are_handed_back() -> None:
    kit = Kit(blocks=40, rows=1)
    runs = kit.submit(8, 30)
    kit.step(2)
    big, small = kit.submit(60, 4), kit.submit(8, 4)
    kit.knob(kv_cache_budget=10 * CHUNK)
    assert kit.reason(big) == "handed_back" and kit.ended[big, 0].message.startswith(KV_BUDGET_EXCEEDED)
    assert f"{10 * CHUNK} bytes" in kit.ended[big, 0].message and f"{16 * CHUNK} bytes" in kit.ended[big, 0].message
    later = kit.submit(60, 4)
    assert kit.reason(later) == "handed_back"
    kit.run()
    assert kit.reason(runs) == kit.reason(small) == "length"


def test_a_lone_runner_outgrows_a_lowered_budget() -> None:
    kit = Kit(blocks=40)
    a = kit.submit(8, 100)
    kit.step(3)
    kit.knob(kv_cache_budget=6 * CHUNK)
    b = kit.submit(8, 4)
    kit.run()
    assert kit.said[a, 0] == expected(a, 0, 8, 100) and kit.said[b, 0] == expected(b, 0, 8, 4)


def test_a_preempted_row_that_no_longer_fits_the_budget_runs_alone() -> None:
    kit = Kit(blocks=20, rows=2)
    a, b = kit.submit(8, 60), kit.submit(8, 60)
    while not kit.stats.preempted:
        kit.step()
    kit.knob(kv_cache_budget=4 * CHUNK)
    assert b not in {id for id, _ in kit.ended}
    kit.run()
    assert kit.said[a, 0] == expected(a, 0, 8, 60) and kit.said[b, 0] == expected(b, 0, 8, 60)


def test_a_row_whose_credit_is_spent_comes_back_only_with_room_for_its_rest() -> None:
    kit = Kit(blocks=16, rows=3, prefix_cache=False)
    ids = [kit.submit(6, 50), kit.submit(6, 40), kit.submit(6, 40)]
    seen: dict[int, int] = {}
    while kit.engine.busy:
        state, offers = kit.engine.batch.view(kit.clock.now, kit.knobs, kit.engine.config.limits, 0)
        needs = [waiting.need.full for waiting in state.waiting]
        for need, offer in zip(needs, offers, strict=True):
            row = offer.row
            seen[row.credits] = need - -(-(row.final - 1) // SIZE)
        kit.step()
    assert seen[1] < 0 and seen[0] == 0, "with credit: less than its whole length; without: all of it"
    assert [len(kit.said[id, 0]) for id in ids] == [50, 40, 40]


# ---------------------------------------------------------------- draining

def test_a_drain_serves_the_queue_until_its_deadline() -> None:
    kit = Kit(rows=1)
    ids = [kit.submit(5, 4) for _ in range(3)]
    kit.engine.handle([Drain(kit.clock.now + 1000)])
    kit.run()
    assert [kit.reason(id) for id in ids] == ["length"] * 3


def test_at_its_deadline_the_queue_is_handed_back_and_runners_end() -> None:
    kit = Kit(rows=1)
    a, b = kit.submit(5, 100), kit.submit(5, 4)
    kit.step(3)
    kit.engine.handle([Drain(kit.clock.now + 10)])
    kit.step()
    kit.clock.now += 10
    kit.step()
    assert (kit.reason(a), kit.reason(b)) == ("cancelled", "handed_back")
    assert "shutting down" in kit.ended[a, 0].message and "shutting down" in kit.ended[b, 0].message
    c = kit.submit(5, 4)
    assert kit.reason(c) == "handed_back"
    assert not kit.engine.busy and kit.engine.batch.cache.held == 0


# ---------------------------------------------------------------- prefill

def test_prompts_are_prefilled_in_chunks_beside_decodes() -> None:
    kit = Kit(tokens=64, chunk=8, blocks=64)
    a = kit.submit(5, 30)
    kit.step(2)
    b = kit.submit(30, 4)
    kit.step(4)
    mixed = [[len(row.tokens) for row in step] for step in kit.runner.steps[2:6]]
    assert mixed == [[1, 8], [1, 8], [1, 8], [1, 6]]
    kit.run()
    assert kit.said[a, 0] == expected(a, 0, 5, 30) and kit.said[b, 0] == expected(b, 0, 30, 4)


def test_a_raised_batch_takes_effect_in_the_next_step() -> None:
    kit = Kit(rows=1)
    for _ in range(3):
        kit.submit(5, 50)
    kit.step()
    kit.engine.handle([SetKnobs(kit.knobs.merged({"max_batch_size": 3}))])
    kit.step()
    assert len(kit.engine.batch.running) == 3
