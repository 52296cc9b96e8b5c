"""`weir-server serve`: flags → Boot, Options, Addresses; then the life of the server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir_server.cli.boot import boot_of, load_text, name_of, one_of, watermark_of
from weir_server.cli.bootfile import MOST_SECONDS, BootFile, read_boot_file
from weir_server.cli.flags import API, OPERATION, EngineFlags, ModelArgument, option, with_flags
from weir_server.cli.keys import read_keys
from weir_server.contract import CONTROL_PORT, HTTP_PORT, Plant, Slo
from weir_server.http.engine_client import EngineClient
from weir_server.link.errors import UserError

if TYPE_CHECKING:  # what takes long to import is imported where it is used, while the engine already loads
    from weir_server.http.service import Service

LOOPBACKS = ("localhost", "127.0.0.1", "::1")


@with_flags(EngineFlags)
def command(
    model: ModelArgument,
    *,
    host: Annotated[str | None, option(API, "--host", help="Default: every address, IPv4 and IPv6.")] = None,
    port: Annotated[int, option(API, "--port", min=0, max=65535, help="0 picks a free port and prints it.")] = HTTP_PORT,
    control_port: Annotated[int, option(API, "--control-port", min=0, max=65535, help="Port for the operator.")] = CONTROL_PORT,
    control_host: Annotated[str | None, option(API, "--control-host", help="Default: as --host, with a token file.")] = None,
    control_token_file: Annotated[
        str | None, option(API, "--control-token-file", help="Bearer token of that port; without, loopback only.")
    ] = None,
    api_key: Annotated[str | None, option(API, "--api-key", help="Ask clients for this bearer token.")] = None,
    api_key_file: Annotated[
        str | None, option(API, "--api-key-file", help="One key a line, or name:key; read again as it changes.")
    ] = None,
    served_model_name: Annotated[str | None, option(API, "--served-model-name", help="Default: the name of the file.")] = None,
    body_limit: Annotated[int, option(API, "--body-limit", min=1024, help="Bytes of the largest request body.")] = 16 << 20,
    no_metrics: Annotated[bool, option(API, "--no-metrics", help="Serve no /metrics.")] = False,
    flags: EngineFlags,
    boot_file: Annotated[
        str | None, option(OPERATION, "--boot-file", help="YAML with slo, initial knobs and drain_timeout; flags win.")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        option(OPERATION, "--drain-timeout", min=0, max=MOST_SECONDS,
               help="Seconds that SIGTERM gives to requests. Default: 120."),
    ] = None,
    leave_seconds: Annotated[
        float, option(OPERATION, "--leave-seconds", min=0, max=300, help="Seconds for which SIGTERM still takes requests.")
    ] = 0.0,
    slo_ttft: Annotated[float | None, option(OPERATION, "--slo-ttft", help="Objective in seconds. Default: 2.")] = None,
    slo_tpot: Annotated[float | None, option(OPERATION, "--slo-tpot", help="Objective in seconds. Default: 0.08.")] = None,
    state_dir: Annotated[
        str | None, option(OPERATION, "--state-dir", help="After an unclean exit start with 0.85 of the KV budget kept there.")
    ] = None,
    log_level: Annotated[str, option(OPERATION, "--log-level", help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve MODEL by an OpenAI-compatible API with continuous batching.

    Every flag is also read from WEIR_<NAME>; flags win. SIGTERM drains and exits 0, a second one ends at once.
    """
    log_to_stderr(log_level)
    file = read_boot_file(boot_file)
    slo = Slo(_positive("--slo-ttft", slo_ttft, file.ttft, 2.0), _positive("--slo-tpot", slo_tpot, file.tpot, 0.08))
    keys = read_keys(_or_empty(api_key, "WEIR_API_KEY"), _or_empty(api_key_file, "WEIR_API_KEY_FILE"))
    if control_host and not control_token_file and control_host not in LOOPBACKS:
        raise UserError(f"--control-host {control_host} needs --control-token-file: without a token it is loopback only.")
    boot = boot_of(model, flags)
    given = {
        "max_batch_size": flags.max_batch_size, "max_queue_depth": flags.max_queue_depth,
        "admission_watermark": watermark_of(flags),
    }  # fmt: skip
    engine = EngineClient(boot)

    import uvloop

    from weir_server.http.lifecycle import Addresses, serve
    from weir_server.http.service import Options

    options = Options(
        slo=slo, body_limit=body_limit, drain_timeout=lambda: _drain_timeout(drain_timeout, boot_file, file),
        initial={k: v for k, v in file.initial.items() if given.get(k) is None}, api_keys=keys,
        token_file=control_token_file, metrics=not no_metrics, state_dir=state_dir, leave_seconds=leave_seconds,
    )  # fmt: skip
    addresses = Addresses(host, port, control_host, control_port)
    path = Path(boot.model)
    name = served_model_name or name_of(path)
    raise typer.Exit(uvloop.run(serve(engine, options, addresses, lambda: load_text(path, name), announce)))


def announce(service: Service) -> None:
    """What a person wants to see at start, on stdout."""
    ready, plant = service.ready, service.ready.plant
    facts = ", ".join(f"{k} {v}" for k, v in ready.model.items() if v is not None and k != "decode_path")
    print(f"model {service.model.name}: {facts}; loaded in {ready.load_seconds:.1f} s")
    print(f"context {ready.context_per_slot} tokens a slot; {service.board.boot}")
    for line in ready.sizing:
        print(f"  {line}")
    if plant is not None:
        print(plant_in_words(plant, ready.plant_steps))
    print(f"Model {service.model.name} decode path: {ready.model.get('decode_path')}", flush=True)


def plant_in_words(plant: Plant, steps: Mapping[str, float]) -> str:
    """`steps`: measured medians by name, in seconds."""
    measured = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in steps.items())
    return (
        f"step time {plant.a * 1e3:.1f} ms + {plant.b * 1e3:.2f} ms a row + {plant.c * 1e6:.2f} µs a context token"
        f" + {plant.p * 1e3:.2f} ms a prompt token ({measured})"
    )


def log_to_stderr(level: str) -> None:
    one_of("--log-level", level, "debug", "info", "warning", "error")
    os.environ["WEIR_LOG_LEVEL"] = level  # the child logs alike
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _or_empty(value: str | None, variable: str) -> str | None:
    """An empty variable counts as absent for the command line's parser, which is not what its author meant."""
    return os.environ.get(variable) if value is None else value


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
