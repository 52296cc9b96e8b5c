"""Flags: how one is declared, and those that shape the engine, which several commands share.

Every long name of a flag is also an environment variable, WEIR_<NAME>; a few have another project's variable beside it. The
order here is the order of --help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

API, MODEL, BATCH, PREFILL, KV, PRESSURE, OPERATION = (
    "API", "Model", "Batching", "Prefill", "KV cache", "Under pressure", "Operation",
)  # fmt: skip

NOT_YET = (
    "--draft-kind", "--prompt-lookup-max-batch", "--q-padding-interval-size", "--kv-padding-interval-size",
    "--no-cuda-graphs", "--no-async-batching",
)  # fmt: skip
"""Flags whose features do not exist yet: refused by name, rather than accepted and ignored."""


def variable(name: str) -> str:
    return "WEIR_" + name.lstrip("-").replace("-", "_").upper()


def option(group: str, *names: str, help: str, env: tuple[str, ...] = (), **more: Any) -> Any:
    """A flag in a group of --help. `env`: variables besides those of its long names."""
    variables = [variable(n.split("/")[0]) for n in names if n.startswith("--")]
    return typer.Option(*names, help=help, rich_help_panel=group, envvar=[*variables, *env], show_envvar=False, **more)


ModelArgument = Annotated[str, typer.Argument(help="A .gguf file, a Hugging Face directory, or package://distribution/file.")]


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """What loading a model depends on."""

    dtype: Annotated[str, option(MODEL, "--dtype", help="Type that the weights are computed in.")] = "float32"
    kv_cache_dtype: Annotated[
        str, option(MODEL, "--kv-cache-dtype", help="fp32, or bf16: half the memory, rounded keys and values.")
    ] = "fp32"
    quantize: Annotated[
        str,
        option(MODEL, "--quantize", help="int8: 8-bit weights, a quarter of the memory; none: float32; auto: 8 bits where the "
                                         "file's own weights are that, to the bit."),
    ] = "auto"
    cache_dir: Annotated[str | None, option(MODEL, "--cache-dir", help="Where converted weights are kept.")] = None
    threads: Annotated[int | None, option(MODEL, "--threads", min=1, max=1024, help="Default: the cgroup's CPU quota.")] = None
    deterministic: Annotated[
        bool, option(MODEL, "--deterministic", help="Fail at start unless answers do not depend on neighbours.")
    ] = False
    ctx_size: Annotated[
        int | None,
        option(MODEL, "--ctx-size", min=1,
               help="Context of the whole server: each of N slots gets 1/N, N being --max-batch-size if given, else "
                    "--parallel. Default: the model's own, for every slot."),
    ] = None
    null_model: Annotated[bool, typer.Option("--null-model", hidden=True, help="Ids from a hash, no weights.")] = False


@dataclass(frozen=True, kw_only=True)
class EngineFlags(LoadFlags):
    """All that the engine is started with."""

    parallel: Annotated[int, option(BATCH, "--parallel", "--n-parallel", min=1, help="Slots.")] = 4
    max_batch_size: Annotated[
        int | None, option(BATCH, "--max-batch-size", min=1, help="Most active sequences at start. Default: --parallel.")
    ] = None
    max_queue_depth: Annotated[
        int | None, option(BATCH, "--max-queue-depth", min=1, help="Most waiting requests, then 503. Default: 32.")
    ] = None
    scheduler: Annotated[str, option(BATCH, "--scheduler", help="fifo: decodes first; or prefill_first.")] = "fifo"
    max_batch_tokens: Annotated[int | None, option(BATCH, "--max-batch-tokens", min=1, help="Token budget of a step.")] = None
    max_requests_per_batch: Annotated[
        int | None, option(BATCH, "--max-requests-per-batch", min=1, help="Hard cap of --max-batch-size while running.")
    ] = None
    no_batch: Annotated[bool, option(BATCH, "--no-batch", help="One request at a time, with the whole --ctx-size.")] = False
    prefill_chunk_size: Annotated[
        int | None,
        option(PREFILL, "--prefill-chunk-size", "-b", "--batch-size", min=0, env=("LLAMA_ARG_BATCH", "MLXCEL_PREFILL_CHUNK"),
               help="Prompt tokens of a step; 0 turns chunking off. Default: adaptive."),
    ] = None
    prefill_grant_interval: Annotated[
        int, option(PREFILL, "--prefill-grant-interval", min=0, help="A prefill turn after so many decode steps; 0 = none.")
    ] = 16
    max_batch_prefill: Annotated[
        int, option(PREFILL, "--max-batch-prefill", min=1, help="Most prompts that one step prefills together.")
    ] = 4
    max_batch_prefill_tokens: Annotated[
        int | None,
        option(PREFILL, "--max-batch-prefill-tokens", min=0,
               help="Most padded tokens of such a step; 0 = one prompt at a time. "
                    "Default: 2 x --max-batch-prefill x min(chunk, 512)."),
    ] = None
    kv_cache_budget: Annotated[
        str,
        option(KV, "--kv-cache-budget", env=("MLXCEL_KV_CACHE_BUDGET",), help="auto, bytes (512Mi), a fraction (0.5), none."),
    ] = "auto"
    kv_cache_budget_min: Annotated[
        str | None, option(KV, "--kv-cache-budget-min", help="Lowest live budget. Default: one full context.")
    ] = None
    kv_admission_watermark: Annotated[
        str | None,
        option(KV, "--kv-admission-watermark", "--safety-margin", env=("MLXCEL_KV_ADMISSION_WATERMARK",),
               help="Share of the budget kept free when admitting while anything decodes, or auto: 0.15 with fifo, 0 with "
                    "prefill_first. Default: 0.01."),
    ] = None
    page_size: Annotated[int | None, option(KV, "--page-size", min=1, help="Tokens of a page. Default: 16.")] = None
    num_blocks: Annotated[
        int | None, option(KV, "--num-blocks", min=1, help="Size of the pool in pages of the whole model.")
    ] = None
    max_memory_percent: Annotated[
        float, option(KV, "--max-memory-percent", min=0.01, max=1.0, help="Share of the memory limit to use.")
    ] = 0.9
    decode_storage_backend: Annotated[
        str, option(KV, "--decode-storage-backend", help="auto or paged; dense: each row's whole context is one page.")
    ] = "auto"
    allow_block_sharing: Annotated[
        bool,
        option(KV, "--allow-block-sharing/--no-allow-block-sharing", help="Reuse the KV of equal prompt starts."),
    ] = True
    no_prompt_cache: Annotated[bool, option(KV, "--no-prompt-cache", help="As --no-allow-block-sharing.")] = False
    pressure_policy: Annotated[
        str,
        option(PRESSURE, "--pressure-policy",
               help="Who gives way when KV memory runs out: newest_stalled or least_progress; auto: what measured better."),
    ] = "auto"
    cpu_offload_space: Annotated[
        float,
        option(PRESSURE, "--cpu-offload-space", min=0.0, help="GiB for the KV of rows that gave way; 0 = compute it again."),
    ] = 0.0
    enable_preemption: Annotated[
        bool, option(PRESSURE, "--enable-preemption", help="In a full batch a higher priority takes a lower one's slot.")
    ] = False
    preemption_policy: Annotated[
        str, option(PRESSURE, "--preemption-policy", help="Whose slot: longest-first or lowest-priority.")
    ] = "longest-first"


def with_flags(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of `kind` as flags, in place of its keyword argument `flags`, in which it gets them back."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints, names = get_type_hints(kind, include_extras=True), [f.name for f in fields(kind)]
        shared = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in fields(kind)
        ]
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            parameters += shared if own.name == "flags" else [own.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        def call(**given: Any) -> None:
            command(flags=kind(**{name: given.pop(name) for name in names}), **given)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__doc__, call.__name__, call.__module__ = command.__doc__, command.__name__, command.__module__
        return call

    return decorate
