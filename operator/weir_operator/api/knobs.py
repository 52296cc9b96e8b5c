"""What the operator may do to a running server: the four knobs, their bounds, and the mode of tuning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from weir_operator.api.quantity import parse_bytes
from weir_operator.api.scalars import Part, Quantity, rules

ENDS = ("min", "initial", "max")
_ORDER = (
    ("min", "max", "min must not exceed max"),
    ("min", "initial", "initial must not be below min"),
    ("initial", "max", "initial must not exceed max"),
)
_NUMBERS = "!has(self.{a}) || !has(self.{b}) || self.{a} <= self.{b}"
_QUANTITIES = (  # CEL has no <= between them, and one that is malformed has a sentence of its own
    "!has(self.{a}) || !has(self.{b}) || !isQuantity(string(self.{a})) || !isQuantity(string(self.{b}))"
    " || quantity(string(self.{a})).compareTo(quantity(string(self.{b}))) <= 0"
)


def _order(template: str) -> dict[str, Any]:
    return rules(*((template.format(a=a, b=b), message) for a, b, message in _ORDER))


def _check_order(values: dict[str, float | None]) -> None:
    for a, b, message in _ORDER:
        low, high = values[a], values[b]
        if low is not None and high is not None and low > high:
            raise ValueError(message)


class _IntKnob(Part):
    model_config = {"json_schema_extra": _order(_NUMBERS)}

    @model_validator(mode="after")
    def _ordered(self) -> Any:
        _check_order({name: getattr(self, name) for name in ENDS})
        return self


class RowsKnob(_IntKnob):
    """A knob counted in rows. Each bound is optional; an absent one is the envelope's."""

    min: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Least value that the tuner may set."""
    initial: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Value at start, and whenever no operator holds the lease."""
    max: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Largest value that the tuner may set."""


class PercentKnob(_IntKnob):
    """A knob in whole percent. Each bound is optional; an absent one is the envelope's."""

    min: Annotated[int, Field(ge=0, le=50)] | None = None
    """Least value that the tuner may set."""
    initial: Annotated[int, Field(ge=0, le=50)] | None = None
    """Value at start, and whenever no operator holds the lease."""
    max: Annotated[int, Field(ge=0, le=50)] | None = None
    """Largest value that the tuner may set."""


class BytesKnob(Part):
    """A knob in bytes, as quantities. Each bound is optional; an absent one is the envelope's."""

    model_config = {"json_schema_extra": _order(_QUANTITIES)}

    min: Quantity | None = None
    """Least value that the tuner may set."""
    initial: Quantity | None = None
    """Value at start, and whenever no operator holds the lease."""
    max: Quantity | None = None
    """Largest value that the tuner may set."""

    @model_validator(mode="after")
    def _ordered(self) -> Any:
        _check_order({name: parse_bytes(v) if (v := getattr(self, name)) is not None else None for name in ENDS})
        return self


class Knobs(Part):
    """Bounds and start values of the four knobs that move while a server runs."""

    max_batch_size: RowsKnob = Field(default_factory=RowsKnob)
    """Rows that may run at once."""
    max_queue_depth: RowsKnob = Field(default_factory=RowsKnob)
    """Rows that may wait; above it clients get a 503."""
    kv_cache_budget: BytesKnob = Field(default_factory=BytesKnob)
    """Bytes of the KV pool in use, rounded down to whole chunks."""
    admission_watermark_percent: PercentKnob = Field(default_factory=PercentKnob)
    """Share of the KV budget kept free when admitting while anything decodes."""


class Tuning(Part):
    """What the operator may do to the knobs."""

    preset: Literal["latency", "balanced", "throughput"] | None = None
    """Objectives and bounds by name, for what `slo` and `tuning.knobs` leave out: `latency` answers soon and refuses early,
    `throughput` lets rows wait for a full batch, `balanced` is between them. Absent: nothing is filled in."""
    mode: Literal["Auto", "Advise", "Disabled"] = "Auto"
    """Auto moves the knobs; Advise only records what it would have done; Disabled leaves the start values in force."""
    paused: bool = False
    """Hold the present values: no move until it is false again."""
    envelope: Literal["Keep", "Roll"] = "Keep"
    """What becomes of a batch that is predicted to be better than engine.limits.maxBatchSize allows. Keep: it is said in
    status.tuning.proposal. Roll: that limit is where it begins, and it grows up to knobs.maxBatchSize.max by rolling restarts,
    each doubling it at most, at most one an hour."""
    knobs: Knobs = Field(default_factory=Knobs)
    """Bounds and start values of the knobs."""
