"""Refusals, their counts and bounds, and what happens when a part of the HTTP side itself fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_kit import CHAT, COMPLETION, PATIENCE, Kit, serving
from prometheus_client.parser import text_string_to_metric_families

from weir_server.contract import BUSY_BODY
from weir_server.engine.rows import Row
from weir_server.http import lifecycle, service
from weir_server.http.engine_client import EngineClient
from weir_server.link.messages import Sampling, Stats, Submit
from weir_server.model.files import ModelError

RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    async with serving() as k:
        yield k


# ------------------------------------------------------------------------------------------------ the cost of a refusal

@pytest.mark.parametrize("body", [{"prompt": ["a"] * 5000}, {"prompt": "a", "n": 65}, {"prompt": [[5]] * 33, "n": 2}])
async def test_too_many_rows_are_refused_before_any_is_tokenised(kit: Kit, monkeypatch: pytest.MonkeyPatch, body: Any):
    monkeypatch.setattr("weir_server.http.ask.encode", None)
    status, answer, _ = await kit.post(COMPLETION, body)
    assert status == 400 and "at most 64 rows" in answer["error"]["message"]


async def test_a_list_of_ids_is_refused_by_its_length_before_each_id_is_looked_at(kit: Kit, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weir_server.http.ask.check_ids", None)
    status, answer, _ = await kit.post(COMPLETION, {"prompt": [1] * 100_000})
    assert status == 400 and answer["error"]["code"] == "context_length"


async def test_a_long_list_of_biases_is_refused(kit: Kit):
    status, answer, _ = await kit.post(COMPLETION, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}})
    assert status == 400 and answer["error"]["param"] == "logit_bias"
    most = {str(i): 1 for i in range(1024)}
    assert (await kit.post(COMPLETION, {"prompt": "a", "logit_bias": most, "max_tokens": 1}))[0] == 200


async def test_messages_are_rendered_off_the_loop_when_the_body_is_long_though_they_say_nothing(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
):
    threads = []
    monkeypatch.setattr(kit.service.model.template, "render", lambda _: threads.append(threading.current_thread()) or "x")
    for count in (3, 1000):
        assert (await kit.post(CHAT, {"messages": [{"role": "user"}] * count, "max_tokens": 1}))[0] == 200
    assert threads[0] is threading.main_thread() and threads[1] is not threading.main_thread()
    status, answer, _ = await kit.post(CHAT, {"messages": [{"role": "user"}] * 1025})
    assert status == 400 and answer["error"]["param"] == "messages" and len(threads) == 2


async def test_several_short_texts_that_are_long_together_are_tokenised_off_the_loop(kit: Kit, monkeypatch: pytest.MonkeyPatch):
    sizes = []
    off_loop = kit.service.off_loop
    monkeypatch.setattr(kit.service, "off_loop", lambda size, work: sizes.append(size) or off_loop(size, work))
    assert (await kit.post(COMPLETION, {"prompt": ["b" * 500] * 20, "max_tokens": 1}))[0] == 200
    assert sizes == [10_000]


async def test_texts_that_wait_for_a_thread_are_bounded_like_the_queue():
    async with serving({"context_per_slot": None}) as kit, contextlib.AsyncExitStack() as stack:
        assert (await kit.put(knobs={"max_queue_depth": 3}))[0] == 200
        held, long, refused = threading.Event(), "a" * 5000, kit.service.seen.refused["queue_full"]
        stack.callback(held.set)  # or the threads would outlive a failure
        waiting = [asyncio.create_task(kit.service.off_loop(10_000, held.wait)) for _ in range(3 + 4)]
        await kit.until(lambda: len(kit.service._texts) == 7)
        for path, body, rows in (
            ("/tokenize", {"prompt": long}, 0), ("/detokenize", {"tokens": [5] * 3000}, 0),
            (COMPLETION, {"prompt": [long] * 5}, 5), (CHAT, {"messages": [{"role": "user", "content": long}]}, 1),
        ):  # fmt: skip
            before = refused["slots"]
            status, answer, headers = await kit.post(path, body)
            assert (status, answer) == (503, BUSY_BODY) and int(headers["Retry-After"]) >= 1
            assert refused["slots"] == before + rows, path
        assert (await kit.post(COMPLETION, {"prompt": "short", "max_tokens": 1}))[0] == 200
        held.set()
        await asyncio.gather(*waiting)
        assert (await kit.post("/tokenize", {"prompt": long}))[1]["count"] == 5000


# ------------------------------------------------------------------------------------------------ counts

async def test_retries_are_rows_wherever_rows_are_counted_and_nowhere_else(kit: Kit):
    assert (await kit.put(knobs={"max_queue_depth": 2}))[0] == 200
    kit.stop_engine()
    seen = kit.service.seen
    asked = kit.begin({"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2}, **RETRY)
    await kit.until(lambda: seen.queued == 6)
    assert seen.retried == 6
    assert (await kit.post(COMPLETION, {"prompt": ["a", "b"], "n": 2}, **RETRY))[0] == 503
    assert (seen.retried, seen.refused["queue_full"]["slots"]) == (10, 4)
    assert (await kit.post(COMPLETION, {"prompt": 5}, **RETRY))[0] == 503, "the queue is looked at first"
    assert (await kit.post(COMPLETION, {"prompt": "a"}))[0] == 503
    assert (seen.retried, seen.refused["queue_full"]["slots"]) == (11, 6)
    kit.go_on()
    assert (await asked)[0] == 200
    for wrong in ({"prompt": 5}, {"prompt": "a", "model": "other"}, {"prompt": "a" * 1024}):
        assert (await kit.post(COMPLETION, wrong, **RETRY))[0] in (400, 404)
    assert seen.retried == 11 and seen.refused["invalid"]["none"] == 2 and seen.refused["context_length"]["none"] == 1


def test_what_the_budget_holds_is_the_engines_own_rule_for_every_length():
    """At the default least budget, one full context, nothing that fits the context is refused."""
    async def run() -> None:
        async with serving({"context_per_slot": 512, "num_blocks": 40}) as kit:
            book, chunk = kit.service.book, kit.service.ready.geometry.chunk_bytes
            for tokens in range(1, 512):
                for limit in {1, 2, 17, 512 - tokens} & set(range(1, 513 - tokens)):
                    row = Row(Submit(1, [0] * tokens, Sampling(limit), 0.0), 0, 0, 512, None, [])
                    for chunks in (1, 7, 31, 32):
                        fits = -(-row.reach // 16) <= chunks
                        assert book.over_budget(tokens, limit, chunks * chunk) is not fits, (tokens, limit, chunks)
                        assert fits or chunks < 32

    asyncio.run(run())


async def test_a_budget_that_holds_one_context_refuses_no_prompt():
    async with serving({"context_per_slot": 512, "num_blocks": 40, "kv_cache_budget_min": None}) as kit:
        least = kit.service.board.envelope.kv_cache_budget[0]
        assert (await kit.put(knobs={"kv_cache_budget": least}))[0] == 200
        for tokens in (495, 496, 497, 511):
            assert (await kit.post(COMPLETION, {"prompt": "a" * tokens}))[0] == 200


async def test_work_that_a_lowered_budget_cannot_hold_is_handed_back_with_one_exact_sentence(kit: Kit):
    kit.stop_engine()
    asked = kit.begin({"prompt": "a" * 500, "max_tokens": 8})
    await kit.until(lambda: kit.service.seen.queued == 1)
    assert (await kit.put(knobs={"kv_cache_budget": 10 * 4096}))[0] == 200
    kit.go_on()
    status, answer, headers = await asked
    needs = f"the prompt needs {32 * 4096} bytes of KV cache and the live KV budget is {10 * 4096} bytes."
    assert status == 503 and answer["error"]["message"] == f"request_memory_budget_exceeded: {needs}"
    assert int(headers["Retry-After"]) >= 1, "0 is for what a drain hands back"
    status, answer, headers = await kit.post(COMPLETION, {"prompt": "a" * 500, "max_tokens": 8}, **RETRY)
    assert status == 503 and answer["error"]["message"] == "request_memory_budget_exceeded"
    seen = kit.service.seen
    assert (seen.refused["kv_budget"]["kv"], seen.retried, seen.finished["handed_back"]) == (1, 1, 1)


async def test_the_same_loss_of_budget_during_a_drain_is_still_the_budgets(kit: Kit):
    kit.stop_engine()
    asked = kit.begin({"prompt": "a" * 500, "max_tokens": 8})
    await kit.until(lambda: kit.service.seen.queued == 1)
    await kit.put(knobs={"kv_cache_budget": 10 * 4096})
    kit.told.first.set()
    await kit.until(lambda: kit.service.board.draining)
    kit.go_on()
    status, answer, _ = await asked
    assert status == 503 and answer["error"]["message"].startswith("request_memory_budget_exceeded: ")
    assert await asyncio.wait_for(kit.life, PATIENCE) == 0


async def test_while_draining_the_advice_is_no_later_than_its_end(monkeypatch: pytest.MonkeyPatch):
    async with serving(drain_timeout=lambda: 30.0) as kit:
        expected = 100
        monkeypatch.setattr(service, "retry_after", lambda *_: expected)
        kit.stop_engine()
        asked = kit.begin({"prompt": "a", "max_tokens": 2})
        await kit.until(lambda: kit.service.seen.queued == 1)
        kit.told.first.set()
        await kit.until(lambda: kit.service.board.draining)
        advice = []
        for expected in (100, 7):  # noqa: B007 - read by the lambda
            status, _, headers = await kit.post(COMPLETION, {"prompt": "a"}, **RETRY)
            assert status == 503
            advice.append(int(headers["Retry-After"]))
        assert 20 <= advice[0] <= 30 and advice[1] == 7
        assert kit.service.seen.refused["draining"]["drain"] == kit.service.seen.retried == 2
        kit.go_on()
        assert (await asked)[0] == 200


# ------------------------------------------------------------------------------------------------ ids of clients

async def test_an_id_that_two_live_requests_share_deletes_neither(kit: Kit):
    """vllm-project/vllm#10583."""
    kit.stop_engine()
    asked = [kit.begin({"prompt": p, "max_tokens": 2}, **{"X-Request-Id": "same"}) for p in "ab"]
    await kit.until(lambda: kit.service.seen.queued == 2)
    async with kit.session.delete(kit.url + "/v1/requests/same") as answer:
        assert answer.status == 409 and (await answer.json())["error"]["code"] == "ambiguous"
    async with kit.session.delete(kit.url + "/v1/requests/a%0Ab") as answer:
        assert answer.status == 404 and (await answer.json())["error"]["code"] == "not_found"
    for odd in ("a b", "a\tb", "x" * 129):
        asked.append(kit.begin({"prompt": "a", "max_tokens": 2}, **{"X-Request-Id": odd}))
    await kit.until(lambda: kit.service.seen.queued == 5)
    assert [c.label for c in kit.service.book.calls.values()] == ["same", "same", None, None, None]
    kit.go_on()
    assert {(await a)[0] for a in asked} == {200}


# ------------------------------------------------------------------------------------------------ knobs

async def test_members_that_are_none_of_the_contracts_are_a_400(kit: Kit):
    before = kit.service.board.target
    assert (await kit.put(knobs={"max_batch_size": 2}, knob={"max_batch_size": 3}))[0] == 400
    assert kit.service.board.target == before and kit.service.board.fence.seq == 0


async def test_a_budget_above_what_memory_leaves_is_a_422(kit: Kit):
    kv = kit.service
    chunk = kv.ready.geometry.chunk_bytes
    assert (await kit.put(knobs={"kv_cache_budget": 100 * chunk}))[0] == 200
    await kit.until(lambda: kv.book.stats.memory_used > 0)
    kv.memory_limit = kv.memory_used() + service.HEADROOM + 300 * chunk
    status, answer = await kit.put(knobs={"kv_cache_budget": 900 * chunk})
    assert (status, answer["knob"], answer["value"]) == (422, "kv_cache_budget", 900 * chunk)
    assert (await kit.put(knobs={"kv_cache_budget": answer["bound"]}))[0] == 200
    kv.memory_limit = 1
    assert (await kit.put(knobs={"kv_cache_budget": answer["bound"]}))[0] == 200, "what is in force is renewed"
    kv.memory_limit = None
    assert (await kit.put(knobs={"kv_cache_budget": 900 * chunk}))[0] == 200


async def test_an_expired_lease_takes_no_memory_that_is_not_there(kit: Kit, caplog: pytest.LogCaptureFixture):
    """No write asks for it, so nobody could be told 422: the budget stays as low as it has to."""
    kv = kit.service
    chunk, before = kv.ready.geometry.chunk_bytes, kv.board.fallback.kv_cache_budget
    assert (await kit.put(knobs={"kv_cache_budget": 100 * chunk}, lease_seconds=0.2))[0] == 200
    kv.memory_limit = kv.memory_used() + service.HEADROOM + 300 * chunk
    await kit.until(lambda: kv.board.expirations == 1)
    assert 100 * chunk < kv.board.target.kv_cache_budget < 400 * chunk < before
    kv.memory_limit = None
    await kit.until(lambda: kv.board.target.kv_cache_budget == before)
    assert "memory has room again" in caplog.text


async def test_the_engines_memory_is_known_before_it_reports(kit: Kit, monkeypatch: pytest.MonkeyPatch):
    """Missing is not zero: room that only seems to be there would be given away."""
    kv = kit.service
    kv.book.stats = Stats()
    monkeypatch.setattr(service, "memory_used", lambda: 0)  # of the parent
    assert kv.memory_used() == kv.ready.memory_used > 1 << 20


async def test_the_pools_own_memory_is_not_counted_against_it(kit: Kit, monkeypatch: pytest.MonkeyPatch):
    kv = kit.service
    assert (await kit.post(COMPLETION, {"prompt": "a" * 800, "max_tokens": 1}))[0] == 200
    assert kv.book.stats.kv_resident_bytes == 50 * 4096
    kv.memory_limit = 1 << 40
    monkeypatch.setattr(kv, "memory_used", lambda: 700 << 20)
    assert kv.budget_room() == (1 << 40) - (700 << 20) - service.HEADROOM + 50 * 4096


# ------------------------------------------------------------------------------------------------ our own faults

@pytest.mark.parametrize("broken", ["apply", "tick"])
async def test_an_error_of_our_own_ends_every_call_and_then_the_server(kit: Kit, broken: str):
    kit.stop_engine()
    asked = kit.begin({"prompt": "a", "max_tokens": 4})
    await kit.until(lambda: kit.service.seen.queued == 1)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    setattr(kit.service, broken, fail)
    if broken == "apply":
        kit.go_on()
    status, answer, _ = await asyncio.wait_for(asked, PATIENCE)
    assert status == 500 and answer["error"]["message"] == "Internal error of the server."
    assert await asyncio.wait_for(kit.life, PATIENCE) == 1
    async with kit.session.get(kit.url + "/health") as health:
        assert health.status == 503
    status, answer, _ = await kit.post(COMPLETION, {"prompt": "a"})
    assert status == 503 and sum(kit.service.seen.refused["invalid"].values()) == 0


async def test_a_drain_that_cannot_begin_ends_the_server_too(kit: Kit):
    def fail() -> float:
        raise ZeroDivisionError

    object.__setattr__(kit.service.options, "drain_timeout", fail)
    kit.told.first.set()
    assert await asyncio.wait_for(kit.life, PATIENCE) == 1 and kit.service.failed


async def test_a_tokenizer_that_cannot_be_read_is_told_while_the_engine_still_loads():
    class Loading(EngineClient):
        def __init__(self) -> None:
            pass

        async def ready(self) -> Any:
            await asyncio.Event().wait()

    def broken() -> Any:
        raise ModelError("no tokenizer")

    with pytest.raises(ModelError, match="no tokenizer"):
        await asyncio.wait_for(lifecycle.load(Loading(), broken), PATIENCE)


# ------------------------------------------------------------------------------------------------ metrics

CONTRACT_COUNTERS = [
    "requests_queued", "requests_admitted", "requests_rejected", "requests_finished", "preemptions", "preempted_tokens",
    "soft_resets", "offloads", "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "prefix_cache_queries",
    "prefix_cache_hits", "engine_steps", "engine_step_seconds", "engine_step_decode_seqs", "engine_step_context_tokens",
    "engine_step_prefill_tokens", "kv_usage_seconds", "slo_good", "slo", "spec_decode_drafted", "spec_decode_accepted",
    "lease_expirations", "invariant_violations",
]  # fmt: skip


async def test_every_counter_of_the_contract_is_exported(kit: Kit):
    for base in (kit.url, kit.control):
        async with kit.session.get(base + "/metrics") as answer:
            families = {f.name: f for f in text_string_to_metric_families(await answer.text())}
        for name in CONTRACT_COUNTERS:
            samples = families[f"weir_{name}"].samples
            assert samples and {s.name for s in samples} == {f"weir_{name}_total"}, name
