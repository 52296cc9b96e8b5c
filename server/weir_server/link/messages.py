"""Messages between the HTTP parent and the engine child: native types, one batch each way per step.

parent → child   Boot once, then Submit, Cancel, Stop, SetKnobs, Drain, Trace, Quit
child  → parent  Ready or Fatal once, then one Report for each step (and one whenever something changed without a step)

Every submitted row gets exactly one terminal event (`Finished`). Times are `time.monotonic()` seconds, which both processes
share. The wire form is msgpack with a tag (msgspec), length-prefixed on a socketpair.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weir_server.contract import Envelope, Geometry, Knobs, Plant


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request's tokens are chosen and when they end. `stop_ids` are end-of-sequence ids (empty under ignore_eos)."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 = all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # always resolved by the parent; numbers are keyed by (seed, choice, position)
    stop_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    logprobs: int = -1  # -1 = none, 0 = the chosen token only, k = with the k best


# ------------------------------------------------------------------------------------------------ parent → child

class Boot(msgspec.Struct, frozen=True, tag=True):
    """All that the child needs to load and size itself; None = derive."""

    model: str  # resolved path of a .gguf file or a model directory
    threads: int
    dtype: str = "float32"
    kv_dtype: str = "fp32"  # what keys and values are stored in: fp32 or bf16
    quantize: str = "auto"  # auto | int8 | none; auto = 8-bit weights where the file's own are that
    context_per_slot: int | None = None
    max_batch_size: int = 4
    max_requests_per_batch: int | None = None  # the envelope's upper bound of max_batch_size
    max_batch_tokens: int | None = None
    prefill_chunk: int | None = None  # None = adaptive; 0 = chunking off
    prefill_grant_interval: int = 16
    scheduler: str = "fifo"  # or prefill_first
    max_batch_prefill: int = 4  # prompts in one step
    max_batch_prefill_tokens: int | None = None  # their padded tokens; None = derived, 0 = one prompt at a time
    pressure_policy: str = "auto"  # newest_stalled | least_progress; auto = the measured default
    enable_preemption: bool = False  # of slots, by strictly higher priority
    preemption_policy: str = "longest-first"  # or lowest-priority
    swap_bytes: int = 0  # of the pool that preempted rows are offloaded to; 0 = they are computed again
    kv_cache_budget: str = "auto"  # auto | none | bytes | fraction
    kv_cache_budget_min: int | None = None
    admission_watermark: float = 0.01
    max_queue_depth: int = 32
    page_size: int = 16
    num_blocks: int | None = None
    max_memory_percent: float = 0.9
    prefix_cache: bool = True
    cache_dir: str | None = None  # where the weight cache lives; None = the default
    deterministic: bool = False
    batching: bool = True  # False: --no-batch, one row at a time
    memory_limit: int | None = None  # bytes to size for, whatever the machine has
    measure: bool = True  # measure the plant before serving
    null_model: bool = False  # NullRunner: engine overhead without a model


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One request: `n` rows over one prompt. Ids are the parent's, unique in a process, never reused."""

    id: int
    prompt: list[int]
    sampling: Sampling
    arrived: float
    n: int = 1
    cache_prompt: bool = True
    cache_salt: str = ""
    lane: int = 1  # 0 high, 1 normal, 2 low
    deadline: float | None = None  # monotonic; at it the request ends as `cancelled` with the message DEADLINE_EXCEEDED
    prompt_logprobs: int = -1  # k ≥ 0: of every prompt token but the first, with the k best; bypasses prefix reads


DEADLINE_EXCEEDED = "deadline_exceeded"


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client is gone. Unknown or finished ids are no error."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The text of a row reached a stop string within its first `n_tokens` tokens: finish it as `stop`."""

    id: int
    row: int
    n_tokens: int


class SetKnobs(msgspec.Struct, frozen=True, tag=True):
    """New targets, already inside the envelope."""

    target: Knobs


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Serve what is queued and running until `deadline` (monotonic), hand queued rows back then, and end the rest."""

    deadline: float


class Trace(msgspec.Struct, frozen=True, tag=True):
    """Send the last scheduling decisions with the next report."""


class Quit(msgspec.Struct, frozen=True, tag=True):
    """End now; the parent needs nothing more."""


ToChild = Boot | Submit | Cancel | Stop | SetKnobs | Drain | Trace | Quit


# ------------------------------------------------------------------------------------------------ child → parent

class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves. `boot` are the values in force at start."""

    model: dict[str, str | int | float | bool | None]  # family, layers, vocab_size, weights_bytes, decode_path, isa, …
    vocab_size: int
    context_per_slot: int  # longest prompt + generation of one row
    max_servable: int  # tokens of the longest row that the envelope can hold
    envelope: Envelope
    geometry: Geometry
    usable_blocks: int
    boot: Knobs
    plant: Plant | None
    plant_steps: dict[str, float]  # measured medians: "1 row", "8 rows", "prefill chunk", … in seconds
    sizing: list[str]  # the arithmetic of the pool, a line each
    load_seconds: float
    memory_used: int = 0  # bytes of the child (anonymous + shared), with nothing in the pool
    window: int | None = None  # tokens that a sliding layer sees, its own included; None = no layer slides
    piece: int = 0  # most tokens that one row is fed in one step
    swap_bytes: int = 0


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; one sentence for the user. `user_error`: exit status 2 rather than 1."""

    message: str
    user_error: bool = False


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A row was taken from the queue into the batch; sent for its first admission only (a preempted row is not new)."""

    id: int
    row: int
    t: float
    cached_tokens: int


LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON lacks (OpenAI's value, and vLLM's)."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    logprob: float
    top: list[tuple[int, float]]


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """New tokens of a row, in order; `logprobs` parallel to them where asked for."""

    id: int
    row: int
    t: float
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """Of prompt tokens start, start + 1, …; sent before the first `Tokens` of the row, in order."""

    id: int
    row: int
    start: int
    logprobs: list[TokenLogprobs]


KV_BUDGET_EXCEEDED = "request_memory_budget_exceeded"
"""A row handed back because the live KV budget can't hold it has a message that begins so; otherwise a drain's end did it."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The one terminal event of a row. `reason` is one of contract.FINISH_REASONS; `message` only for errors and hand-backs.

    `generated` counts an end-of-sequence token, which is also in the row's last `Tokens`.
    """

    id: int
    row: int
    t: float
    reason: str
    generated: int
    message: str = ""


Event = Admitted | PromptLogprobs | Tokens | Finished


class Stats(msgspec.Struct):
    """What the engine alone knows, all totals as in contract.Window (same names, same units)."""

    running: int = 0
    prefilling: int = 0
    waiting: int = 0
    oldest_arrival: float | None = None  # of the waiting rows
    bound: str | None = None
    kv_used_bytes: int = 0  # held by rows; cached prefixes are not "used"
    kv_cached_bytes: int = 0
    kv_resident_bytes: int = 0  # of the pool: in use, cached, or free and not given back to the system
    kv_blocks_free: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_used: int = 0
    decoding_seconds: float = 0.0
    running_seconds: float = 0.0
    waiting_seconds: float = 0.0
    head_wait_seconds: dict[str, float] = {}
    kv_used_byte_seconds: float = 0.0
    step: dict[str, float] = {}
    decode_only: dict[str, float] = {}
    products: dict[str, float] = {}
    recompute_seconds: float = 0.0
    preempted: int = 0
    preempted_tokens: int = 0  # whose KV preemptions gave up
    recomputed_tokens: int = 0
    preemptions_by_cause: dict[str, int] = {}  # kv: a running row could not grow; priority: for memory; slots: for a slot
    soft_resets: int = 0  # preempted rows that are computed again
    offloads: int = 0  # preempted rows whose KV went to the swap pool
    restored_tokens: int = 0  # tokens whose KV came back from it
    swap_used_bytes: int = 0
    swap_bytes: int = 0
    kv_stranded_bytes: int = 0  # free blocks beside used ones in their chunks: free to their type alone
    kv_free_by_type: dict[str, int] = {}  # blocks that an attention type could get: of all free chunks, and its own loose ones
    bypassed: int = 0  # rows admitted past a head of the queue that did not fit
    promoted: int = 0  # rows that waited themselves into a higher lane, one for each lane
    prefill_grants: int = 0  # steps with a reserved share for a parked prefill
    batched_prefills: int = 0  # steps that fed more than one prompt
    deadlines_exceeded: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of which found
    prefix_evictions: int = 0
    adopted_evictions: int = 0  # of which a waiting request had counted on
    invariant_violations: dict[str, int] = {}
    memory_used: int = 0  # bytes of the child (anonymous + shared)


class Report(msgspec.Struct, tag=True):
    """What happened in one step, what is in force, and the totals after it."""

    t: float
    events: list[Event]
    effective: Knobs
    stats: Stats
    trace: list[dict[str, Any]] | None = None  # where asked for: policy.trace's wire form of the last decisions, oldest first


ToParent = Ready | Fatal | Report
