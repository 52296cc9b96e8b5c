"""The engine child's life: load, size, measure, say Ready, then loop until Quit or until the parent is gone."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple, Protocol

from weir_server.contract import Envelope, Geometry, Knobs
from weir_server.engine.core import Engine, EngineConfig
from weir_server.engine.memory import cgroup_limit, host_available, memory_used
from weir_server.engine.plant import measure
from weir_server.exec.interface import Runner
from weir_server.exec.null import NullModel
from weir_server.kv.pool import usable_chunks
from weir_server.kv.shape import Shape
from weir_server.kv.sizing import Machine, Sizing, Wish, size_pool
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot, Quit, Ready, ToChild, ToParent
from weir_server.policy.limits import PRESSURE, Limits, token_budget

log = logging.getLogger("weir.engine")

MAX_BATCH = 64
"""The envelope's upper bound of max_batch_size where none is given."""
MAX_QUEUE = 1024
MAX_WATERMARK = 0.5
STUCK_WAIT = 0.05
"""Seconds to wait for a message after a step that fed nothing, so that a fault of the policy can't spin."""


class Channel(Protocol):
    """What the loop needs of link.channel.Channel. Both raise ChannelClosed when the parent is gone."""

    def recv(self, timeout: float | None) -> list[ToChild]: ...
    def send(self, message: ToParent) -> None: ...


class Model(Protocol):
    """A loaded model that has no pool yet."""

    context_length: int
    weights_bytes: int
    window: int | None  # tokens that a sliding layer sees, as exec.interface.Runner says: rings are sized by it at boot
    decode_path: str

    @property
    def model(self) -> dict[str, str | int | float | bool | None]: ...
    def chunk_bytes(self, page_size: int) -> int: ...
    def geometry(self, page_size: int) -> Geometry: ...
    def activation_bytes(self, max_tokens: int) -> int: ...
    def runner(self, num_chunks: int, swap_chunks: int = 0) -> Runner: ...
    def settle(self) -> None: ...


class Plan(NamedTuple):
    """What the boot values come to for a loaded model."""

    config: EngineConfig
    knobs: Knobs
    envelope: Envelope
    sizing: Sizing


def run(boot: Boot, channel: Channel) -> None:
    """Serve until told to quit. Raises UserError before Ready (the user can put it right), ChannelClosed without a parent."""
    started = time.monotonic()
    process = memory_used()
    model = _load(boot)
    plan = plan_boot(boot, model, process)
    runner = model.runner(plan.sizing.num_chunks, plan.sizing.swap_chunks)
    engine, envelope = Engine(runner, plan.config, plan.knobs), plan.envelope
    if not runner.supports_batching:
        log.warning("%s does not support batched decode; clamping max_batch_size", boot.model)
        envelope = Envelope((1, 1), envelope.kv_cache_budget, envelope.max_queue_depth, envelope.admission_watermark)
        engine.target = plan.knobs.merged({"max_batch_size": 1})
    usable, context = usable_chunks(plan.sizing.num_chunks), plan.config.context_per_slot
    plant, steps = measure(
        runner, usable=usable, context=context, max_rows=envelope.max_batch_size[1],
        prefill_tokens=plan.config.limits.prefill_tokens(decoding=True),
    ) if boot.measure else (None, {})
    channel.send(
        Ready(
            model=model.model, vocab_size=runner.vocab_size, context_per_slot=context,
            max_servable=engine.batch.cache.shape.servable(usable, context), envelope=envelope,
            geometry=runner.geometry, usable_blocks=usable, boot=engine.target, plant=plant, plant_steps=steps,
            sizing=plan.sizing.lines, load_seconds=time.monotonic() - started, memory_used=memory_used(),
            window=runner.window, piece=plan.config.limits.piece,
            swap_bytes=usable_chunks(plan.sizing.swap_chunks) * runner.geometry.chunk_bytes,
        )
    )
    threading.Thread(target=model.settle, name="settle", daemon=True).start()
    loop(engine, channel)


def loop(engine: Engine, channel: Channel) -> None:
    """Step while there is work, block while there is none; a report after each step and whenever messages changed something."""
    left: list[ToChild] = []

    def receive(timeout: float | None = 0) -> list[ToChild]:
        messages = channel.recv(timeout)
        left.extend(m for m in messages if isinstance(m, Quit))
        return [m for m in messages if not isinstance(m, Quit)]

    fed = True
    while not left:
        if not engine.busy or not fed:
            engine.handle(receive(_patience(engine)))
        fed = not engine.busy or engine.step(receive)
        channel.send(engine.report())


def _patience(engine: Engine) -> float | None:
    """Seconds to wait for a message: for ever while idle, but for a last reading of the memory that has been freed."""
    if engine.busy:
        return STUCK_WAIT
    return engine.meter.memory_due(engine.clock())


def plan_boot(boot: Boot, model: Model, process: int) -> Plan:
    """Envelope, knobs, step limits and pool size. `process`: bytes used before the model was loaded. Raises UserError."""
    context = min(boot.context_per_slot or model.context_length, model.context_length)
    rows = boot.max_batch_size if boot.batching else 1
    most_rows = _most_rows(boot, rows)
    limits = Limits(
        tokens=boot.max_batch_tokens or token_budget(most_rows, boot.prefill_chunk, context),
        chunk=boot.prefill_chunk,
        grant=boot.prefill_grant_interval,
        prompts=max(1, boot.max_batch_prefill),
        padded=boot.max_batch_prefill_tokens,
        prefill_first=boot.scheduler == "prefill_first",
        pressure=PRESSURE if boot.pressure_policy == "auto" else boot.pressure_policy,
        slot_victims=boot.preemption_policy if boot.enable_preemption else None,
    )
    limit, source = _memory_limit(boot)
    machine = Machine(
        limit=limit,
        limit_source=source,
        process=process,
        weights=model.weights_bytes,
        activations=model.activation_bytes(limits.tokens),
    )
    wish = Wish(
        budget=boot.kv_cache_budget, budget_min=boot.kv_cache_budget_min, num_blocks=boot.num_blocks,
        share=boot.max_memory_percent, context=context, slots=rows, swap_bytes=boot.swap_bytes,
    )
    geometry = model.geometry(boot.page_size)
    sizing = size_pool(machine, wish, geometry.chunk_bytes, Shape.of(geometry, model.window, limits.piece))
    knobs = Knobs(
        max_batch_size=rows,
        kv_cache_budget=sizing.budget,
        admission_watermark=0.0 if sizing.budget is None else boot.admission_watermark,
        max_queue_depth=boot.max_queue_depth,
    )
    envelope = Envelope((1, most_rows), sizing.budget_range, (1, max(MAX_QUEUE, boot.max_queue_depth)), (0.0, MAX_WATERMARK))
    config = EngineConfig(
        context, sizing.num_chunks, limits, model=boot.model, prefix_cache=boot.prefix_cache, swap_chunks=sizing.swap_chunks
    )
    return Plan(config, knobs, envelope, sizing)


def _memory_limit(boot: Boot) -> tuple[int, str]:
    """Bytes to size for, and whose word that is."""
    if boot.memory_limit is not None:
        return boot.memory_limit, "as asked"
    cgroup, host = cgroup_limit(), host_available() + memory_used()
    return (cgroup, "the cgroup's") if cgroup is not None and cgroup <= host else (host, "what the machine has available")


def _most_rows(boot: Boot, rows: int) -> int:
    """The envelope's upper bound of max_batch_size: no more than the tokens of a step, or a decode row might never run."""
    if not boot.batching:
        return 1
    most = max(boot.max_requests_per_batch or MAX_BATCH, 1)
    if rows > most and boot.max_requests_per_batch:
        raise UserError(f"--max-batch-size {rows} is above --max-requests-per-batch {most}")
    if boot.max_batch_tokens and rows > boot.max_batch_tokens:
        raise UserError(
            f"--max-batch-size {rows} is above --max-batch-tokens {boot.max_batch_tokens}: each row takes a token of a step"
        )
    most = max(most, rows)
    return min(most, boot.max_batch_tokens) if boot.max_batch_tokens else most


def _load(boot: Boot) -> Model:
    if boot.null_model:
        return NullModel(boot.page_size)
    from weir_server.exec.runner import load  # torch: not for the null model

    return load(boot)
