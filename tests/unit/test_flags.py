"""The command line: every flag of the server and its variable, what it becomes, and what contradicts itself."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
import typer.testing

from weir_server import __main__ as main
from weir_server.cli import flags, serve
from weir_server.cli.boot import boot_of
from weir_server.cli.flags import EngineFlags
from weir_server.cli.talk import TalkFlags
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot

MODEL = __file__
"""Any file: nothing of it is read."""
GIB = 1 << 30


def boot(**given: Any) -> Boot:
    return boot_of(MODEL, EngineFlags(threads=1, **given))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Boot]:
    """Run `serve` up to where the engine would be started; what it would be started with."""
    model = tmp_path / "m.gguf"
    model.touch()

    class Started(Exception):
        pass

    def engine(boot: Boot) -> None:
        raise Started(boot)

    monkeypatch.setattr(serve, "EngineClient", engine)
    app = typer.Typer()
    app.command()(serve.command)

    def run(*arguments: str, **env: str) -> Boot:
        result = typer.testing.CliRunner().invoke(app, [str(model), *arguments], env=env)
        assert isinstance(result.exception, Started), (result.output, result.exception)
        return result.exception.args[0]

    return run


BECOMES: list[tuple[list[str], dict[str, Any]]] = [
    (["--scheduler", "prefill_first"], {"scheduler": "prefill_first"}),
    (["--parallel", "7"], {"max_batch_size": 7}),
    (["--n-parallel", "7"], {"max_batch_size": 7}),
    (["--max-batch-size", "9"], {"max_batch_size": 9}),
    (["--max-queue-depth", "5"], {"max_queue_depth": 5}),
    (["--max-batch-tokens", "300"], {"max_batch_tokens": 300}),
    (["--max-requests-per-batch", "12"], {"max_requests_per_batch": 12}),
    (["--prefill-chunk-size", "256"], {"prefill_chunk": 256}),
    (["--batch-size", "256"], {"prefill_chunk": 256}),
    (["--prefill-chunk-size", "0"], {"prefill_chunk": 0}),
    (["--prefill-grant-interval", "0"], {"prefill_grant_interval": 0}),
    (["--max-batch-prefill", "2"], {"max_batch_prefill": 2}),
    (["--max-batch-prefill-tokens", "0"], {"max_batch_prefill_tokens": 0}),
    (["--enable-preemption"], {"enable_preemption": True}),
    (["--preemption-policy", "lowest-priority"], {"preemption_policy": "lowest-priority"}),
    (["--pressure-policy", "newest_stalled"], {"pressure_policy": "newest_stalled"}),
    (["--cpu-offload-space", "0.5"], {"swap_bytes": GIB // 2}),
    (["--kv-cache-budget", "512Mi"], {"kv_cache_budget": "512Mi"}),
    (["--kv-cache-budget-min", "1G"], {"kv_cache_budget_min": 10**9}),
    (["--kv-admission-watermark", "0.2"], {"admission_watermark": 0.2}),
    (["--safety-margin", "0.2"], {"admission_watermark": 0.2}),
    (["--page-size", "32"], {"page_size": 32}),
    (["--num-blocks", "99"], {"num_blocks": 99}),
    (["--max-memory-percent", "0.5"], {"max_memory_percent": 0.5}),
    (["--no-allow-block-sharing"], {"prefix_cache": False}),
    (["--no-prompt-cache"], {"prefix_cache": False}),
    (["--ctx-size", "8192"], {"context_per_slot": 2048}),
    (["--threads", "3"], {"threads": 3}),
    (["--dtype", "float16"], {"dtype": "float16"}),
    (["--kv-cache-dtype", "bf16"], {"kv_dtype": "bf16"}),
    (["--quantize", "int8"], {"quantize": "int8"}),
    (["--cache-dir", "/x"], {"cache_dir": "/x"}),
    (["--deterministic"], {"deterministic": True}),
    (["--decode-storage-backend", "paged"], {}),
]
SWITCHES = {"--no-allow-block-sharing": ("WEIR_ALLOW_BLOCK_SHARING", "0")}


@pytest.mark.parametrize(("arguments", "values"), BECOMES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_a_flag_and_its_variable_become_the_same(served: Callable[..., Boot], arguments: list[str], values: dict[str, Any]):
    plain = served()
    expected = msgspec.structs.replace(plain, **values)
    assert served(*arguments) == expected and (expected != plain or not values)
    name, value = SWITCHES.get(arguments[0], (flags.variable(arguments[0]), (arguments[1:] or ["1"])[0]))
    assert served(**{name: value}) == expected


@pytest.mark.parametrize(("name", "value", "values"), [
    ("LLAMA_ARG_BATCH", "128", {"prefill_chunk": 128}), ("MLXCEL_PREFILL_CHUNK", "128", {"prefill_chunk": 128}),
    ("MLXCEL_KV_CACHE_BUDGET", "none", {"kv_cache_budget": "none"}),
    ("MLXCEL_KV_ADMISSION_WATERMARK", "0.3", {"admission_watermark": 0.3}),
])  # fmt: skip
def test_the_names_that_other_servers_have_for_it(served: Callable[..., Boot], name: str, value: str, values: dict[str, Any]):
    assert served(**{name: value}) == msgspec.structs.replace(served(), **values)
    assert served("-b", "64", **{name: value}).prefill_chunk == 64, "flags win"


def test_values_of_service_links_are_no_settings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """vllm-project/vllm#15613: for a Service called `weir` the variable WEIR_PORT is tcp://…"""
    for name in ("WEIR_PORT", "WEIR_PARALLEL", "LLAMA_ARG_BATCH", "MLXCEL_PREFILL_CHUNK"):
        monkeypatch.setenv(name, "tcp://10.96.3.7:8080")
    monkeypatch.setenv("WEIR_MAX_QUEUE_DEPTH", "6")
    main.drop_service_links()
    told = capsys.readouterr().err
    assert told.count("is a service link and no setting") == 4 and "WEIR_PARALLEL" not in os.environ
    assert os.environ["WEIR_MAX_QUEUE_DEPTH"] == "6"


def test_the_watermark_of_auto_depends_on_the_scheduler():
    """transformers' ContinuousBatchingConfig: 0.15 with fifo, 0 with prefill_first; without a word ours, 0.01."""
    assert boot().admission_watermark == boot(scheduler="prefill_first").admission_watermark == 0.01
    assert boot(kv_admission_watermark="auto").admission_watermark == 0.15
    assert boot(kv_admission_watermark="auto", scheduler="prefill_first").admission_watermark == 0.0


def test_the_context_is_shared_by_the_stated_batch_else_by_the_slots_and_whole_without_batching():
    assert boot(ctx_size=8192).context_per_slot == 2048
    assert boot(ctx_size=8192, parallel=3).context_per_slot == 2730
    assert boot(ctx_size=8192, parallel=3, max_batch_size=2).context_per_slot == 4096
    alone = boot(ctx_size=8192, no_batch=True)
    assert (alone.context_per_slot, alone.max_batch_size, alone.max_requests_per_batch, alone.batching) == (8192, 1, 1, False)
    assert boot(ctx_size=2048).context_per_slot == 512
    for least in ({"ctx_size": 2047}, {"ctx_size": 511, "no_batch": True}):
        with pytest.raises(UserError, match="under the least of 512"):
            boot(**least)


def test_dense_is_one_page_for_the_context_of_a_row(monkeypatch: pytest.MonkeyPatch):
    assert boot(null_model=True, decode_storage_backend="dense").page_size == 8192
    assert boot(null_model=True, decode_storage_backend="dense", ctx_size=4 * 1000).page_size == 1008
    assert boot(null_model=True, decode_storage_backend="dense", ctx_size=1 << 20).page_size == 8192, "no more than the model's"


@pytest.mark.parametrize(("given", "words"), [
    ({"scheduler": "lifo"}, "--scheduler lifo: it is fifo or prefill_first."),
    ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: it is fp32 or bf16."),
    ({"quantize": "int5"}, "--quantize int5: it is auto, int8 or none."),
    ({"pressure_policy": "random"}, "--pressure-policy random: it is auto, newest_stalled or least_progress."),
    ({"preemption_policy": "shortest"}, "longest-first or lowest-priority"),
    ({"decode_storage_backend": "sparse"}, "auto, paged or dense"),
    ({"decode_storage_backend": "dense", "page_size": 16}, "--page-size contradicts it"),
    ({"no_batch": True, "max_batch_size": 2}, "--max-batch-size 2 contradicts it"),
    ({"no_batch": True, "max_requests_per_batch": 2}, "--max-requests-per-batch 2 contradicts it"),
    ({"kv_admission_watermark": "0.51"}, "from 0 to 0.5, or auto"),
    ({"kv_admission_watermark": "much"}, "from 0 to 0.5, or auto"),
    ({"kv_cache_budget_min": "1GB"}, "--kv-cache-budget-min"),
    ({"kv_cache_budget_min": "1e400"}, "more bytes than there are"),
    ({"kv_cache_budget": "1e400"}, "more bytes than there are"),
    ({"kv_cache_budget": "much"}, "or a fraction such as 0.5"),
    ({"cpu_offload_space": math.inf}, "--cpu-offload-space inf: it is at most"),
])  # fmt: skip
def test_what_no_engine_could_be_started_with_is_a_sentence(given: dict[str, Any], words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        boot(**given)
    with pytest.raises(UserError, match=re.escape(words)):
        boot_of("/no/such/model", EngineFlags(threads=1, **given))


NUMBERS = [name for name, kind in get_type_hints(EngineFlags).items() if {int, float} & {kind, *get_args(kind)}]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_no_message_could_hold_is_a_sentence(name: str):
    with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} {10**30}: it is at most"):
        boot_of(MODEL, dataclasses.replace(EngineFlags(), **{name: 10**30}))


@pytest.mark.parametrize("flag", flags.NOT_YET)
def test_what_does_not_exist_yet_is_refused_by_name(flag: str):
    for argument in (flag, flag + "=1"):
        with pytest.raises(UserError, match=f"^{flag} is not available yet"):
            main.refuse_what_is_not_there(["serve", "m", argument])


def test_nothing_that_takes_long_is_imported_where_a_signal_would_be_a_traceback():
    """Ctrl-C is caught inside `main`, so what is imported to get there must be next to nothing."""
    code = "import weir_server.__main__, sys; print({m.split('.')[0] for m in sys.modules} & {'typer', 'aiohttp', 'msgspec'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_run_and_chat_have_one_slot_and_chunks_of_2048_and_only_chat_keeps_what_was_said():
    run, chat = (TalkFlags(threads=1, ctx_size=4096).boot(MODEL, prompt_cache) for prompt_cache in (False, True))
    for b in (run, chat):
        assert (b.max_batch_size, b.max_requests_per_batch, b.context_per_slot, b.prefill_chunk) == (1, 1, 4096, 2048)
    assert (run.prefix_cache, chat.prefix_cache) == (False, True)
