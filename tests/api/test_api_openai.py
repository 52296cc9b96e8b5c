"""The official client against the real server, unchanged."""

from __future__ import annotations

import json
import subprocess
import sys

import openai
import pytest
import requests
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from serving import MODEL, NAME, Server

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model=NAME, messages=PARIS, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


def test_chat_stream_is_the_same_text_in_pieces(client: openai.OpenAI):
    ask = {"model": NAME, "messages": PARIS, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**ask))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The capital of France is Paris."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8


def test_the_second_time_the_prompt_is_cached(client: openai.OpenAI):
    ask = {"model": NAME, "messages": [{"role": "user", "content": "Cached? " * 12}], "temperature": 0, "max_tokens": 2}
    client.chat.completions.create(**ask)
    again = client.chat.completions.create(**ask)
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens
    private = client.chat.completions.create(**ask, extra_body={"cache_prompt": False})
    assert private.usage.prompt_tokens_details.cached_tokens == 0


def test_same_seed_same_text(client: openai.OpenAI):
    ask = {"model": NAME, "prompt": "A river", "temperature": 1.0, "max_tokens": 12, "seed": 9223372036854775807}
    one, two = (client.completions.create(**ask).choices[0].text for _ in range(2))
    assert one == two
    assert client.completions.create(**{**ask, "seed": -9223372036854775808}).choices[0].text != one


@pytest.mark.parametrize("temperature", [1e-46, 1e-6])
def test_next_to_no_temperature_is_none(client: openai.OpenAI, temperature: float):
    """1e-46 is 0 in the sampler's floats, and 0 ÷ 0 no number."""
    ask = {"model": NAME, "prompt": "A weir is a", "max_tokens": 6}
    greedy = client.completions.create(**ask, temperature=0).choices[0].text
    assert client.completions.create(**ask, temperature=temperature).choices[0].text == greedy


def test_n_choices_differ_and_are_numbered(client: openai.OpenAI):
    answer = client.completions.create(model=NAME, prompt="A river", temperature=1.0, max_tokens=8, seed=5, n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.text for c in answer.choices}) == 3
    assert answer.usage.completion_tokens == 24


def test_several_prompts_in_one_call(client: openai.OpenAI):
    ask = {"model": NAME, "temperature": 0, "max_tokens": 6}
    both = client.completions.create(**ask, prompt=["A weir is", "The capital of"])
    alone = [client.completions.create(**ask, prompt=p).choices[0].text for p in ("A weir is", "The capital of")]
    assert [c.text for c in both.choices] == alone


def test_prompt_as_ids_is_the_same_prompt(client: openai.OpenAI):
    ask = {"model": NAME, "temperature": 0, "max_tokens": 6}
    text = client.completions.create(**ask, prompt="A weir is a")
    assert client.completions.create(**ask, prompt=[49, 392, 337, 314, 253]).choices[0].text == text.choices[0].text
    assert text.usage.prompt_tokens == 5


def test_completion_without_max_tokens_gives_16(client: openai.OpenAI):
    answer = client.completions.create(model=NAME, prompt="A weir is a", temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"


def test_stop_string_ends_text_and_count(client: openai.OpenAI):
    ask = {"model": NAME, "prompt": "One, two, three, four, five,", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[5:9]
    cut = client.completions.create(**ask, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop" and cut.usage.completion_tokens < 24
    streamed = client.completions.create(**ask, stop=[stop], stream=True)
    assert "".join(c.choices[0].text for c in streamed) == cut.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_is_a_special_token(client: openai.OpenAI, stream: bool):
    """vllm-project/vllm#2123. Id 1 is <|im_start|>, which is hidden from the text."""
    ask = {"model": NAME, "prompt": "The", "max_tokens": 8, "temperature": 0, "logit_bias": {"1": 100}}
    if stream:
        options = {"include_usage": True}
        chunks = list(client.completions.create(**ask, stop=["<|im_start|>"], stream=True, stream_options=options))
        assert "".join(c.choices[0].text for c in chunks if c.choices) == ""
        assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens == 1
    else:
        answer = client.completions.create(**ask, stop=["<|im_start|>"])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
        assert answer.usage.completion_tokens == 1
        control = client.completions.create(**ask)
        assert (control.choices[0].text, control.choices[0].finish_reason) == ("", "length")
        assert control.usage.completion_tokens == 8


def test_an_open_character_at_the_end_is_replaced_and_not_dropped(client: openai.OpenAI):
    """Id 10813 is the bytes F0 9F: forced three times they begin three characters and end none."""
    ask = {"model": NAME, "prompt": "The", "max_tokens": 3, "temperature": 0, "logit_bias": {"10813": 100}}
    whole = client.completions.create(**ask).choices[0].text
    assert whole == b"\xf0\x9f\xf0\x9f\xf0\x9f".decode("utf-8", "replace")
    assert "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True)) == whole


def test_logprobs_of_chat(client: openai.OpenAI):
    """ggml-org/llama.cpp#27174: `logprobs: true` alone asks for the chosen tokens only."""
    ask = {"model": NAME, "messages": PARIS, "temperature": 0, "max_tokens": 3, "logprobs": True}
    answer = client.chat.completions.create(**ask)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == 3
    assert all(entry.top_logprobs == [] and entry.logprob <= 0 for entry in content)
    best = client.chat.completions.create(**ask, top_logprobs=2).choices[0].logprobs.content
    assert [len(e.top_logprobs) for e in best] == [2, 2, 2]
    assert [e.logprob for e in best] == [e.top_logprobs[0].logprob for e in best]


def test_logprobs_of_completions(client: openai.OpenAI):
    """sgl-project/sglang#2301: 0 is a request for the chosen token, and not "none"."""
    ask = {"model": NAME, "prompt": "A weir is a", "temperature": 0, "max_tokens": 1}
    chosen = client.completions.create(**ask, logprobs=0).choices[0].logprobs
    assert len(chosen.token_logprobs) == 1 and chosen.top_logprobs is None
    two = client.completions.create(**ask, logprobs=2).choices[0].logprobs
    assert len(two.top_logprobs[0]) == 2 and two.token_logprobs == chosen.token_logprobs
    assert client.completions.create(**ask).choices[0].logprobs is None


def test_usage_does_not_count_the_surplus_after_a_stop(client: openai.OpenAI, server: Server):
    before = server.window()["generated_tokens"]
    ask = {"model": NAME, "prompt": "The", "max_tokens": 8, "temperature": 0, "logit_bias": {"30": 100}}
    answer = client.completions.create(**ask, stop=["."])
    assert answer.usage.completion_tokens == 1
    assert server.window()["generated_tokens"] - before == 1


def test_min_tokens_and_ignore_eos(client: openai.OpenAI):
    """`logit_bias {2: 100}` forces the end token at once."""
    ask = {"model": NAME, "prompt": "The", "max_tokens": 6, "temperature": 0, "logit_bias": {"2": 100}}
    assert client.completions.create(**ask).usage.completion_tokens == 1
    assert client.completions.create(**ask, extra_body={"ignore_eos": True}).usage.completion_tokens == 6
    assert client.completions.create(**ask, extra_body={"min_tokens": 4}).usage.completion_tokens >= 4


def test_models(client: openai.OpenAI, server: Server):
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as e:
        client.chat.completions.create(model="gpt-4", messages=PARIS)
    assert e.value.code == "model_not_found"


def test_a_fresh_server_with_an_odd_name(start):
    """First all series at 0 (trallnag/prometheus-fastapi-instrumentator#25), then the name by every spelling of its path and
    escaped in labels (ollama/ollama#10139, headroomlabs-ai/headroom#2463). One server for both, since a start takes seconds.
    """
    name = 'acme/ti"ny\\x:q4'
    own = start("--served-model-name", name, "--ctx-size", "4096").wait_until_serving()
    for base in (own.url, own.control):
        every_series_is_there_at_zero(base)
    client = openai.OpenAI(base_url=own.url + "/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == [name]
    assert client.models.retrieve(name).id == name
    for path in ("acme/ti%22ny%5Cx:q4", "acme%2Fti%22ny%5Cx:q4", "acme%2Fti%22ny%5Cx%3Aq4"):
        assert own.get("/v1/models/" + path)["id"] == name
    missing = requests.get(own.url + "/v1/models/acme")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    for bad in ('no"such\n# EOF', "\\"):
        assert own.post("/v1/completions", {"model": bad, "prompt": "x"}).status_code == 404
    plain = requests.get(own.url + "/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    om = requests.get(own.url + "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert om.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert om.text.count("# EOF") == 1
    for families in (text_families(plain.text), openmetrics_families(om.text)):
        samples = [s for f in families for s in f.samples]
        assert {s.labels["model_name"] for s in samples if "model_name" in s.labels} == {name}
        assert any(s.name == "vllm:num_requests_running" for s in samples)


def every_series_is_there_at_zero(base: str) -> None:
    families = {f.name: f for f in text_families(requests.get(base + "/metrics").text)}
    rejected = {(s.labels["reason"], s.labels["bound"]): s.value for s in families["weir_requests_rejected"].samples}
    assert {b for r, b in rejected if r == "queue_full"} == {"slots", "kv", "prefill", "drain"}
    assert {r for r, _ in rejected} == {"queue_full", "draining", "kv_budget", "kv_impossible", "context_length", "invalid"}
    assert set(rejected.values()) == {0.0}
    assert len(families["weir_requests_finished"].samples) == 5
    reasons = {s.labels["finished_reason"] for s in families["vllm:request_success"].samples}
    assert {"stop", "length", "abort", "error"} <= reasons
    assert families["vllm:num_requests_waiting"].samples[0].value == 0
    histograms = [f for f in families.values() if f.type == "histogram"]
    assert len(histograms) == 13
    for h in histograms:
        assert {s.value for s in h.samples} == {0.0}, h.name
        assert any(s.labels.get("le") == "+Inf" for s in h.samples)
    for f in families.values():
        assert all(s.value == s.value for s in f.samples), f.name


def test_health_slots_and_cache(server: Server):
    health = server.get("/health")
    assert health["status"] == "ok" and health["context_per_slot"] == 8192
    assert set(health["batch"]) == {"active_sequences", "queued_requests", "total_completed"}
    slots = server.get("/slots")
    assert len(slots) == server.state()["envelope"]["max_batch_size"][1]
    assert [s["disabled"] for s in slots] == [False] * 4 + [True] * (len(slots) - 4)
    cache = server.get("/v1/cache/stats")
    assert cache["block_tokens"] == 16 and cache["live_blocks"] == cache["used_bytes"] == cache["stranded_bytes"] == 0
    assert cache["free_blocks"]["full_attention"] + cache["cached_blocks"] == cache["usable_blocks"] > 0
    assert cache["reserved_bytes"] == server.state()["envelope"]["kv_cache_budget"][1] and cache["swap_bytes"] == 0
    assert requests.get(server.url + "/ready").status_code == 200


def test_size_says_what_a_server_with_the_same_flags_is(server: Server):
    command = [sys.executable, "-m", "weir_server", "size", MODEL, "-o", "json"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    state = server.state()
    assert {k: told[k] for k in ("envelope", "boot", "kv")} == {k: state[k] for k in ("envelope", "boot", "kv")}
    assert told["context_per_slot"] == 8192 and told["plant"] is None


def test_tokenize_and_back(server: Server):
    ids = server.post("/tokenize", {"prompt": "A weir is a"}).json()["tokens"]
    assert ids == [49, 392, 337, 314, 253]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "A weir is a"
