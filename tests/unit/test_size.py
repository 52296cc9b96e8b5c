"""`weir-server size`: the arithmetic of a start for any machine, from headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20

Sized = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sized(tmp_path: Path) -> Sized:
    """`size` on the null model, in a process of its own: what a process uses is part of the arithmetic."""
    model = tmp_path / "m.gguf"
    model.touch()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "weir_server", "size", str(model), "--null-model", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


def told_by(sized: Sized, *arguments: str) -> Any:
    """What it printed; with `-o json` the object."""
    done = sized(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "json" in arguments else done.stdout


def test_the_arithmetic_is_printed_for_the_limit_that_was_asked_about(sized: Sized):
    told = told_by(sized, "--memory-limit", "1Gi", "--kv-cache-budget", "none")
    assert "memory limit 1024 MiB (as asked) x 0.9 = 922 MiB" in told and "headroom 128 MiB" in told
    assert "step time" not in told and "model m; context 8192 tokens a slot" in told


def test_json_has_what_a_server_would_say_of_itself(sized: Sized):
    told = told_by(sized, "--memory-limit", "1Gi", "--kv-cache-budget", "64Mi", "--cpu-offload-space", "0.0625", "-o", "json")
    assert (told["model"], told["context_per_slot"], told["plant"]) == ("m", 8192, None)
    assert told["boot"]["kv_cache_budget"] == 64 * MIB == told["swap_bytes"]
    low, high = told["envelope"]["kv_cache_budget"]
    assert low <= 64 * MIB <= high == told["pool_bytes"] and told["kv"]["block_tokens"] == 16
    assert told["envelope"]["max_batch_size"] == [1, 64] and len(told["arithmetic"]) >= 3


@pytest.mark.parametrize("form", [(), ("-o", "json")])
def test_with_the_plant_an_engine_is_started_and_asked(sized: Sized, form: tuple[str, ...]):
    flags = ("--memory-limit", "1Gi", "--kv-cache-budget", "64Mi")
    told = told_by(sized, *flags, "--plant", *form)
    if form:
        assert told["plant"]["a"] >= 0 and len(told["steps"]) == 4
        dry = told_by(sized, *flags, *form)
        assert {k: told[k] for k in ("kv", "envelope", "boot", "swap_bytes", "context_per_slot")} == {
            k: dry[k] for k in ("kv", "envelope", "boot", "swap_bytes", "context_per_slot")
        }
    else:
        assert "step time" in told and "1 row" in told


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--memory-limit", "1Mi"), "one full context of 8192 tokens"),
        (("--memory-limit", "1Gi", "--kv-cache-budget", "2Gi"), "does not fit"),
    ],
)
def test_what_does_not_fit_is_the_sentence_of_a_start(sized: Sized, flags: tuple[str, ...], sentence: str):
    done = sized(*flags)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
