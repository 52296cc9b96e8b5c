"""Flags of the engine → the one message that starts it, and the model's text side. What contradicts itself ends here."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from weir_server.cli.flags import EngineFlags
from weir_server.cli.machine import cpu_threads
from weir_server.kv.sizing import parse_budget, parse_quantity
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot
from weir_server.model.files import resolve
from weir_server.policy.limits import context_per_slot

if TYPE_CHECKING:  # imported where it is used, while the engine already loads
    from weir_server.http.service import Model

WATERMARK = 0.01
MARGINS = {"fifo": 0.15, "prefill_first": 0.0}
"""`--safety-margin auto` by scheduler, as in transformers' ContinuousBatchingConfig."""
QUANTIZE = ("auto", "int8", "none")
PAGE = 16
MAX_QUEUE_DEPTH = 32
MOST = 2**31 - 1
"""No flag takes a larger number: beyond, nothing is meant, and the message to the engine has no room for it."""


def boot_of(model: str, flags: EngineFlags) -> Boot:
    """Raises UserError for values that no engine could be started with, before it looks for the model."""
    f = flags
    _check(f)
    slots = _slots(f)
    context = None if f.ctx_size is None else context_per_slot(f.ctx_size, slots)
    watermark, budget_min = watermark_of(f), quantity("--kv-cache-budget-min", f.kv_cache_budget_min)
    path = resolve(model)
    return Boot(
        model=str(path), threads=f.threads or cpu_threads(), dtype=f.dtype, quantize=f.quantize,
        kv_dtype=f.kv_cache_dtype, context_per_slot=context,
        max_batch_size=slots if f.max_batch_size is None else f.max_batch_size,
        max_requests_per_batch=1 if f.no_batch else f.max_requests_per_batch, max_batch_tokens=f.max_batch_tokens,
        prefill_chunk=f.prefill_chunk_size, prefill_grant_interval=f.prefill_grant_interval, scheduler=f.scheduler,
        max_batch_prefill=f.max_batch_prefill, max_batch_prefill_tokens=f.max_batch_prefill_tokens,
        pressure_policy=f.pressure_policy, enable_preemption=f.enable_preemption, preemption_policy=f.preemption_policy,
        swap_bytes=int(f.cpu_offload_space * (1 << 30)), kv_cache_budget=f.kv_cache_budget,
        kv_cache_budget_min=budget_min,
        admission_watermark=WATERMARK if watermark is None else watermark,
        max_queue_depth=f.max_queue_depth or MAX_QUEUE_DEPTH, page_size=_page(path, f, context), num_blocks=f.num_blocks,
        max_memory_percent=f.max_memory_percent, prefix_cache=f.allow_block_sharing and not f.no_prompt_cache,
        cache_dir=f.cache_dir, deterministic=f.deterministic, batching=not f.no_batch, null_model=f.null_model,
    )  # fmt: skip


def _check(f: EngineFlags) -> None:
    """What can be said of the values alone."""
    for field in fields(f):
        value = getattr(f, field.name)
        if isinstance(value, int | float) and not value <= MOST:
            raise UserError(f"--{field.name.replace('_', '-')} {value}: it is at most {MOST}.")
    one_of("--kv-cache-dtype", f.kv_cache_dtype, "fp32", "bf16")
    one_of("--quantize", f.quantize, *QUANTIZE)
    one_of("--scheduler", f.scheduler, *MARGINS)
    one_of("--pressure-policy", f.pressure_policy, "auto", "newest_stalled", "least_progress")
    one_of("--preemption-policy", f.preemption_policy, "longest-first", "lowest-priority")
    one_of("--decode-storage-backend", f.decode_storage_backend, "auto", "paged", "dense")
    if f.decode_storage_backend == "dense" and f.page_size is not None:
        raise UserError("--decode-storage-backend dense makes each row's context one page, so --page-size contradicts it.")
    parse_budget(f.kv_cache_budget)


def _slots(f: EngineFlags) -> int:
    """What an explicit --ctx-size is shared by: the explicit boot batch, else --parallel; one without batching."""
    if not f.no_batch:
        return f.max_batch_size or f.parallel
    for name, value in (("--max-batch-size", f.max_batch_size), ("--max-requests-per-batch", f.max_requests_per_batch)):
        if value is not None and value > 1:
            raise UserError(f"--no-batch serves one request at a time, so {name} {value} contradicts it.")
    return 1


def watermark_of(f: EngineFlags) -> float | None:
    """None where none is given, so that a boot file may."""
    text = f.kv_admission_watermark
    if text is None or text == "auto":
        return None if text is None else MARGINS[f.scheduler]
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 0.5:
        raise UserError(f"--kv-admission-watermark {text}: it is a share from 0 to 0.5, or auto.")
    return value


def _page(path: Path, f: EngineFlags, context: int | None) -> int:
    """Tokens of a page; `dense` is one page for the whole context of a row, rounded up as the kernels need it."""
    if f.decode_storage_backend != "dense":
        return f.page_size or PAGE
    whole = _model_context(path, f)
    return -(-min(context or whole, whole) // PAGE) * PAGE


def _model_context(path: Path, f: EngineFlags) -> int:
    """The model's own context, from its headers."""
    if f.null_model:
        from weir_server.exec.null import CONTEXT

        return CONTEXT
    from weir_server.model.config import from_gguf, of_directory
    from weir_server.model.files import read_gguf_metadata

    return (of_directory(path) if path.is_dir() else from_gguf(read_gguf_metadata(path))).context


def one_of(flag: str, value: str, *known: str) -> None:
    if value not in known:
        raise UserError(f"{flag} {value}: it is {', '.join(known[:-1])} or {known[-1]}.")


def quantity(flag: str, text: str | None) -> int | None:
    """Bytes. Raises UserError."""
    try:
        return None if text is None else parse_quantity(text)
    except ValueError as e:
        raise UserError(f"{flag}: {e}.") from None


def load_text(path: Path, name: str) -> Model:
    """The text side of the model, under the name that clients call it. Raises ModelError."""
    from weir_server.http.service import Model
    from weir_server.text.defaults import load_defaults
    from weir_server.text.template import ChatTemplate, find_template
    from weir_server.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    template = ChatTemplate(find_template(path), tokenizer.bos, tokenizer.eos)
    defaults = load_defaults(path, tokenizer)
    return Model(name, tokenizer.hiding(defaults.stop_ids), template, defaults)


def name_of(path: Path) -> str:
    """What a model is called where nobody gave it a name."""
    return path.name.removesuffix(".gguf")
