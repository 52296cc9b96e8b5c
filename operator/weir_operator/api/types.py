"""InferenceDeployment, typed once. The CRD is generated from this file (`python -m weir_operator.api.crd`).

A field's docstring becomes its description (`kubectl explain`); a rule becomes a CEL rule of the schema, with the sentence that
users read. The kinds of values are in `scalars`, the model in `model`, the knobs in `knobs`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from weir_operator.api.knobs import ENDS, Tuning
from weir_operator.api.model import Model, SecretRef
from weir_operator.api.names import API_VERSION, KIND
from weir_operator.api.quantity import parse_bytes
from weir_operator.api.scalars import (
    Duration,
    ExtraArgs,
    Labels,
    Overlay,
    Part,
    Peers,
    Pods,
    Quantity,
    Rule,
    rules,
    up_to,
)


class Limits(Part):
    """The envelope: what is allocated at start. Knobs move inside it; changing it restarts pods."""

    max_batch_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most rows that may ever run at once."""
    kv_cache: Quantity | None = None
    """Bytes of the KV cache pool. Default: what the container's memory limit leaves."""
    batch_tokens: Annotated[int, Field(ge=16, le=1_000_000)] | None = None
    """Most tokens in one step: decoding rows and prefill together."""


class Engine(Part):
    """How the server runs the model. Changing any of it restarts pods."""

    limits: Limits = Field(default_factory=Limits)
    """The envelope: what is allocated at start."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of one step. Default: the container's CPU limit."""
    prefill_chunk_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Prompt tokens that one step takes; 0 turns chunking off. Default: adaptive, measured on CPU."""
    prefill_grant_interval: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """After so many decode steps a waiting prefill gets a turn; 0 lets it wait without bound. Default: 16."""
    scheduler: Literal["fifo", "prefill_first"] | None = None
    """What a step takes first: rows that decode (`fifo`, the default) or prompts that wait (`prefill_first`)."""
    preemption: Literal["longest-first", "lowest-priority"] | None = None
    """In a full batch a request of higher priority takes the slot of a lower one, and this says whose. Absent: it waits."""
    pressure_policy: Literal["auto", "newest_stalled", "least_progress"] | None = None
    """Who gives way when KV memory runs out. Default: auto, what measured better."""
    offload: Quantity | None = None
    """Memory for the KV of rows that gave way. Absent: it is computed again."""
    prefix_caching: bool = True
    """Reuse the KV cache of prompts that begin alike."""
    extra_args: ExtraArgs = Field(default_factory=list)
    """More flags for `weir-server serve`, each as one string `--flag=value`."""


class Slo(Part):
    """Latency objectives: a request that misses one of them counts for nothing in goodput."""

    ttft: Duration
    """Time to the first token."""
    tpot: Duration
    """Time per output token after the first, as a request's mean."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Percent of recent requests that must meet both, for the condition SLOMet to be True."""


_SCALER_RULES: tuple[Rule, ...] = (
    ("!has(self.scaler) || self.mode == 'External'", "a scaler sets the replicas: mode must be External with it"),
    ("!has(self.scaler) || has(self.maxReplicas)", "a scaler needs maxReplicas"),
    (
        "!has(self.scaler) || self.scaler != 'ScaledObject' || has(self.prometheus)",
        "a ScaledObject needs prometheus, the server that it asks",
    ),
    ("!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas", "minReplicas must not exceed maxReplicas"),
    ("self.mode != 'Internal' || has(self.maxReplicas)", "mode Internal needs maxReplicas"),
)


class Autoscaling(Part):
    """Who sets the number of pods: one owner at a time."""

    model_config = {"json_schema_extra": rules(*_SCALER_RULES)}

    mode: Literal["Disabled", "Internal", "External"] = "Disabled"
    """Disabled: `spec.replicas` is the number of pods; `kubectl scale` and autoscalers whose target is this resource write it
    there. Internal: the operator sets it, from what is offered over what one pod can do within the objectives. External: an
    autoscaler whose target is the Deployment owns it. In the last two `spec.replicas` is where a first Deployment begins."""
    scaler: Literal["HorizontalPodAutoscaler", "ScaledObject"] | None = None
    """An autoscaler on the Deployment that the operator makes. Absent: you bring one. The HorizontalPodAutoscaler reads the
    pods' metric weir_requests_waiting, which an adapter must serve; the ScaledObject asks Prometheus for it and needs KEDA."""
    min_replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Fewest pods: of mode Internal, and of the scaler that the operator makes."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Most pods: of mode Internal, and of the scaler that the operator makes."""
    waiting_per_pod: Annotated[int, Field(ge=1, le=100_000)] = 4
    """What the scaler aims at: rows that wait for admission, as a mean over the pods."""
    scale_down_stabilization: up_to("1h") = "5m"  # type: ignore[valid-type]
    """Fewer pods only where they were enough for so long, at most 1h."""
    prometheus: Annotated[str, Field(max_length=512, pattern="^https?://[^ ]+$")] | None = None
    """Address of the Prometheus that a ScaledObject asks."""

    @model_validator(mode="after")
    def _scaler(self) -> Any:
        wrong = (
            self.scaler and self.mode != "External", self.scaler and self.max_replicas is None,
            self.scaler == "ScaledObject" and not self.prometheus,
            self.max_replicas is not None and self.min_replicas > self.max_replicas,
            self.mode == "Internal" and self.max_replicas is None,
        )
        for broken, (_, message) in zip(wrong, _SCALER_RULES, strict=True):
            if broken:
                raise ValueError(message)
        return self


class Drain(Part):
    """How a pod ends."""

    timeout: up_to("30m") = "120s"  # type: ignore[valid-type]
    """How long queued and running requests may go on after a pod is told to end, at most 30m. Up to 5m a change restarts
    nothing; beyond that the pods' grace period must grow, and they restart."""


_STUCK = "maxSurge and maxUnavailable must not both be 0: no pod could ever be replaced"


class Rollout(Part):
    """How pods are replaced by those of a changed template."""

    model_config = {"json_schema_extra": rules((
        "!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])", _STUCK,
    ))}

    max_surge: Pods = 1
    """Pods beyond the wanted number while a rollout goes on."""
    max_unavailable: Pods = 0
    """Pods that may be missing while a rollout goes on. With 0 an old pod ends only once a new one serves, so a rollout whose
    pods do not get ready stops by itself while the old ones serve."""
    progress_deadline: up_to("6h") = "10m"  # type: ignore[valid-type]
    """A rollout without progress for so long is reported as failed, and a pod that has not loaded its model by then is started
    anew, at most 6h. Up to 10m a change restarts nothing; beyond that the start-up probe grows with it, and pods restart."""

    @model_validator(mode="after")
    def _moves(self) -> Any:
        if {str(self.max_surge), str(self.max_unavailable)} <= {"0", "0%"}:
            raise ValueError(_STUCK)
        return self


class Disruption(Part):
    """What a node drain may do to the pods: a PodDisruptionBudget, where there is more than one pod or another value than 1."""

    max_unavailable: Pods = 1
    """Pods that may be evicted at a time."""


class Service(Part):
    """The Service in front of the pods. It carries the resource's name."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """How it is reached from outside the cluster, if at all."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8080
    """Its port."""
    annotations: Labels = Field(default_factory=dict)
    """For the load balancer's controller."""
    headless: bool = False
    """Also make a Service NAME-pods without an address of its own, whose DNS name lists every pod."""


class Auth(Part):
    """API keys that clients must show."""

    secret_ref: SecretRef
    """A Secret with the keys of clients."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern="^[-._a-zA-Z0-9]+$")] = "keys"
    """The entry of the Secret: one `key` or `name:key` a line."""


class Monitoring(Part):
    """How the pods' metrics reach Prometheus."""

    pod_monitor: bool = False
    """Make a PodMonitor, where the cluster has that kind (the Prometheus operator's)."""
    interval: up_to("1h") = "15s"  # type: ignore[valid-type]
    """How often it scrapes."""
    labels: Labels = Field(default_factory=dict)
    """By which a Prometheus selects the PodMonitor."""


class NetworkPolicy(Part):
    """Who may reach the pods, where the cluster's network enforces it."""

    enabled: bool = True
    """Make a NetworkPolicy: clients reach port 8080 only, and the control port 8081 is the operator's alone."""
    clients: Peers = Field(default_factory=list)
    """NetworkPolicyPeers that may reach port 8080. Empty: everybody."""


_GROWS = ("maxBatchSize", "max")
"""With tuning.envelope Roll the limit is where it begins, and this is how far it may grow."""
_ENDLESS = (
    "tuning.envelope Roll needs engine.limits.maxBatchSize, where it begins, and tuning.knobs.maxBatchSize.max, how far it may "
    "grow"
)


def _inside_limit(knob: str, end: str, limit: str, compare: str) -> Rule:
    """A knob's value against the envelope that holds it, where both are given."""
    inside, value = f"self.engine.limits.{limit}", f"self.tuning.knobs.{knob}.{end}"
    paths = [".".join(p.split(".")[:n]) for p in (inside, value) for n in range(2, p.count(".") + 2)]
    absent = " || ".join(f"!has({path})" for path in dict.fromkeys(paths))
    message = f"tuning.knobs.{knob}.{end} must not exceed engine.limits.{limit}"
    grows = "self.tuning.envelope == 'Roll' || " if (knob, end) == _GROWS else ""
    return f"{grows}{absent} || {compare.format(knob=value, limit=inside)}", message


_AIMLESS = "autoscaling.mode Internal needs slo or tuning.preset: what a pod can do is counted within the objectives"
_LONELY = "sidecar: true puts the server beside your application: template must have its containers"


class Spec(Part):
    """What should run."""

    model_config = {"json_schema_extra": rules(
        *(_inside_limit("maxBatchSize", end, "maxBatchSize", "{knob} <= {limit}") for end in ENDS),
        *(
            _inside_limit("kvCacheBudget", end, "kvCache", "quantity(string({knob})).compareTo(quantity(string({limit}))) <= 0")
            for end in ENDS
        ),
        (
            "self.tuning.envelope != 'Roll' || "
            "(has(self.engine.limits) && has(self.engine.limits.maxBatchSize) && has(self.tuning.knobs) && "
            "has(self.tuning.knobs.maxBatchSize) && has(self.tuning.knobs.maxBatchSize.max))",
            _ENDLESS,
        ),
        ("!self.sidecar || has(self.template)", _LONELY),
        ("self.autoscaling.mode != 'Internal' || has(self.slo) || has(self.tuning.preset)", _AIMLESS),
    )}

    model: Model
    """The model and how it is named to clients."""
    replicas: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Pods that serve. Leave it out of the manifest where an autoscaler or `kubectl scale` sets it."""
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)
    """Who sets the number of pods."""
    engine: Engine = Field(default_factory=Engine)
    """How the server runs the model. Changing any of it restarts pods."""
    slo: Slo | None = None
    """Latency objectives. Without them, and without a preset, the tuner has no goal and leaves the start values in force."""
    tuning: Tuning = Field(default_factory=Tuning)
    """What the operator may do to the knobs. Changing it restarts nothing."""
    drain: Drain = Field(default_factory=Drain)
    """How a pod ends."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How pods are replaced."""
    disruption: Disruption = Field(default_factory=Disruption)
    """What a node drain may do to the pods."""
    service: Service = Field(default_factory=Service)
    """The Service in front of the pods."""
    auth: Auth | None = None
    """API keys that clients must show. Absent: none are asked for."""
    monitoring: Monitoring = Field(default_factory=Monitoring)
    """How the pods' metrics reach Prometheus."""
    network_policy: NetworkPolicy = Field(default_factory=NetworkPolicy)
    """Who may reach the pods."""
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The server's image. Default: the operator's, as it was when what restarts pods last changed: a newer operator restarts
    nothing by itself. To adopt its image, set the annotation weir.dev/upgrade to a value that it did not have."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the node fetches the image. Default: as Kubernetes decides."""
    sidecar: bool = False
    """Put the server beside your application: `template` has your containers, and the server joins them as a native sidecar,
    the init container `server`, which starts before them and ends after them."""
    template: Overlay | None = None
    """A PodTemplateSpec laid over ours: resources, node selection, volumes, more containers. Lists are merged by name, another
    source of a volume of ours replaces its own, and null leaves ours as it is; our container is called `server`, and its
    arguments belong in engine.extraArgs."""

    @model_validator(mode="after")
    def _inside_limits(self) -> Any:
        limits, knobs, grows = self.engine.limits, self.tuning.knobs, self.tuning.envelope == "Roll"
        if grows and (limits.max_batch_size is None or knobs.max_batch_size.max is None):
            raise ValueError(_ENDLESS)
        for name in ENDS:
            value = getattr(knobs.max_batch_size, name)
            if grows and ("maxBatchSize", name) == _GROWS:
                continue
            if value is not None and limits.max_batch_size is not None and value > limits.max_batch_size:
                raise ValueError(f"tuning.knobs.maxBatchSize.{name} must not exceed engine.limits.maxBatchSize")
            budget = getattr(knobs.kv_cache_budget, name)
            if budget is not None and limits.kv_cache is not None and parse_bytes(budget) > parse_bytes(limits.kv_cache):
                raise ValueError(f"tuning.knobs.kvCacheBudget.{name} must not exceed engine.limits.kvCache")
        return self

    @model_validator(mode="after")
    def _aims_at_something(self) -> Any:
        if self.autoscaling.mode == "Internal" and self.slo is None and self.tuning.preset is None:
            raise ValueError(_AIMLESS)
        return self

    @model_validator(mode="after")
    def _beside_something(self) -> Any:
        pod = (self.template or {}).get("spec")
        if self.sidecar and not (isinstance(pod, dict) and pod.get("containers")):
            raise ValueError(_LONELY)
        return self


class ObjectMeta(BaseModel):
    """What Weir reads of an object's metadata."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    name: Annotated[str, Field(max_length=52, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    annotations: dict[str, str] = Field(default_factory=dict)


class InferenceDeployment(BaseModel):
    """One resource: a model, its servers and how they are tuned."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    api_version: Literal["weir.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["InferenceDeployment"] = KIND  # type: ignore[assignment]
    metadata: ObjectMeta
    spec: Spec
    status: dict[str, Any] = Field(default_factory=dict)
