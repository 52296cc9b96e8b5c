"""A server with 8-bit weights: it says so, it answers in English, it takes a quarter of the memory, and it is deterministic."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from serving import MODEL, Server


@pytest.fixture(scope="module")
def own() -> Any:
    server = Server("--quantize=int8", "--ctx-size", "4096", "--deterministic")
    try:
        yield server.wait_until_serving()
    finally:
        server.end()


def test_it_says_that_its_products_are_of_8_bits_and_answers(own: Server) -> None:
    model = own.state()["model"]
    assert model["weights"] == "int8" and model["linear"].startswith("int8, own on ")
    assert 150e6 < model["weights_bytes"] < 153e6
    answer = own.post("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0})
    assert answer.json()["choices"][0]["text"].startswith(" Paris")


def test_prompt_logprobs_do_not_depend_on_neighbours(own: Server) -> None:
    body = {"prompt": "Once upon a time, there was", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    alone = own.post("/v1/completions", body).json()["choices"]
    together = own.post("/v1/completions", body | {"n": 4}).json()["choices"]
    assert [c["logprobs"] for c in together] == [alone[0]["logprobs"]] * 4


def test_size_knows_the_smaller_weights_without_loading_them() -> None:
    weights = {}
    for quantize in ("int8", "none"):
        flags = [f"--quantize={quantize}", "--memory-limit=2Gi", "--output=json"]
        command = [sys.executable, "-m", "weir_server", "size", MODEL, *flags]
        told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
        weights[quantize] = next(line for line in told["arithmetic"] if "weights" in line)
    assert "weights 144 MiB" in weights["int8"] and "weights 513 MiB" in weights["none"]
