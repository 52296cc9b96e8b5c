"""`weir-server serve`: flags → Boot, Options, Addresses; then the life of the server."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir_server.cli.bootfile import BootFile, read_boot_file
from weir_server.cli.keys import read_keys
from weir_server.cli.machine import cpu_threads
from weir_server.contract import CONTROL_PORT, HTTP_PORT, Slo
from weir_server.http.engine_client import EngineClient
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot
from weir_server.model.files import resolve
from weir_server.policy.limits import context_per_slot

if TYPE_CHECKING:  # what takes long to import is imported where it is used, while the engine already loads
    from weir_server.http.service import Model, Service

API, MODEL, BATCH, KV, OPERATION = "API", "Model", "Batching", "KV cache", "Operation"
LOOPBACKS = ("localhost", "127.0.0.1", "::1")
AUTO_MARGIN = 0.15
"""`--safety-margin auto` with the fifo scheduler."""


def option(group: str, *names: str, help: str, **more: Any) -> Any:
    """A flag with its environment variable WEIR_<NAME>."""
    env = ["WEIR_" + names[0].split("/")[0].lstrip("-").replace("-", "_").upper(), *more.pop("env", ())]
    return typer.Option(*names, help=help, rich_help_panel=group, envvar=env, show_envvar=False, **more)


def command(
    model: Annotated[str, typer.Argument(help="A .gguf file, a Hugging Face directory, or package://distribution/file.")],
    host: Annotated[str | None, option(API, "--host", help="Default: every address, IPv4 and IPv6.")] = None,
    port: Annotated[int, option(API, "--port", min=0, max=65535, help="0 picks a free port and prints it.")] = HTTP_PORT,
    api_key: Annotated[str | None, option(API, "--api-key", help="Ask clients for this bearer token.")] = None,
    api_key_file: Annotated[str | None, option(API, "--api-key-file", help="One key a line, or name:key.")] = None,
    served_model_name: Annotated[str | None, option(API, "--served-model-name", help="Default: the name of the file.")] = None,
    body_limit: Annotated[int, option(API, "--body-limit", min=1024, help="Bytes of the largest request body.")] = 16 << 20,
    no_metrics: Annotated[bool, option(API, "--no-metrics", help="Serve no /metrics.")] = False,
    control_port: Annotated[int, option(API, "--control-port", min=0, max=65535, help="Port for the operator.")] = CONTROL_PORT,
    control_host: Annotated[str | None, option(API, "--control-host", help="Default: as --host, with a token file.")] = None,
    control_token_file: Annotated[
        str | None, option(API, "--control-token-file", help="Bearer token of that port; without, loopback only.")
    ] = None,
    ctx_size: Annotated[
        int | None, option(MODEL, "--ctx-size", help="Context of the server; each of N slots gets 1/N. Default: model's.")
    ] = None,
    dtype: Annotated[str, option(MODEL, "--dtype", help="Type that the weights are computed in.")] = "float32",
    cache_dir: Annotated[str | None, option(MODEL, "--cache-dir", help="Where converted weights are kept.")] = None,
    threads: Annotated[int | None, option(MODEL, "--threads", min=1, help="Default: the cgroup's CPU quota.")] = None,
    deterministic: Annotated[
        bool, option(MODEL, "--deterministic", help="Fail at start unless answers do not depend on neighbours.")
    ] = False,
    parallel: Annotated[int, option(BATCH, "--parallel", "--n-parallel", min=1, help="Slots.")] = 4,
    max_batch_size: Annotated[
        int | None, option(BATCH, "--max-batch-size", min=1, help="Most active sequences at start. Default: --parallel.")
    ] = None,
    max_queue_depth: Annotated[
        int | None, option(BATCH, "--max-queue-depth", min=1, help="Most waiting requests, then 503. Default: 32.")
    ] = None,
    scheduler: Annotated[str, option(BATCH, "--scheduler", help="fifo.")] = "fifo",
    max_batch_tokens: Annotated[int | None, option(BATCH, "--max-batch-tokens", min=1, help="Token budget of a step.")] = None,
    max_requests_per_batch: Annotated[
        int | None, option(BATCH, "--max-requests-per-batch", min=1, help="Hard cap of --max-batch-size while running.")
    ] = None,
    prefill_chunk_size: Annotated[
        int | None,
        option(BATCH, "--prefill-chunk-size", "-b", "--batch-size", min=0, env=["LLAMA_ARG_BATCH"],
               help="Prompt tokens of a step; 0 turns chunking off. Default: adaptive."),
    ] = None,
    prefill_grant_interval: Annotated[
        int, option(BATCH, "--prefill-grant-interval", min=0, help="A prefill turn after so many decode steps; 0 = none.")
    ] = 16,
    kv_cache_budget: Annotated[
        str, option(KV, "--kv-cache-budget", help="auto, bytes (512Mi), a fraction (0.5) or none.")
    ] = "auto",
    kv_cache_budget_min: Annotated[
        str | None, option(KV, "--kv-cache-budget-min", help="Lowest live budget. Default: one full context.")
    ] = None,
    kv_admission_watermark: Annotated[
        str | None,
        option(KV, "--kv-admission-watermark", "--safety-margin",
               help="Share of the budget kept free when admitting while anything decodes, or auto. Default: 0.01."),
    ] = None,
    page_size: Annotated[int, option(KV, "--page-size", min=1, help="Tokens of a block.")] = 16,
    num_blocks: Annotated[int | None, option(KV, "--num-blocks", min=1, help="Size of the pool. Default: from memory.")] = None,
    max_memory_percent: Annotated[
        float, option(KV, "--max-memory-percent", min=0.01, max=1.0, help="Share of the memory limit to use.")
    ] = 0.9,
    prompt_cache: Annotated[
        bool, option(KV, "--allow-block-sharing/--no-prompt-cache", help="Reuse the KV of equal prompt starts.")
    ] = True,
    boot_file: Annotated[
        str | None, option(OPERATION, "--boot-file", help="YAML with slo, initial knobs and drain_timeout; flags win.")
    ] = None,
    slo_ttft: Annotated[float | None, option(OPERATION, "--slo-ttft", help="Objective in seconds. Default: 2.")] = None,
    slo_tpot: Annotated[float | None, option(OPERATION, "--slo-tpot", help="Objective in seconds. Default: 0.08.")] = None,
    state_dir: Annotated[
        str | None, option(OPERATION, "--state-dir", help="After an unclean exit start with 0.85 of the KV budget kept there.")
    ] = None,
    drain_timeout: Annotated[
        float | None, option(OPERATION, "--drain-timeout", min=0, help="Seconds that SIGTERM gives to requests. Default: 120.")
    ] = None,
    null_model: Annotated[bool, typer.Option("--null-model", hidden=True, help="Ids from a hash, no weights.")] = False,
    log_level: Annotated[str, option(OPERATION, "--log-level", help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve MODEL by an OpenAI-compatible API with continuous batching.

    Every flag is also read from WEIR_<NAME>; flags win. SIGTERM drains and exits 0, a second one ends at once.
    """
    _log_to_stderr(log_level)
    if scheduler != "fifo":
        raise UserError(f"--scheduler {scheduler} is not available yet; fifo is.")
    file = read_boot_file(boot_file)
    watermark = _watermark(kv_admission_watermark)
    slots = max_batch_size or parallel
    path = resolve(model)
    boot = Boot(
        model=str(path), threads=threads or cpu_threads(), dtype=dtype,
        context_per_slot=None if ctx_size is None else context_per_slot(ctx_size, slots),
        max_batch_size=slots, max_requests_per_batch=max_requests_per_batch, max_batch_tokens=max_batch_tokens,
        prefill_chunk=prefill_chunk_size, prefill_grant_interval=prefill_grant_interval,
        kv_cache_budget=kv_cache_budget, kv_cache_budget_min=_bytes("--kv-cache-budget-min", kv_cache_budget_min),
        admission_watermark=0.01 if watermark is None else watermark, max_queue_depth=max_queue_depth or 32,
        page_size=page_size, num_blocks=num_blocks, max_memory_percent=max_memory_percent, prefix_cache=prompt_cache,
        cache_dir=cache_dir, deterministic=deterministic, null_model=null_model,
    )  # fmt: skip
    slo = Slo(_positive("--slo-ttft", slo_ttft, file.ttft, 2.0), _positive("--slo-tpot", slo_tpot, file.tpot, 0.08))
    keys = read_keys(_or_empty(api_key, "WEIR_API_KEY"), _or_empty(api_key_file, "WEIR_API_KEY_FILE"))
    if control_host and not control_token_file and control_host not in LOOPBACKS:
        raise UserError(f"--control-host {control_host} needs --control-token-file: without a token it is loopback only.")
    given = {"max_batch_size": max_batch_size, "max_queue_depth": max_queue_depth, "admission_watermark": watermark}
    engine = EngineClient(boot)

    import uvloop

    from weir_server.http.lifecycle import Addresses, serve
    from weir_server.http.service import Options

    options = Options(
        slo=slo, body_limit=body_limit, drain_timeout=lambda: _drain_timeout(drain_timeout, boot_file, file),
        initial={k: v for k, v in file.initial.items() if given.get(k) is None}, api_keys=keys,
        token_file=control_token_file, metrics=not no_metrics, state_dir=state_dir,
    )  # fmt: skip
    addresses = Addresses(host, port, control_host, control_port)
    name = served_model_name or path.name.removesuffix(".gguf")
    raise typer.Exit(uvloop.run(serve(engine, options, addresses, lambda: load_model(path, name), announce)))


def load_model(path: Path, name: str) -> Model:
    """The text side of the model. Raises ModelError."""
    from weir_server.http.service import Model
    from weir_server.text.defaults import load_defaults
    from weir_server.text.template import ChatTemplate, find_template
    from weir_server.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    template = ChatTemplate(find_template(path), tokenizer.bos, tokenizer.eos)
    defaults = load_defaults(path, tokenizer)
    return Model(name, tokenizer.hiding(defaults.stop_ids), template, defaults)


def announce(service: Service) -> None:
    """What a person wants to see at start, on stdout."""
    ready, plant = service.ready, service.ready.plant
    facts = ", ".join(f"{k} {v}" for k, v in ready.model.items() if v is not None and k != "decode_path")
    print(f"model {service.model.name}: {facts}; loaded in {ready.load_seconds:.1f} s")
    print(f"context {ready.context_per_slot} tokens a slot; {service.board.boot}")
    for line in ready.sizing:
        print(f"  {line}")
    if plant is not None:
        steps = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in ready.plant_steps.items())
        print(
            f"step time {plant.a * 1e3:.1f} ms + {plant.b * 1e3:.2f} ms a row + {plant.c * 1e6:.2f} µs a context token"
            f" + {plant.p * 1e3:.2f} ms a prompt token ({steps})"
        )
    print(f"decode path: {ready.model.get('decode_path')}", flush=True)


def _log_to_stderr(level: str) -> None:
    if level not in ("debug", "info", "warning", "error"):
        raise UserError(f"--log-level {level}: it is debug, info, warning or error.")
    os.environ["WEIR_LOG_LEVEL"] = level  # the child logs alike
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _or_empty(value: str | None, variable: str) -> str | None:
    """An empty variable counts as absent for the command line's parser, which is not what its author meant."""
    return os.environ.get(variable) if value is None else value


def _watermark(text: str | None) -> float | None:
    if text is None or text == "auto":
        return None if text is None else AUTO_MARGIN
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 0.5:
        raise UserError(f"--kv-admission-watermark {text}: it is a share from 0 to 0.5, or auto.")
    return value


def _bytes(flag: str, text: str | None) -> int | None:
    from weir_server.kv.sizing import parse_quantity

    try:
        return None if text is None else parse_quantity(text)
    except ValueError as e:
        raise UserError(f"{flag}: {e}.") from None


def _positive(flag: str, given: float | None, filed: float | None, default: float) -> float:
    value = default if given is None and filed is None else filed if given is None else given
    if value is None or not 0 < value < 1e6:
        raise UserError(f"{flag} {value}: it is a number of seconds above 0.")
    return value


def _drain_timeout(given: float | None, path: str | None, at_start: BootFile) -> float:
    """The boot file's present value; if it has become unreadable, the one at start."""
    if given is not None:
        return given
    try:
        filed = read_boot_file(path).drain_timeout
    except UserError as e:
        logging.getLogger("weir").warning("%s", e)
        filed = at_start.drain_timeout
    return 120.0 if filed is None else filed
