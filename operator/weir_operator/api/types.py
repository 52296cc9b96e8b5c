"""InferenceDeployment, typed once. The CRD is generated from this file (`python -m weir_operator.api.crd`).

A field's docstring becomes its description (`kubectl explain`); a rule in `_rules` becomes a CEL rule of the schema. The same
values are checked here for the places without an API server: `weir-operator local` and `plan` read plain files.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel

from weir_operator.api.names import API_VERSION, CONTAINER, KIND
from weir_operator.api.quantity import DURATION_PATTERN, parse_bytes, parse_duration

Rule = tuple[str, str]
"""A CEL expression and the sentence that a user reads where it is false."""


def _rules(*rules: Rule) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def _checked(parse: Any) -> AfterValidator:
    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    _checked(parse_bytes),
    WithJsonSchema({
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "maxLength": 32,
        **_rules((
            "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
            "must be a positive quantity of bytes, such as 512Mi, 2Gi or 1.5G",
        )),
    }),
]
"""Bytes as Kubernetes writes them; kept as the user wrote them."""

_DURATION_RULE = (
    f"self.matches('^{DURATION_PATTERN}$') && duration(self) > duration('0s')",
    "must be a duration above zero, such as 80ms, 2s or 1m30s",
)
Duration = Annotated[
    str, _checked(parse_duration), WithJsonSchema({"type": "string", "maxLength": 32, **_rules(_DURATION_RULE)}),
]
"""A time as Go writes it; kept as the user wrote it."""


def _drain_timeout(text: str) -> float:
    if (seconds := parse_duration(text)) > MAX_DRAIN_SECONDS:
        raise ValueError("must not exceed 30m")
    return seconds


MAX_DRAIN_SECONDS = 1800
DrainTimeout = Annotated[str, _checked(_drain_timeout), WithJsonSchema({
    "type": "string",
    "maxLength": 32,
    **_rules(_DURATION_RULE, (
        f"!self.matches('^{DURATION_PATTERN}$') || duration(self) <= duration('30m')", "must not exceed 30m",
    )),
})]

SOURCE_PATTERN = r"(package://[A-Za-z0-9._-]+/[^/].*|file:///.+|pvc://[a-z0-9.-]+/[^/].*)"
SOURCE_MESSAGE = "must be package://DISTRIBUTION/FILE, file:///PATH or pvc://CLAIM/PATH"


def _source(text: str) -> None:
    if not re.fullmatch(SOURCE_PATTERN, text):
        raise ValueError(f"{text!r} {SOURCE_MESSAGE}")
    if ".." in text.split("/"):
        raise ValueError("must not contain '..'")


Source = Annotated[str, _checked(_source), WithJsonSchema({
    "type": "string",
    "maxLength": 1024,
    **_rules(
        (f"self.matches('^{SOURCE_PATTERN}$')", SOURCE_MESSAGE),
        ("!self.split('/').exists(part, part == '..')", "must not contain '..'"),
    ),
})]

OWNED_FLAGS = "host|port|control-host|control-port|control-token-file|boot-file|served-model-name"


_EXTRA_MESSAGE = (
    "must be flags of weir-server as --flag=value, without those that the operator sets itself "
    "(host, ports, token, boot file, served name)"
)


def _extra_args(args: list[str]) -> list[str]:
    if any(not arg.startswith("--") or re.match(f"--({OWNED_FLAGS})(=|$)", arg) for arg in args):
        raise ValueError(_EXTRA_MESSAGE)
    return args


ExtraArgs = Annotated[
    list[Annotated[str, Field(max_length=1024)]],
    Field(max_length=64, json_schema_extra=_rules((
        f"self.all(arg, arg.startsWith('--') && !arg.matches('^--({OWNED_FLAGS})(=|$)'))", _EXTRA_MESSAGE,
    ))),
    AfterValidator(_extra_args),
]


def _overlay(template: dict[str, Any]) -> dict[str, Any]:
    """The API server does not look into it, so this is said in the status."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, dict) and container.get("name") == CONTAINER and "args" in container:
            raise ValueError(f"the args of container {CONTAINER} are Weir's: put yours in engine.extraArgs")
    return template


Overlay = Annotated[
    dict[str, Any], AfterValidator(_overlay),
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]


class _Part(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_attribute_docstrings=True,
    )


class Model(_Part):
    """The model and how it is named to clients."""

    source: Source
    """Where the weights are: `package://DISTRIBUTION/FILE` (a file of a Python distribution in the image), `file:///PATH` (a
    GGUF file or a Hugging Face directory in the container) or `pvc://CLAIM/PATH` (the same on a PersistentVolumeClaim)."""
    served_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The id under /v1/models, byte for byte. Default: the file's name."""
    max_model_len: Annotated[int, Field(ge=512, le=2_000_000)] | None = None
    """Longest prompt plus answer of one row, in tokens. Default: what the model was trained for."""


class Limits(_Part):
    """The envelope: what is allocated at start. Knobs move inside it; changing it restarts pods."""

    max_batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most rows that may ever run at once."""
    kv_cache: Quantity | None = None
    """Bytes of the KV cache pool. Default: what the container's memory limit leaves."""
    batch_tokens: Annotated[int, Field(ge=16, le=1_000_000)] | None = None
    """Most tokens in one step: decoding rows and prefill together."""


class Engine(_Part):
    """How the server runs the model. Changing any of it restarts pods."""

    limits: Limits = Field(default_factory=Limits)
    """The envelope: what is allocated at start."""
    prefill_chunk_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Prompt tokens that one step takes; 0 turns chunking off. Default: adaptive, measured on CPU."""
    prefill_grant_interval: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """After so many decode steps a waiting prefill gets a turn; 0 lets it wait without bound. Default: 16."""
    prefix_caching: bool = True
    """Reuse the KV cache of prompts that begin alike."""
    extra_args: ExtraArgs = Field(default_factory=list)
    """More flags for `weir-server serve`, each as one string `--flag=value`."""


class Slo(_Part):
    """Latency objectives: a request that misses one of them counts for nothing in goodput."""

    ttft: Duration
    """Time to the first token."""
    tpot: Duration
    """Time per output token after the first, as a request's mean."""


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
    return _rules(*((template.format(a=a, b=b), message) for a, b, message in _ORDER))


def _check_order(values: dict[str, float | None]) -> None:
    for a, b, message in _ORDER:
        low, high = values[a], values[b]
        if low is not None and high is not None and low > high:
            raise ValueError(message)


class _IntKnob(_Part):
    model_config = ConfigDict(json_schema_extra=_order(_NUMBERS))

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


class BytesKnob(_Part):
    """A knob in bytes, as quantities. Each bound is optional; an absent one is the envelope's."""

    model_config = ConfigDict(json_schema_extra=_order(_QUANTITIES))

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


class Knobs(_Part):
    """Bounds and start values of the four knobs that move while a server runs."""

    max_batch_size: RowsKnob = Field(default_factory=RowsKnob)
    """Rows that may run at once."""
    max_queue_depth: RowsKnob = Field(default_factory=RowsKnob)
    """Rows that may wait; above it clients get a 503."""
    kv_cache_budget: BytesKnob = Field(default_factory=BytesKnob)
    """Bytes of the KV pool in use, rounded down to whole chunks."""
    admission_watermark_percent: PercentKnob = Field(default_factory=PercentKnob)
    """Share of the KV budget kept free when admitting while anything decodes."""


class Tuning(_Part):
    """What the operator may do to the knobs."""

    mode: Literal["Auto", "Advise", "Disabled"] = "Auto"
    """Auto moves the knobs; Advise only records what it would have done; Disabled leaves the start values in force."""
    paused: bool = False
    """Hold the present values: no move until it is false again."""
    knobs: Knobs = Field(default_factory=Knobs)
    """Bounds and start values of the knobs."""


class Drain(_Part):
    """How a pod ends."""

    timeout: DrainTimeout = "120s"
    """How long queued and running requests may go on after a pod is told to end, at most 30m. Up to 5m a change restarts
    nothing; beyond that the pods' grace period must grow, and they restart."""


def _inside_limit(knob: str, end: str, limit: str, compare: str) -> Rule:
    """A knob's value against the envelope that holds it, where both are given."""
    inside, value = f"self.engine.limits.{limit}", f"self.tuning.knobs.{knob}.{end}"
    paths = [".".join(p.split(".")[:n]) for p in (inside, value) for n in range(2, p.count(".") + 2)]
    absent = " || ".join(f"!has({path})" for path in dict.fromkeys(paths))
    message = f"tuning.knobs.{knob}.{end} must not exceed engine.limits.{limit}"
    return f"{absent} || {compare.format(knob=value, limit=inside)}", message


class Spec(_Part):
    """What should run."""

    model_config = ConfigDict(json_schema_extra=_rules(
        *(_inside_limit("maxBatchSize", end, "maxBatchSize", "{knob} <= {limit}") for end in ENDS),
        *(
            _inside_limit("kvCacheBudget", end, "kvCache", "quantity(string({knob})).compareTo(quantity(string({limit}))) <= 0")
            for end in ENDS
        ),
    ))

    model: Model
    """The model and how it is named to clients."""
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Pods that serve."""
    engine: Engine = Field(default_factory=Engine)
    """How the server runs the model. Changing any of it restarts pods."""
    slo: Slo | None = None
    """Latency objectives. Without them the tuner has no goal and leaves the start values in force."""
    tuning: Tuning = Field(default_factory=Tuning)
    """What the operator may do to the knobs. Changing it restarts nothing."""
    drain: Drain = Field(default_factory=Drain)
    """How a pod ends."""
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The server's image. Default: the operator's."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the node fetches the image. Default: as Kubernetes decides."""
    template: Overlay | None = None
    """A PodTemplateSpec laid over ours: resources, node selection, volumes, more containers. Lists are merged by name; our
    container is called `server`, and its arguments belong in engine.extraArgs."""

    @model_validator(mode="after")
    def _inside_limits(self) -> Any:
        limits, knobs = self.engine.limits, self.tuning.knobs
        for name in ENDS:
            value = getattr(knobs.max_batch_size, name)
            if value is not None and limits.max_batch_size is not None and value > limits.max_batch_size:
                raise ValueError(f"tuning.knobs.maxBatchSize.{name} must not exceed engine.limits.maxBatchSize")
            budget = getattr(knobs.kv_cache_budget, name)
            if budget is not None and limits.kv_cache is not None and parse_bytes(budget) > parse_bytes(limits.kv_cache):
                raise ValueError(f"tuning.knobs.kvCacheBudget.{name} must not exceed engine.limits.kvCache")
        return self


class ObjectMeta(BaseModel):
    """What Weir reads of an object's metadata."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    name: Annotated[str, Field(max_length=52, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""


class InferenceDeployment(BaseModel):
    """One resource: a model, its servers and how they are tuned."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    api_version: Literal["weir.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["InferenceDeployment"] = KIND  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: Spec
    status: dict[str, Any] = Field(default_factory=dict)
