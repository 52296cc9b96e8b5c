"""What the operator and the server say to each other: every shared name and shape, once.

The server renders these shapes on its control port, the operator reads them; both import this module and nothing else of
each other. It needs only the standard library. Quantities are SI (seconds, bytes, tokens, rows); counters are totals since
the process started; a value that is not known is absent or None, never zero.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

CONTRACT_MAJOR = 1
CONTRACT_MINOR = 0

HTTP_PORT = 8080
CONTROL_PORT = 8081

# ---------------------------------------------------------------- closed vocabularies (labels and reasons)

KNOBS = ("max_batch_size", "kv_cache_budget", "admission_watermark", "max_queue_depth")
BOUNDS = ("slots", "kv", "prefill", "drain")
"""What the head of the queue waits for; the label of refusals and of waiting."""
REFUSALS = ("queue_full", "draining", "kv_budget", "kv_impossible", "context_length", "invalid")
FINISH_REASONS = ("stop", "length", "cancelled", "error", "handed_back")
"""How a queued row ends, exactly once each. `handed_back`: queued work returned with a retryable 503 (drain, kv_budget)."""
SLOS = ("ttft", "tpot", "both")
HISTOGRAMS = ("ttft", "prefill_seconds", "queue_time", "tpot", "decode_interval")
SETTLED_HISTOGRAMS = ("ttft", "tpot", "decode_interval")

BUSY_BODY: dict[str, Any] = {"error": {"message": "Server is busy. Retry later.", "type": "overloaded"}}
"""The body of the queue-full 503, exactly."""


# ---------------------------------------------------------------- knobs, envelope, objectives

@dataclass(frozen=True, slots=True)
class Knobs:
    """The four values that may move while a server runs. `kv_cache_budget` is None where the pool is unlimited."""

    max_batch_size: int
    kv_cache_budget: int | None
    admission_watermark: float
    max_queue_depth: int

    def merged(self, changes: Mapping[str, Any]) -> Self:
        """These knobs with `changes` applied. Raises KeyError for a name that is no knob."""
        if unknown := set(changes) - set(KNOBS):
            raise KeyError(sorted(unknown)[0])
        return type(self)(**{**asdict(self), **changes})


@dataclass(frozen=True, slots=True)
class Envelope:
    """Inclusive bounds fixed at start, one pair for each knob. `kv_cache_budget` is None where there is no such knob."""

    max_batch_size: tuple[int, int]
    kv_cache_budget: tuple[int, int] | None
    max_queue_depth: tuple[int, int]
    admission_watermark: tuple[float, float]

    def violation(self, knob: str, value: float) -> float | None:
        """The bound that `value` breaks, or None. A knob without bounds admits nothing."""
        bounds = getattr(self, knob)
        if bounds is None:
            return 0.0
        low, high = bounds
        return low if value < low else high if value > high else None


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in seconds: time to first token, time per output token. `generation` counts changes."""

    ttft: float
    tpot: float
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Plant:
    """Step time as the server measured it at boot: a + b·rows + c·context tokens + p·prefill tokens (seconds).

    `prefill_tokens`: prompt tokens that one step takes while rows decode. Source of the form: tuning research §2.1.
    """

    a: float
    b: float
    c: float
    p: float
    prefill_tokens: int

    def step_seconds(self, rows: float, context: float = 0.0, prefill: float = 0.0) -> float:
        return self.a + self.b * rows + self.c * context + self.p * prefill


FULL, SLIDING = "full_attention", "sliding_attention"
"""Attention types, as transformers' `layer_types` call them: the keys of Geometry.blocks_per_chunk."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """KV memory units: a chunk is the pool's unit; a block holds `block_tokens` tokens in every layer of one attention type."""

    chunk_bytes: int
    block_tokens: int
    blocks_per_chunk: Mapping[str, int]


# ---------------------------------------------------------------- histograms

HIST_FACTOR = 1.05
HIST_FIRST = 1e-4
HIST_EDGES = 340
"""340 edges from 0.1 ms to about 1,500 s."""


def hist_index(value: float) -> int:
    """Bucket of `value` (seconds): bucket i holds values in (edge(i-1), edge(i)]; the last bucket is open."""
    if value <= HIST_FIRST:
        return 0
    i = math.ceil(math.log(value / HIST_FIRST) / math.log(HIST_FACTOR) - 1e-9)
    return min(i, HIST_EDGES)


def hist_edge(index: int) -> float:
    """Upper edge of bucket `index`; infinite for the open one."""
    return HIST_FIRST * HIST_FACTOR**index if index < HIST_EDGES else math.inf


@dataclass(slots=True)
class Histogram:
    """Counts over the edges above. On the wire: {"first": i, "counts": [...], "sum": s}, trimmed of empty ends; and so it is
    held, since an operator keeps dozens of readings of each of its pods."""

    first: int = 0
    filled: array[int] = field(default_factory=lambda: array("q"))  # from bucket `first` on
    sum: float = 0.0

    def observe(self, value: float) -> None:
        at = hist_index(value)
        if not self.filled:
            self.first = at
        if at < self.first:
            self.filled[:0] = array("q", [0]) * (self.first - at)
            self.first = at
        if (beyond := at - self.first - len(self.filled)) >= 0:
            self.filled.extend([0] * (beyond + 1))
        self.filled[at - self.first] += 1
        self.sum += value

    @property
    def counts(self) -> list[int]:
        """Of every bucket."""
        return [0] * self.first + self.filled.tolist() + [0] * (HIST_EDGES + 1 - self.first - len(self.filled))

    @property
    def count(self) -> int:
        return sum(self.filled)

    def to_wire(self) -> dict[str, Any]:
        return {"first": self.first, "counts": self.filled.tolist(), "sum": round(self.sum, 6)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Histogram:
        """Raises KeyError or TypeError where it is none, ValueError if it does not fit the edges."""
        first, counts = wire["first"], wire["counts"]
        if type(first) is not int or any(type(c) is not int for c in counts):
            raise TypeError("a histogram counts in integers")
        if first < 0 or first + len(counts) > HIST_EDGES + 1 or any(not 0 <= c < 2**63 for c in counts):
            raise ValueError("histogram does not fit the contract's edges")
        _sane("sum", wire["sum"])
        return cls(first, array("q", counts), float(wire["sum"]))


# ---------------------------------------------------------------- the window: what the tuner reads

STEP_SUMS = ("steps", "step_seconds", "decode_rows", "context_tokens", "prefill_tokens")
"""Over all steps, and again (under `decode_only`) over the steps without prefill tokens."""
STEP_PRODUCTS = ("nn", "nc", "np", "cc", "cp", "pp", "ny", "cy", "py", "yy")
"""Σ of products over all steps: n decode rows, c context tokens read by them, p prefill tokens, y seconds.
With STEP_SUMS they are what a least-squares fit of y on (1, n, c, p) needs."""


@dataclass(frozen=True, slots=True)
class Window:
    """One reading of GET /control/window. Everything but the "now" group is a total since the process started.

    Rows are counted, not HTTP requests: a request with n=4 counts four. Every queued row ends in `finished` exactly once.
    """

    instance: str
    monotonic: float
    settled_at: float  # monotonic time when the last move of batch, watermark or budget became effective
    target: Knobs
    effective: Knobs
    envelope: Envelope
    draining: bool
    # now
    running: int  # rows in the batch, prefilling ones included
    prefilling: int
    waiting: int
    oldest_wait: float
    bound: str | None
    memory_used: int
    memory_limit: int | None
    kv_used_bytes: int
    # time integrals, seconds
    decoding_seconds: float  # ∫ [any row decodes] dt
    running_seconds: float  # ∫ running rows dt while any row decodes: Δ/Δdecoding_seconds is the mean r
    waiting_seconds: float  # ∫ waiting rows dt
    head_wait_seconds: Mapping[str, float]  # by bound: ∫ [head of the queue waits for it] dt
    kv_used_byte_seconds: float
    # steps
    step: Mapping[str, float]  # STEP_SUMS
    decode_only: Mapping[str, float]  # STEP_SUMS over steps without prefill tokens
    products: Mapping[str, float]  # STEP_PRODUCTS
    recompute_seconds: float  # forward time spent on tokens that had been computed before
    # events
    queued: int
    retried: int  # arrivals (queued or refused) that said they were retries
    admitted: int
    refused: Mapping[str, Mapping[str, int]]  # reason → bound → rows ("none" where nothing waited)
    finished: Mapping[str, int]
    preempted: int
    recomputed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    slo_good: Mapping[str, int]  # SLOS, finished rows under the present objectives
    slo_total: int
    # latencies, seconds
    histograms: Mapping[str, Histogram]  # HISTOGRAMS
    settled: Mapping[str, Histogram]  # SETTLED_HISTOGRAMS, counting only what began after settled_at

    def to_wire(self) -> dict[str, Any]:
        wire = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("histograms", "settled")}
        for name in ("target", "effective", "envelope"):
            wire[name] = asdict(wire[name])
        for name in ("histograms", "settled"):
            wire[name] = {k: h.to_wire() for k, h in getattr(self, name).items()}
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Window:
        """Raises KeyError, TypeError or ValueError on anything that is not a whole window of numbers: absent is not zero."""
        values = {f.name: wire[f.name] for f in fields(cls)}
        values["target"] = Knobs(**values["target"])
        values["effective"] = Knobs(**values["effective"])
        values["envelope"] = envelope_from_wire(values["envelope"])
        for name, keys in (("step", STEP_SUMS), ("decode_only", STEP_SUMS), ("products", STEP_PRODUCTS), ("slo_good", SLOS)):
            _require(name, values[name], keys)
            values[name] = {k: values[name][k] for k in keys}  # under the names that all readings share
        for name in ("head_wait_seconds", "finished", "refused"):
            values[name] = {sys.intern(k): v for k, v in dict(values[name]).items()}
        for name in _NUMBERS:
            _sane(name, values[name])
        for knobs in (values["target"], values["effective"]):
            for name in KNOBS:
                if (value := getattr(knobs, name)) is not None or name != "kv_cache_budget":
                    _sane(name, value)
        for group in (*(values[name] for name in _GROUPS), *(dict(by_bound) for by_bound in values["refused"].values())):
            for name, value in group.items():
                _sane(name, value)
        for name, keys in (("histograms", HISTOGRAMS), ("settled", SETTLED_HISTOGRAMS)):
            _require(name, values[name], keys)
            values[name] = {k: Histogram.from_wire(values[name][k]) for k in keys}
        return cls(**values)


_NUMBERS = tuple(f.name for f in fields(Window) if f.type in ("int", "float"))
_GROUPS = ("head_wait_seconds", "step", "decode_only", "products", "finished", "slo_good")
"""Fields of a window that are mappings of names to numbers."""


def _sane(name: str, value: float) -> None:
    """TypeError where it is no number, ValueError where nobody can calculate with it."""
    if not -1e300 < value < 1e300:
        raise ValueError(f"{name} is {value}")


def _require(name: str, mapping: Mapping[str, Any], keys: Iterable[str]) -> None:
    if missing := [k for k in keys if k not in mapping]:
        raise KeyError(f"{name}.{missing[0]}")


def envelope_from_wire(wire: Mapping[str, Any]) -> Envelope:
    bounds: dict[str, Any] = {f.name: None if wire[f.name] is None else tuple(wire[f.name]) for f in fields(Envelope)}
    for name, ends in bounds.items():
        for value in ends or ():
            _sane(name, value)
    return Envelope(**bounds)


# ---------------------------------------------------------------- the control API

@dataclass(frozen=True, slots=True)
class Fence:
    """Order of writers: (epoch, seq) never goes back. epoch = creation second of the operator's Lease · 2^16 + transitions."""

    epoch: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True)
class ControlState:
    """GET /control/state, and the answer to PUT /control/knobs."""

    contract: Mapping[str, int]
    model: Mapping[str, Any]
    instance: str
    started_at: str
    envelope: Envelope
    kv: Geometry
    boot: Knobs
    target: Knobs
    effective: Knobs
    fallback: Knobs
    slo: Slo
    plant: Plant | None
    fence: Fence
    lease: Mapping[str, float | None]  # {"expires_in_seconds": s or None}
    draining: bool

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ControlState:
        """Raises KeyError or TypeError on a shape of another contract."""
        v = {f.name: wire[f.name] for f in fields(cls)}
        v["envelope"] = envelope_from_wire(v["envelope"])
        v["kv"] = Geometry(**v["kv"])
        for name in ("boot", "target", "effective", "fallback"):
            v[name] = Knobs(**v[name])
        v["slo"] = Slo(**v["slo"])
        v["plant"] = Plant(**v["plant"]) if v["plant"] is not None else None
        v["fence"] = Fence(**v["fence"])
        return cls(**v)


@dataclass(frozen=True, slots=True)
class KnobsRequest:
    """PUT /control/knobs. Empty `knobs` sets only fallback and slo; `lease_seconds` 0 gives the lease back.

    Answers: 200 ControlState · 400 malformed · 401/403 token · 409 another instance or an older (epoch, seq) · 422 outside
    the envelope ({"error": …, "knob": …, "value": …, "bound": …}) · 503 draining.
    """

    instance: str
    epoch: int
    seq: int
    lease_seconds: float
    knobs: Mapping[str, Any] = field(default_factory=dict)
    fallback: Mapping[str, Any] | None = None
    slo: Mapping[str, float] | None = None

    def to_wire(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v is not None}
