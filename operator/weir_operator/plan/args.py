"""What a server is started with: the same in a pod and on this machine.

Flags carry what is fixed for the life of a process (model, envelope). What may change without a restart (objectives, start
values of the knobs, the drain timeout) is in the boot file, which the server reads at start and again when it drains.
"""

from __future__ import annotations

from typing import Any

from weir_operator.api.knobs import Knobs
from weir_operator.api.quantity import parse_bytes, parse_duration
from weir_operator.api.types import Spec
from weir_operator.plan.sources import locate, served_name

PARALLEL = 4
"""Slots that the context budget is divided by, and the batch at start where the manifest names none: the server's default."""


def server_args(spec: Spec, parallel: int = PARALLEL) -> list[str]:
    """`serve MODEL …`: everything that depends on the manifest and not on where the server runs."""
    engine, limits = spec.engine, spec.engine.limits
    args = ["serve", locate(spec).path, f"--served-model-name={served_name(spec.model)}", f"--parallel={parallel}"]
    if spec.model.max_model_len is not None:  # the flag is the whole server's budget
        args.append(f"--ctx-size={spec.model.max_model_len * parallel}")
    for flag, value in (
        ("quantize", spec.model.quantization),
        ("dtype", spec.model.dtype),
        ("threads", engine.threads),
        ("max-requests-per-batch", limits.max_batch_size),
        ("max-batch-tokens", limits.batch_tokens),
        ("kv-cache-budget", parse_bytes(limits.kv_cache) if limits.kv_cache else None),
        ("prefill-chunk-size", engine.prefill_chunk_tokens),
        ("prefill-grant-interval", engine.prefill_grant_interval),
        ("scheduler", engine.scheduler),
        ("preemption-policy", engine.preemption),
        ("pressure-policy", engine.pressure_policy),
        ("cpu-offload-space", f"{parse_bytes(engine.offload) / 2**30:.6g}" if engine.offload else None),  # in GiB
    ):
        if value is not None:
            args.append(f"--{flag}={value}")
    if engine.preemption:
        args.append("--enable-preemption")
    if not engine.prefix_caching:
        args.append("--no-prompt-cache")
    return args + engine.extra_args


def initial_knobs(knobs: Knobs) -> dict[str, Any]:
    """Declared start values by the contract's names and units; what is not declared is absent."""
    watermark, budget = knobs.admission_watermark_percent.initial, knobs.kv_cache_budget.initial
    values = {
        "max_batch_size": knobs.max_batch_size.initial,
        "max_queue_depth": knobs.max_queue_depth.initial,
        "kv_cache_budget": parse_bytes(budget) if budget is not None else None,
        "admission_watermark": watermark / 100 if watermark is not None else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def boot_file(spec: Spec) -> dict[str, Any]:
    """Content of the file behind `--boot-file`: seconds, bytes, rows and shares."""
    content: dict[str, Any] = {"initial": initial_knobs(spec.tuning.knobs), "drain_timeout": parse_duration(spec.drain.timeout)}
    if spec.slo:
        content["slo"] = {"ttft": parse_duration(spec.slo.ttft), "tpot": parse_duration(spec.slo.tpot)}
    return content
