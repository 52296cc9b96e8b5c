"""`weir-server size`: what a server would make of its memory, without serving: the same arithmetic as at start."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer

from weir_server.cli.boot import boot_of, name_of, one_of, quantity
from weir_server.cli.flags import EngineFlags, ModelArgument, option, with_flags
from weir_server.cli.serve import log_to_stderr, plant_in_words
from weir_server.contract import Envelope, Geometry, Knobs, Plant
from weir_server.engine.memory import memory_used
from weir_server.http.engine_client import EngineClient
from weir_server.kv.pool import usable_chunks
from weir_server.link.messages import Boot

SIZE = "Size"


@with_flags(EngineFlags)
def command(
    model: ModelArgument,
    *,
    memory_limit: Annotated[
        str | None, option(SIZE, "--memory-limit", help="As if this were it (2Gi). Default: the cgroup's, else what is free.")
    ] = None,
    plant: Annotated[bool, option(SIZE, "--plant", help="Load the model and measure its step time, too.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="text or json.", rich_help_panel=SIZE)] = "text",
    flags: EngineFlags,
) -> None:
    """Print how a server with these flags would share out its memory, without loading the weights.

    The flags are those of serve. Exit status 2 if the memory does not hold it, with a sentence that says what to change.
    """
    log_to_stderr("warning")
    one_of("--output", output, "text", "json")
    limit = quantity("--memory-limit", memory_limit)
    boot = msgspec.structs.replace(boot_of(model, flags), memory_limit=limit)
    path = Path(boot.model)
    found = asyncio.run(_measured(boot)) if plant else _dry(boot)
    if output == "json":
        typer.echo(orjson.dumps({"model": name_of(path), **found.to_wire()}, option=orjson.OPT_INDENT_2).decode())
        return
    typer.echo(f"model {name_of(path)}; context {found.context} tokens a slot; {found.knobs}")
    for line in found.lines:
        typer.echo(f"  {line}")
    if found.plant is not None:
        typer.echo(plant_in_words(found.plant, found.steps))


@dataclass(frozen=True)
class Found:
    """`pool`: bytes without what is kept for padding. `steps`: seconds by kind of step, where they were measured."""

    context: int
    geometry: Geometry
    envelope: Envelope
    knobs: Knobs
    pool: int
    swap: int
    lines: list[str]
    plant: Plant | None = None
    steps: dict[str, float] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        wire = asdict(self)
        return {
            "context_per_slot": self.context, "kv": wire["geometry"], "envelope": wire["envelope"], "boot": wire["knobs"],
            "pool_bytes": self.pool, "swap_bytes": self.swap, "arithmetic": self.lines, "plant": wire["plant"],
            "steps": self.steps,
        }  # fmt: skip


def _dry(boot: Boot) -> Found:
    """From the model's headers alone. Raises UserError."""
    from weir_server.engine.child import plan_boot

    process = memory_used()
    model = _described(boot)
    plan, geometry = plan_boot(boot, model, process), model.geometry(boot.page_size)
    chunks = usable_chunks(plan.sizing.num_chunks)
    return Found(
        plan.config.context_per_slot, geometry, plan.envelope, plan.knobs, chunks * geometry.chunk_bytes,
        usable_chunks(plan.sizing.swap_chunks) * geometry.chunk_bytes, plan.sizing.lines,
    )  # fmt: skip


def _described(boot: Boot) -> Any:
    if boot.null_model:
        from weir_server.exec.null import NullModel

        return NullModel(boot.page_size)
    from weir_server.exec.runner import describe

    return describe(boot)


async def _measured(boot: Boot) -> Found:
    """From an engine that is started for it. Raises UserError and EngineFailed."""
    engine = EngineClient(boot)
    try:
        ready = await engine.ready()
    finally:
        await engine.stop()
    chunk = ready.geometry.chunk_bytes
    return Found(
        ready.context_per_slot, ready.geometry, ready.envelope, ready.boot, ready.usable_blocks * chunk, ready.swap_bytes,
        ready.sizing, ready.plant, ready.plant_steps,
    )  # fmt: skip
