"""A model directory in the Hugging Face layout: tiny random weights, SmolLM2's tokenizer, and an embedding padded beyond it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from serving import MODEL, Server

from weir_server.model.files import resolve
from weir_server.text.tokenizer import load_tokenizer

VOCAB = 49280


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=2048, eos_token_id=2, bos_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    load_tokenizer(resolve(MODEL)).core.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 17], "temperature": 0.0}))
    server = Server("--served-model-name", "tiny", model=str(path))
    try:
        yield server.wait_until_serving()
    finally:
        server.end()


@pytest.mark.parametrize("stream", [False, True])
def test_an_id_that_the_tokenizer_lacks_is_no_error(tiny: Server, stream: bool):
    """pegainfer-project/pegainfer#673."""
    body = {"prompt": "The", "max_tokens": 5, "ignore_eos": True, "logit_bias": {"49200": 100}, "logprobs": 1, "stream": stream}
    answer = tiny.post("/v1/completions", body)
    assert answer.status_code == 200
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [e["choices"][0] for e in events]
        assert "".join(c["text"] for c in choices) == "" and choices[-1]["finish_reason"] == "length"
        assert sum(len(c["logprobs"]["tokens"]) for c in choices if c["logprobs"]) == 5
    else:
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["token_logprobs"])) == ("", "length", 5)
        assert answer.json()["usage"]["completion_tokens"] == 5
    assert tiny.post("/detokenize", {"tokens": [504, 49200, 504]}).json()["content"] == "TheThe"
    assert tiny.window()["finished"]["error"] == 0


def test_without_a_template_chat_says_so_and_completions_work(tiny: Server):
    refused = tiny.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
    assert refused.status_code == 400 and "no chat template" in refused.json()["error"]["message"]
    assert tiny.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_generation_config_is_honoured(tiny: Server):
    """Id 17 is one of its two end tokens; its temperature 0 holds where a request gives none."""
    ended = tiny.post("/v1/completions", {"prompt": "The", "max_tokens": 5, "logit_bias": {"17": 100}}).json()
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] == 1
    assert ended["choices"][0]["text"] == ""
    greedy = {tiny.post("/v1/completions", {"prompt": "The", "max_tokens": 8}).json()["choices"][0]["text"] for _ in range(3)}
    assert len(greedy) == 1
