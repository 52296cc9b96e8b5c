"""The operator's own metrics: every name once, with the sentence that documents it (and makes docs/operator-signals.md).

What describes an object (a condition, a watch's age) is read when it is asked for, so it is never older than what the operator
knows and is gone with the object. Times are Unix times where something may stop: an age that stops growing hides its own fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

disable_created_metrics()  # a second series for each counter, of no use beside the process's own start time
_RESOURCE = ["namespace", "name"]
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

API_CALLS = Counter(
    "weir_operator_api_calls", "Requests to the API server, watches aside; code `none`: no answer.", ["verb", "code"],
)
RECONCILES = Counter(
    "weir_operator_reconciles", "Passes over a resource: `ok`, `retry` (expected, tried again), `error` (a fault).", ["result"],
)
RECONCILE_SECONDS = Histogram("weir_operator_reconcile_seconds", "Time of one pass over a resource.", buckets=_SECONDS)
QUEUED_KEYS = Gauge("weir_operator_queued_keys", "Resources that wait for a pass, those after a failure included.")
LEADER = Gauge("weir_operator_leader", "1 while this process holds the Lease.")
TAKEOVERS = Counter("weir_operator_takeovers", "Times that this process began to lead.")
EVENTS = Counter(
    "weir_operator_events", "Events of resources: `written`, `held` (no news, or too many), `lost` (not accepted).", ["result"],
)
WATCH_LAG = Gauge("weir_operator_watch_lag_seconds", "For how long a watch has not told what a list showed.")
LOST_NAMESPACES = Gauge(
    "weir_operator_lost_namespaces", "Namespaces that the operator is to serve and cannot list: nothing is served there.",
)
POLLS = Counter("weir_tuner_polls", "Readings of pods' windows: `ok` or `silent`.", ["result"])
READ_AT = Gauge(
    "weir_tuner_last_reading_timestamp_seconds",
    "When the ready pod that was read longest ago was last read; absent without a ready pod.", _RESOURCE,
)
DECISIONS = Counter("weir_tuner_decisions", "Outcomes of decisions, one for each pod and tick.", ["rule", "outcome"])
MOVES = Counter("weir_tuner_moves", "Knobs set, by how it went.", ["knob", "result"])
KNOB = Gauge("weir_tuner_knob", "Effective value as read back.", [*_RESOURCE, "pod", "knob"])

REPLICAS = Gauge("weir_tuner_replicas", "Pods wanted, where the operator sets their number.", _RESOURCE)
LOAD = Gauge(
    "weir_tuner_load_ratio",
    "Rows offered over what the pods that answer can serve within the objectives, wherever the knobs stand; "
    "absent while unknown, and where spec.autoscaling.mode is Disabled.", _RESOURCE,
)

CONDITIONS = (
    "Ready", "Available", "Degraded", "MetricsAvailable", "SLOMet", "Saturated", "Paused", "KnobsUnsupported", "Contested",
)
"""Exported of each resource: what alerts and overviews ask for."""


class _Known(Collector):
    """What the operator knows now. The two sources are given when it starts; until then there is nothing to say."""

    def __init__(self) -> None:
        self.resources: Callable[[], Iterable[Mapping[str, Any]]] = tuple
        self.heard: Callable[[], Mapping[str, float]] = dict

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("weir_operator_build_info", "The operator's version; always 1.", labels=["version"])
        info.add_metric([version("weir")], 1)
        yield info
        heard = GaugeMetricFamily(
            "weir_operator_watch_event_timestamp_seconds", "When a watch of this kind last told something.", labels=["kind"],
        )
        for kind, at in self.heard().items():
            heard.add_metric([kind], at)
        yield heard
        resources = list(self.resources())
        yield GaugeMetricFamily("weir_operator_resources", "InferenceDeployments that are known.", value=len(resources))
        yield self._conditions(resources)

    @staticmethod
    def _conditions(resources: Iterable[Mapping[str, Any]]) -> Metric:
        family = GaugeMetricFamily(
            "weir_resource_condition", "1: the condition holds, 0: it does not; absent where it is unknown.",
            labels=[*_RESOURCE, "condition"],
        )
        for raw in resources:
            meta = raw["metadata"]
            for condition in (raw.get("status") or {}).get("conditions") or ():
                if condition.get("type") in CONDITIONS and condition.get("status") in ("True", "False"):
                    labels = [meta["namespace"], meta["name"], condition["type"]]
                    family.add_metric(labels, float(condition["status"] == "True"))
        return family


KNOWN = _Known()
REGISTRY.register(KNOWN)


def verb(method: str, target: str, content_type: str) -> str:
    """A request's verb as RBAC and audit logs have it; server-side apply, a patch to both, goes by its own name."""
    if method == "PATCH":
        return "apply" if "apply-patch" in content_type else "patch"
    if method == "GET":  # /api/v1/KINDS, /apis/GROUP/v1/KINDS, with two parts more in a namespace: one more is a name
        return "list" if (target.count("/") + target.startswith("/apis/")) % 2 else "get"
    return {"POST": "create", "PUT": "update", "DELETE": "delete"}.get(method, method.lower())


def catalogue() -> list[tuple[str, str, tuple[str, ...], str]]:
    """(name as exposed, kind, labels, sentence) of every family of ours, in the order in which they are registered."""
    found = []
    for collector in (*_instruments(), *KNOWN.collect()):
        if isinstance(collector, Metric):
            name, kind, labels, text = collector.name, collector.type, tuple(collector._labelnames), collector.documentation  # type: ignore[attr-defined]
        else:
            name, kind, labels, text = collector._name, collector._type, collector._labelnames, collector._documentation
        found.append((name + ("_total" if kind == "counter" else ""), kind, labels, text))
    return found


def _instruments() -> list[Any]:
    return [value for value in globals().values() if isinstance(value, Counter | Gauge | Histogram)]


def reference() -> str:
    """The catalogue as a section of documentation."""
    lines = [
        "## Metrics", "",
        "Served at `/metrics` of the health port, by both replicas of an operator; only the leader polls and decides.", "",
        "| name | kind | labels | meaning |", "|---|---|---|---|",
    ]
    for name, kind, labels, text in catalogue():
        lines.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels) or '–'} | {text} |")
    return "\n".join(lines) + "\n"
