"""How large the pool is: pure arithmetic from what the machine leaves, printed line by line.

    memory limit · share − process − weights − activations − swap pool − headroom = what the KV cache may take

`auto` takes no more than twice the full contexts of the boot batch: beyond that a larger pool only keeps more cold prefixes.
The pool is the envelope of the knob `kv_cache_budget`; the budget in force at start may be less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal

from weir_server.kv.pool import RESERVED_CHUNKS
from weir_server.kv.shape import Shape
from weir_server.link.errors import UserError

HEADROOM = 128 << 20
"""Bytes left to the allocator's fragmentation, thread stacks and the interpreter's own growth."""
AUTO_CONTEXTS = 2

_SUFFIX = {
    "": Decimal(1), "m": Decimal("0.001"), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12),
    "P": Decimal(10**15), "Ki": Decimal(1 << 10), "Mi": Decimal(1 << 20), "Gi": Decimal(1 << 30), "Ti": Decimal(1 << 40),
    "Pi": Decimal(1 << 50),
}  # fmt: skip
_UNLIMITED = ("none", "0")
_FRACTION = re.compile(r"0?\.\d+|1\.0*")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(?:([eE][+-]?\d{1,3})|([mkMGTP]|[KMGTP]i)?)")


class SizingError(UserError):
    """The memory does not hold what was asked for; one sentence that says what to change."""


def parse_quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity (129e6, 0.5Gi, 524288Ki, 1500m …), rounded down. Raises ValueError, one sentence."""
    found = _QUANTITY.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a quantity of bytes; write for example 536870912, 512Mi or 2Gi")
    number, exponent, suffix = found.groups()
    if (size := Decimal(number + (exponent or "")) * _SUFFIX[suffix or ""]) >= 1 << 63:
        raise ValueError(f"{text!r} is more bytes than there are")
    return int(size)


def parse_budget(text: str) -> int | Decimal | None:
    """Bytes, a share of what fits, or None where it is derived. Raises SizingError."""
    text = text.strip()
    if text in ("auto", *_UNLIMITED):
        return None
    if _FRACTION.fullmatch(text):
        return Decimal(text)
    try:
        return parse_quantity(text)
    except ValueError as e:
        raise SizingError(f"--kv-cache-budget: {e}; or auto, none, or a fraction such as 0.5") from e


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes. `limit`: what this process may use in all; `limit_source` names it. `process`: what it uses besides weights."""

    limit: int
    limit_source: str
    process: int
    weights: int
    activations: int


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for. `budget`: auto | none | a quantity of bytes | a fraction (a number with a point, at most 1)."""

    budget: str
    budget_min: int | None
    num_blocks: int | None  # of `block_tokens` tokens in every layer
    share: float
    context: int  # tokens of one slot
    slots: int  # the boot batch
    swap_bytes: int = 0  # for the KV of preempted rows


@dataclass(frozen=True, slots=True)
class Sizing:
    """Chunks with the padding ones; no swap pool has 0. `budget`: bytes at start, whole chunks; None = no such knob."""

    num_chunks: int
    swap_chunks: int
    budget: int | None
    budget_range: tuple[int, int] | None
    lines: list[str] = field(default_factory=list)


def size_pool(machine: Machine, wish: Wish, chunk_bytes: int, shape: Shape) -> Sizing:
    """Raises SizingError when one full context does not fit, or when a stated size does not fit the memory."""

    def size(chunks: int) -> str:
        return _mib(chunks * chunk_bytes)

    swap_chunks = _swap_chunks(wish.swap_bytes, chunk_bytes)
    swap = max(0, swap_chunks - RESERVED_CHUNKS) * chunk_bytes
    allowed = int(machine.limit * wish.share)
    left = allowed - machine.process - machine.weights - machine.activations - swap - HEADROOM
    fitting = max(0, left // chunk_bytes - RESERVED_CHUNKS)
    slot = shape.worst_chunks(wish.context)
    stated = _stated(wish, fitting, chunk_bytes)
    unlimited = wish.budget.strip() in _UNLIMITED
    derived = fitting if unlimited else min(fitting, AUTO_CONTEXTS * wish.slots * slot)
    usable = shape.whole_chunks(wish.num_blocks) if wish.num_blocks else max(derived, stated or 0)
    budget = usable if stated is None else min(stated, usable)
    if usable > fitting:
        raise SizingError(
            f"a KV cache of {size(usable)} does not fit the {_mib(max(0, left))} that the memory limit leaves: "
            "lower --kv-cache-budget or --num-blocks, or raise the memory limit"
        )
    if budget < slot:
        raise SizingError(
            f"one full context of {wish.context} tokens needs {size(slot)} of KV cache and there is room for {size(budget)}: "
            "lower --ctx-size, or raise --kv-cache-budget or the memory limit"
        )
    least = slot if wish.budget_min is None else max(1, wish.budget_min // chunk_bytes)
    if least > budget:
        raise SizingError(f"--kv-cache-budget-min {size(least)} is above the budget of {size(budget)}")
    lines = [
        f"memory limit {_mib(machine.limit)} ({machine.limit_source}) x {wish.share:g} = {_mib(allowed)}",
        f"less process {_mib(machine.process)}, weights {_mib(machine.weights)}, activations {_mib(machine.activations)}, "
        + (f"swap pool {_mib(swap)}, " if swap else "")
        + f"headroom {_mib(HEADROOM)} = {_mib(left)} for the KV cache",
        f"pool: {usable} chunks of {chunk_bytes} bytes + {RESERVED_CHUNKS} for padding = {size(usable + RESERVED_CHUNKS)}, "
        f"{usable / slot:.1f} full contexts of {wish.context} tokens ({slot} chunks each)",
    ]
    if swap:
        lines.append(f"swap pool: {swap_chunks - RESERVED_CHUNKS} chunks = {_mib(swap)}, for rows that give way")
    if unlimited:
        return Sizing(usable + RESERVED_CHUNKS, swap_chunks, None, None, [*lines, "KV budget: none, the whole pool"])
    lines.append(f"KV budget: {size(budget)} at start, from {size(least)} to {size(usable)}")
    bounds = (least * chunk_bytes, usable * chunk_bytes)
    return Sizing(usable + RESERVED_CHUNKS, swap_chunks, budget * chunk_bytes, bounds, lines)


def _swap_chunks(swap_bytes: int, chunk_bytes: int) -> int:
    """Chunks of a swap pool of at most so many bytes, and the padding ones, which are never touched."""
    if not swap_bytes:
        return 0
    if swap_bytes < chunk_bytes:
        raise SizingError(f"--cpu-offload-space of {swap_bytes} bytes is less than one chunk of {chunk_bytes} bytes")
    return swap_bytes // chunk_bytes + RESERVED_CHUNKS


def _stated(wish: Wish, fitting: int, chunk_bytes: int) -> int | None:
    """Chunks of an explicit budget, or None where it is derived. A fraction is one of what fits."""
    asked = parse_budget(wish.budget)
    return int(fitting * asked) if isinstance(asked, Decimal) else None if asked is None else asked // chunk_bytes


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
