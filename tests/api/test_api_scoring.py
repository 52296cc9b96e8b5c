"""A prompt's own logprobs, on the real model: OpenAI's echo and vLLM's prompt_logprobs."""

from __future__ import annotations

import json
import math

import pytest
from serving import Server

IDS = [49, 392, 337, 314, 253]
"""Of "A weir is a"."""
ASK = {"prompt": "A weir is a", "max_tokens": 1, "temperature": 0, "echo": True}


def choice(server: Server, **more: object) -> dict:
    answer = server.post("/v1/completions", {**ASK, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("top", [0, 2])
def test_an_echo_with_logprobs_has_the_prompts_too(server: Server, top: int):
    """ggml-org/llama.cpp#27174, sgl-project/sglang#2301. The second time the prompt's KV is cached, and is computed anyway."""
    first, again = choice(server, logprobs=top), choice(server, logprobs=top)
    assert first == again
    told = first["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == 6 and "".join(told["tokens"]) == first["text"]
    assert told["token_logprobs"][0] is None
    assert all(p <= 0 and math.isfinite(p) for p in told["token_logprobs"][1:])
    assert told["text_offset"] == [0, 1, 4, 6, 9, 11]
    if top:
        assert told["top_logprobs"][0] is None and [len(t) for t in told["top_logprobs"][1:]] == [2] * 5
    else:
        assert told["top_logprobs"] is None
    assert len(choice(server, logprobs=top, echo=False)["logprobs"]["tokens"]) == 1


def test_the_prompts_logprobs_are_what_the_model_would_have_generated(server: Server):
    """The logprob of each prompt token is the one that it has where it is the only one allowed to be generated."""
    told = choice(server, logprobs=0)["logprobs"]["token_logprobs"]
    for at in (1, 3, 4):
        body = {"prompt": IDS[:at], "max_tokens": 1, "logprobs": 20, "temperature": 0}
        tops = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        piece = server.post("/detokenize", {"tokens": [IDS[at]]}).json()["content"]
        if piece in tops:
            assert told[at] == pytest.approx(tops[piece], abs=1e-4)
        else:
            assert told[at] <= min(tops.values()) + 1e-4


def test_a_streamed_echo_is_the_same(server: Server):
    whole = choice(server, logprobs=1, max_tokens=4)
    answer = server.post("/v1/completions", {**ASK, "logprobs": 1, "max_tokens": 4, "stream": True})
    parts = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(p["text"] for p in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for p in parts if p["logprobs"] for x in p["logprobs"][name]] == whole["logprobs"][name]


def test_a_prompt_is_scored_without_an_answer(server: Server):
    """As evaluation harnesses ask: no token is made, and the scores are those of a request that makes some."""
    scored = choice(server, logprobs=1, max_tokens=0)
    assert scored["text"] == "A weir is a" and scored["finish_reason"] == "length"
    full = choice(server, logprobs=1)["logprobs"]
    assert scored["logprobs"] == {name: values[:5] for name, values in full.items()}


def test_prompt_logprobs_in_vllms_form(server: Server):
    told = choice(server, echo=False, prompt_logprobs=2)["prompt_logprobs"]
    echoed = choice(server, logprobs=2)["logprobs"]["token_logprobs"][:5]
    assert told[0] is None and len(told) == 5
    for token, entry, logprob in zip(IDS[1:], told[1:], echoed[1:], strict=True):
        assert entry[str(token)]["logprob"] == logprob and 2 <= len(entry) <= 3
        assert sorted(e["rank"] for e in entry.values() if e["rank"]) == [1, 2]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    answer = server.post("/v1/chat/completions", body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and all(len(e) == 1 for e in answer["prompt_logprobs"][1:])


def test_scoring_reads_nothing_from_the_prefix_cache_and_n_choices_share_it(server: Server):
    prompt = "A weir is a low dam. " * 8
    server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2, "seed": 3})
    body = answer.json()
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    one, two = (c["logprobs"]["token_logprobs"][: body["usage"]["prompt_tokens"]] for c in body["choices"])
    assert one == two and None not in one[1:]
