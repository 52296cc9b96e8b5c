"""`weir-server size`: the arithmetic of a start for any machine, from headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from weir_server.cli import size
from weir_server.kv.sizing import SizingError

MIB = 1 << 20


@pytest.fixture
def sized(tmp_path: Path) -> Callable[..., Any]:
    """Output of `size` on the null model; with `-o json` the object. Raises what the command raises."""
    model = tmp_path / "m.gguf"
    model.touch()
    app = typer.Typer()
    app.command()(size.command)

    def run(*arguments: str) -> Any:
        result = typer.testing.CliRunner().invoke(app, [str(model), "--null-model", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(result.output) if "json" in arguments else result.output

    return run


def test_the_arithmetic_is_printed_for_the_limit_that_was_asked_about(sized: Callable[..., Any]):
    told = sized("--memory-limit", "1Gi", "--kv-cache-budget", "none")
    assert "memory limit 1024 MiB (as asked) x 0.9 = 922 MiB" in told and "headroom 128 MiB" in told
    assert "step time" not in told and "model m; context 8192 tokens a slot" in told


def test_json_has_what_a_server_would_say_of_itself(sized: Callable[..., Any]):
    told = sized("--memory-limit", "1Gi", "--kv-cache-budget", "64Mi", "--cpu-offload-space", "0.0625", "-o", "json")
    assert (told["model"], told["context_per_slot"], told["plant"]) == ("m", 8192, None)
    assert told["boot"]["kv_cache_budget"] == 64 * MIB == told["swap_bytes"]
    low, high = told["envelope"]["kv_cache_budget"]
    assert low <= 64 * MIB <= high == told["pool_bytes"] and told["kv"]["block_tokens"] == 16
    assert told["envelope"]["max_batch_size"] == [1, 64] and len(told["arithmetic"]) >= 3


@pytest.mark.parametrize("form", [(), ("-o", "json")])
def test_with_the_plant_an_engine_is_started_and_asked(sized: Callable[..., Any], form: tuple[str, ...]):
    flags = ("--memory-limit", "1Gi", "--kv-cache-budget", "64Mi")
    told = sized(*flags, "--plant", *form)
    if form:
        assert told["plant"]["a"] >= 0 and len(told["steps"]) == 4
        dry = sized(*flags, *form)
        assert {k: told[k] for k in ("kv", "envelope", "boot", "swap_bytes", "context_per_slot")} == {
            k: dry[k] for k in ("kv", "envelope", "boot", "swap_bytes", "context_per_slot")
        }
    else:
        assert "step time" in told and "1 row" in told


def test_what_does_not_fit_is_the_sentence_of_a_start(sized: Callable[..., Any]):
    with pytest.raises(SizingError, match="one full context of 8192 tokens"):
        sized("--memory-limit", "1Mi")
    with pytest.raises(SizingError, match="does not fit"):
        sized("--memory-limit", "1Gi", "--kv-cache-budget", "2Gi")
