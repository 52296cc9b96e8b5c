"""What a request may say of itself: priority, timeout, its prompt back; how it is explained; and the odd ones at the edges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from http_kit import CHAT, COMPLETION, Kit, byte_tokenizer, serving

from weir_server.http.ask import TIMEOUT_HEADER, _prompt
from weir_server.http.live import Prompt
from weir_server.http.shapes import CompletionShape
from weir_server.link.messages import Sampling, Submit, TokenLogprobs

IDS = {c: byte_tokenizer().encode(c, False)[0] for c in "abcsy^"}
SAY = [IDS[c] for c in "say"]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    async with serving({"max_batch_size": 1}) as k:
        yield k


def submitted(kit: Kit) -> list[Submit]:
    return [submit for call in kit.service.book.calls.values() for submit in call.submits]


# ------------------------------------------------------------------------------------------------ priority

@pytest.mark.parametrize(("priority", "lane"), [
    ("high", 0), ("normal", 1), ("low", 2), (None, 1), (0, 1), (-1, 0), (-99, 0), (1, 2), (1 << 60, 2),
])  # fmt: skip
async def test_priorities_are_lanes(kit: Kit, priority: Any, lane: int):
    """By name, or vLLM's integers, of which the lower is served earlier."""
    kit.stop_engine()
    asked = [kit.begin({"prompt": "a", "max_tokens": 1, "priority": priority})]
    asked.append(kit.begin({"messages": HI, "max_tokens": 1, "priority": priority}, CHAT))
    await kit.until(lambda: kit.service.seen.queued == 2)
    assert [s.lane for s in submitted(kit)] == [lane, lane]
    kit.go_on()
    assert {(await a)[0] for a in asked} == {200}


async def test_who_came_later_and_matters_more_is_served_first(kit: Kit):
    kit.stop_engine()
    ended: list[str] = []

    async def ask(priority: str, n: int) -> None:
        assert (await kit.post(COMPLETION, {"prompt": "a", "max_tokens": 40, "priority": priority}))[0] == 200
        ended.append(priority)

    asked = []
    for n, priority in enumerate(("low", "normal", "high"), 1):
        asked.append(asyncio.create_task(ask(priority, n)))
        await kit.until(lambda n=n: kit.service.seen.queued == n)
    kit.go_on()
    await asyncio.gather(*asked)
    assert ended == ["high", "normal", "low"]


# ------------------------------------------------------------------------------------------------ timeout

@pytest.mark.parametrize(("body", "headers"), [
    ({"timeout": 0.05}, {}), ({}, {TIMEOUT_HEADER: "0.05"}), ({"timeout": 60}, {TIMEOUT_HEADER: "0.05"}),
    ({"timeout": 0.05, "stream": True}, {TIMEOUT_HEADER: "60"}),
])  # fmt: skip
async def test_a_timeout_before_the_answer_has_begun_is_a_504(kit: Kit, body: dict[str, Any], headers: dict[str, str]):
    """The sooner of what the request and the header allow; nobody is told to come back with the same patience."""
    kit.stop_engine()
    asked = kit.begin({"prompt": "a", "max_tokens": 1000, **body}, **headers)
    await kit.until(lambda: kit.service.seen.queued == 1)
    (submit,) = submitted(kit)
    assert submit.deadline == pytest.approx(submit.arrived + 0.05)
    await kit.until(lambda: kit.service.now() > submit.deadline)
    kit.go_on()
    status, answer, got = await asked
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded") and "Retry-After" not in got
    assert kit.service.seen.finished["cancelled"] == 1 and kit.service.book.stats.deadlines_exceeded == 1
    assert sum(sum(b.values()) for b in kit.service.seen.refused.values()) == 0, "it was queued, so it is not refused"


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
async def test_a_header_that_is_no_time_is_a_400(kit: Kit, value: str):
    status, answer, _ = await kit.post(COMPLETION, {"prompt": "a"}, **{TIMEOUT_HEADER: value})
    assert (status, answer["error"]["param"]) == (400, TIMEOUT_HEADER)


async def test_without_a_timeout_there_is_no_deadline(kit: Kit):
    kit.stop_engine()
    asked = kit.begin({"prompt": "a", "max_tokens": 1})
    await kit.until(lambda: kit.service.seen.queued == 1)
    assert submitted(kit)[0].deadline is None
    kit.go_on()
    assert (await asked)[0] == 200


# ------------------------------------------------------------------------------------------------ the prompt back

async def test_what_the_engine_is_asked_of_the_prompt(kit: Kit):
    kit.stop_engine()
    bodies: list[tuple[dict[str, Any], int]] = [
        ({}, -1), ({"logprobs": 3}, -1), ({"echo": True}, -1), ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2}, 2), ({"prompt_logprobs": 0}, 0), ({"prompt_logprobs": 5}, 5),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 4}, 4),
    ]  # fmt: skip
    asked = []
    for i, (more, _) in enumerate(bodies, 1):
        asked.append(kit.begin({"prompt": "abc", "max_tokens": 1, **more}))
        await kit.until(lambda i=i: kit.service.seen.queued == i)
    assert [s.prompt_logprobs for s in submitted(kit)] == [wanted for _, wanted in bodies]
    assert len(kit.service.book.calls) == len(bodies)
    kit.go_on()
    assert {(await a)[0] for a in asked} == {200}


@pytest.mark.parametrize("prompt", ["say", SAY, [SAY]])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_the_beginning_of_each_answer(kit: Kit, prompt: Any, stream: bool):
    """The null engine's tokens have no text here, so that the prompt is all there is."""
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "n": 2, "logit_bias": {}, "stream": stream}
    if not stream:
        status, answer, _ = await kit.post(COMPLETION, body)
        assert status == 200 and answer["usage"]["completion_tokens"] == 6
        assert all(c["text"].startswith("say") and c["text"].count("say") == 1 for c in answer["choices"])
        return
    async with kit.session.post(kit.url + COMPLETION, json=body) as response:
        said = (await response.read()).decode()
    assert said.count('"text":"say') == 2


async def test_an_echo_with_logprobs_has_those_of_the_prompt_first(kit: Kit):
    """The null engine tells of each prompt token minus its place."""
    status, answer, _ = await kit.post(COMPLETION, {"prompt": "say", "max_tokens": 0, "echo": True, "logprobs": 0})
    assert status == 200 and answer["choices"][0]["logprobs"] == {
        "tokens": ["s", "a", "y"], "token_logprobs": [None, -1.0, -2.0], "top_logprobs": None, "text_offset": [0, 1, 2],
    }  # fmt: skip


async def test_zero_tokens_score_a_prompt_and_make_nothing(kit: Kit):
    """As evaluation harnesses ask; elsewhere 0 is refused."""
    body = {"prompt": "say", "max_tokens": 0, "echo": True}
    status, answer, _ = await kit.post(COMPLETION, body)
    (choice,) = answer["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "say", "length")
    assert answer["usage"]["completion_tokens"] == 0 and kit.service.seen.generated_tokens == 0
    assert kit.service.seen.slo_good["ttft"] == 1, "an answer in time is no miss"
    for path, wrong in ((COMPLETION, {"prompt": "say"}), (CHAT, {"messages": HI})):
        status, answer, _ = await kit.post(path, {**wrong, "max_tokens": 0})
        assert (status, answer["error"]["param"]) == (400, "max_tokens")


def prompt_of(kit: Kit, ids: list[int], text: str | None) -> Prompt:
    return _prompt(kit.service.model.tokenizer, Submit(1, ids, Sampling(1), 0.0, prompt_logprobs=1), text)


async def test_offsets_count_the_characters_of_the_text_as_it_was_given(kit: Kit):
    ids = kit.service.model.tokenizer.encode("ü€x", False)
    assert prompt_of(kit, ids, "ü€x").offsets == prompt_of(kit, ids, None).offsets == [0, 0, 1, 1, 1, 2]
    before = prompt_of(kit, [IDS["^"], *ids], "ü€x")
    assert before.text == "ü€x" and before.offsets == [0, 0, 0, 1, 1, 1, 2], "what the tokenizer puts in front counts nothing"


async def test_logprobs_of_prompts_in_both_forms(kit: Kit):
    """OpenAI's arrays under echo, null for the first token; vLLM's objects by id beside the answer."""
    a, b, c = (IDS[letter] for letter in "abc")
    told = prompt_of(kit, [a, b], "ab")
    told.tell(1, [TokenLogprobs(-2.0, [(c, -0.5), (b, -2.0)])])
    told.tell(1, [TokenLogprobs(-2.0, [(c, -0.5), (b, -2.0)])])  # as after a preemption
    assert [e.logprobs and e.logprobs.logprob for e in told.entries] == [None, -2.0]
    shape = CompletionShape("x", "m", kit.service.model.tokenizer, tops=1, prompt_tops=2)
    arrays = shape._logprobs(told.entries)
    assert arrays == {
        "tokens": ["a", "b"], "token_logprobs": [None, -2.0], "top_logprobs": [None, {"c": -0.5}], "text_offset": [0, 1],
    }  # fmt: skip
    assert shape.prompt_logprobs(told) == [None, {
        str(b): {"logprob": -2.0, "rank": 2, "decoded_token": "b"}, str(c): {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
    }]  # fmt: skip


# ------------------------------------------------------------------------------------------------ why it does not run

async def test_a_waiting_request_says_its_place_and_what_it_needs(kit: Kit):
    """Place by lane and arrival; memory in bytes, beside what is used and the budget."""
    async def told(name: str) -> dict[str, Any]:
        async with kit.session.get(f"{kit.url}/v1/requests/{name}") as answer:
            assert answer.status == 200
            return await answer.json()

    kit.stop_engine()
    asked, chunk = [], kit.service.ready.geometry.chunk_bytes
    for n, (label, body) in enumerate([
        ("low", {"priority": "low"}), ("one", {"prompt": "a" * 33, "max_tokens": 9, "timeout": 60}), ("two", {"n": 2}),
        ("high", {"priority": -1, "max_tokens": 1, "prompt": "a" * 16}),
    ]):  # fmt: skip
        asked.append(kit.begin({"prompt": "a", "max_tokens": 2, **body}, **{"X-Request-Id": label}))
        await kit.until(lambda n=n: len(kit.service.book.calls) == n + 1)
    ahead = {label: [r["rows_ahead"] for r in (await told(label))["rows"]] for label in ("high", "one", "two", "low")}
    assert ahead == {"high": [0], "one": [1], "two": [2, 3], "low": [4]}
    one, high = await told("one"), await told("high")
    assert (one["waits_for"], one["priority"], high["priority"]) == ("slots", "normal", "high")
    assert 0 < one["seconds_left"] <= 60 and high["seconds_left"] is None
    (row,) = one["rows"]
    assert (row["state"], row["tokens_needed"], row["kv_bytes_needed"]) == ("waiting", 33, 3 * chunk)
    assert row["kv_budget_bytes"] == kit.service.effective.kv_cache_budget and row["kv_bytes_used"] == 0
    assert high["rows"][0]["kv_bytes_needed"] == chunk, "its only token needs no room of its own"
    for later, lane, rows in ((31, "normal", 4), (61, "high", 0)):
        kit.service.now = lambda later=later: time.monotonic() + later
        (row,) = (await told("low"))["rows"]
        assert (row["lane"], row["rows_ahead"]) == (lane, rows), "who waits rises a lane each 30 s"
    kit.go_on()
    assert {(await a)[0] for a in asked} == {200}


# ------------------------------------------------------------------------------------------------ at the edges

async def test_a_prompt_of_the_contexts_length_is_one_too_long_and_one_less_gets_one_token(kit: Kit):
    context = kit.service.ready.context_per_slot
    status, answer, _ = await kit.post(COMPLETION, {"prompt": "a" * context, "max_tokens": 5})
    assert (status, answer["error"]["code"]) == (400, "context_length") and str(context) in answer["error"]["message"]
    status, answer, _ = await kit.post(COMPLETION, {"prompt": "a" * (context - 1), "max_tokens": 5})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1) and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""]])
async def test_an_empty_prompt_is_a_400(kit: Kit, prompt: Any):
    status, answer, _ = await kit.post(COMPLETION, {"prompt": prompt})
    assert (status, answer["error"]["param"]) == (400, "prompt")


async def test_two_identical_prompts_are_two_answers(kit: Kit):
    body = {"prompt": ["same " * 20] * 2, "max_tokens": 9, "seed": 5, "logprobs": None}
    status, answer, _ = await kit.post(COMPLETION, body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 18
    assert len({c["text"] for c in answer["choices"]}) == 1, "one seed"
