"""The Grafana dashboards of the chart, from a short description of each: `dashboards()` gives file name → JSON.

The server's series carry `namespace` and `pod` of their pod, as any scrape of pods gives them; a deployment's pods are found by
the names that a Deployment gives. The operator's series carry `namespace` and `name` of the resource.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

POD = 'namespace="$namespace",pod=~"$name-[a-z0-9]+-[a-z0-9]+"'
RESOURCE = 'namespace="$namespace",name="$name"'
SOURCE = {"type": "prometheus", "uid": "$datasource"}
HEIGHT = 7


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: legend → PromQL."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    text: str = ""
    stacked: bool = False


def quantiles(family: str, by: str = "") -> dict[str, str]:
    found = {}
    for q in (0.5, 0.95, 0.99):
        rate = f"sum by (le{by}) (rate({family}_bucket{{{POD}}}[$__rate_interval]))"
        found[f"p{q * 100:g}"] = f"histogram_quantile({q}, {rate})"
    return found


def by(label: str, family: str, more: str = "", per_second: bool = True) -> str:
    """The sum of a family of the deployment's pods by one label."""
    series = f"{family}{{{POD}{more}}}"
    return f"sum by ({label}) ({f'rate({series}[$__rate_interval])' if per_second else series})"


def share(of: str) -> str:
    """The part of finished rows that met both objectives."""
    good, total = (f'sum(rate(weir_slo_{part}{{{of},slo="both"}}[$__rate_interval]))' for part in ("good_total", "total"))
    return f"{good} / {total}"



DEPLOYMENT: list[tuple[str, list[Panel]]] = [
    ("Is it well?", [
        Panel("Conditions", {"{{condition}}": f"max by (condition) (weir_resource_condition{{{RESOURCE}}})"},
              kind="stat", width=12, text="1: holds, 0: does not, absent: unknown."),
        Panel("Requests that met both objectives", {"share": share(POD)}, "percentunit", 6),
        Panel("Rows per second", {
            "finished": f"sum(rate(weir_requests_finished_total{{{POD}}}[$__rate_interval]))",
            "refused": f"sum(rate(weir_requests_rejected_total{{{POD}}}[$__rate_interval]))",
        }, "ops", 6),
    ]),
    ("Queue and refusals", [
        Panel("Queue depth by what its head waits for", {
            "{{bound}}": by("bound", "weir_requests_waiting_by_bound", per_second=False),
        }, stacked=True),
        Panel("503 by reason and bound", {"{{reason}}, {{bound}}": by("reason, bound", "weir_requests_rejected_total")}, "ops",
              stacked=True),
        Panel("Rows in the batch", {"{{pod}}": by("pod", "weir_requests_running", per_second=False)}),
    ]),
    ("Knobs (moves are marked)", [
        Panel("Batch size", {
            "{{pod}} effective": f'weir_knob_effective{{{POD},knob="max_batch_size"}}',
            "{{pod}} target": f'weir_knob_target{{{POD},knob="max_batch_size"}}',
            "envelope": f'max(weir_envelope{{{POD},knob="max_batch_size",bound="max"}})',
        }, width=6),
        Panel("Queue depth allowed", {"{{pod}}": f'weir_knob_effective{{{POD},knob="max_queue_depth"}}'}, width=6),
        Panel("KV budget", {
            "{{pod}} effective": f'weir_knob_effective{{{POD},knob="kv_cache_budget"}}',
            "envelope": f'max(weir_envelope{{{POD},knob="kv_cache_budget",bound="max"}})',
        }, "bytes", 6),
        Panel("Admission watermark", {"{{pod}}": f'weir_knob_effective{{{POD},knob="admission_watermark"}}'}, "percentunit", 6),
    ]),
    ("Latency", [
        Panel("Time to first token", quantiles("weir_time_to_first_token_seconds"), "s"),
        Panel("Time per output token", quantiles("weir_time_per_output_token_seconds"), "s"),
        Panel("Time in the queue", quantiles("weir_queue_time_seconds"), "s"),
    ]),
    ("Engine", [
        Panel("Tokens per second", {
            "generated": f"sum(rate(weir_generation_tokens_total{{{POD}}}[$__rate_interval]))",
            "prompt": f"sum(rate(weir_prompt_tokens_total{{{POD}}}[$__rate_interval]))",
            "of those cached": f"sum(rate(weir_prompt_tokens_cached_total{{{POD}}}[$__rate_interval]))",
        }, width=6),
        Panel("Seconds per step", {
            "{{pod}}": f"{by('pod', 'weir_engine_step_seconds_total')} / {by('pod', 'weir_engine_steps_total')}",
        }, "s", 6),
        Panel("KV cache in use", {"{{pod}}": f"weir_kv_usage_ratio{{{POD}}}"}, "percentunit", 6),
        Panel("Preemptions", {"{{cause}}": by("cause", "weir_preemptions_total")}, "ops", 6),
        Panel("Memory", {
            "{{pod}} used": f"weir_memory_used_bytes{{{POD}}}", "limit": f"max(weir_memory_limit_bytes{{{POD}}})",
        }, "bytes", 12),
        Panel("Since the tuner read the pods", {
            "seconds": f"time() - max(weir_tuner_last_reading_timestamp_seconds{{{RESOURCE}}})",
        }, "s", 12),
    ]),
]

ALL = 'namespace=~"$namespace"'


def those(condition: str) -> str:
    """How many resources have a condition."""
    return f'sum(max by (namespace, name) (weir_resource_condition{{{ALL},condition="{condition}"}}))'


FLEET: list[tuple[str, list[Panel]]] = [
    ("The fleet", [
        Panel("InferenceDeployments", {"known": "max(weir_operator_resources)"}, kind="stat", width=4),
        Panel("Ready", {"ready": those("Ready")}, kind="stat", width=4),
        Panel("Degraded", {"degraded": those("Degraded")}, kind="stat", width=4),
        Panel("Refusing", {"refusing": those("Saturated")}, kind="stat", width=4),
        Panel("Met both objectives", {"share": share(ALL)}, "percentunit", 8),
    ]),
    ("By deployment", [
        Panel("Conditions", {"": f"max by (namespace, name, condition) (weir_resource_condition{{{ALL}}})"},
              kind="table", width=12),
        Panel("Refused rows per second, the ten worst pods", {
            "{{namespace}}/{{pod}}":
                f"topk(10, sum by (namespace, pod) (rate(weir_requests_rejected_total{{{ALL}}}[$__rate_interval])) > 0)",
        }, "ops", 12),
        Panel("Tokens per second", {
            "{{namespace}}": f"sum by (namespace) (rate(weir_generation_tokens_total{{{ALL}}}[$__rate_interval]))",
        }, stacked=True),
        Panel("Rows waiting", {"{{namespace}}": f"sum by (namespace) (weir_requests_waiting{{{ALL}}})"}, stacked=True),
        Panel("Rows running", {"{{namespace}}": f"sum by (namespace) (weir_requests_running{{{ALL}}})"}, stacked=True),
    ]),
    ("The tuner", [
        Panel("Decisions by rule and outcome", {
            "{{rule}}: {{outcome}}": "sum by (rule, outcome) (rate(weir_tuner_decisions_total[$__rate_interval]))",
        }, "ops", 12, stacked=True),
        Panel("Moves by knob and result", {
            "{{knob}}: {{result}}": "sum by (knob, result) (increase(weir_tuner_moves_total[$__rate_interval]))",
        }, width=6),
        Panel("Readings", {"{{result}}": "sum by (result) (rate(weir_tuner_polls_total[$__rate_interval]))"}, "ops", 6),
    ]),
    ("The operator", [
        Panel("Passes", {"{{result}}": "sum by (result) (rate(weir_operator_reconciles_total[$__rate_interval]))"}, "ops", 6),
        Panel("Time of a pass", {
            f"p{q * 100:g}":
                f"histogram_quantile({q}, sum by (le) (rate(weir_operator_reconcile_seconds_bucket[$__rate_interval])))"
            for q in (0.5, 0.95, 0.99)
        }, "s", 6),
        Panel("Waiting for a pass", {"{{pod}}": "weir_operator_queued_keys"}, width=6),
        Panel("Requests to the API server", {
            "{{verb}} {{code}}": "sum by (verb, code) (rate(weir_operator_api_calls_total[$__rate_interval]))",
        }, "ops", 6),
        Panel("Leader", {"{{pod}}": "weir_operator_leader"}, width=6),
        Panel("Lag of the watches", {"{{pod}}": "weir_operator_watch_lag_seconds"}, "s", 6),
        Panel("Since each watch told something", {
            "{{kind}}": "time() - max by (kind) (weir_operator_watch_event_timestamp_seconds)",
        }, "s", 6),
        Panel("Events", {"{{result}}": "sum by (result) (increase(weir_operator_events_total[$__rate_interval]))"}, width=6),
    ]),
]


def _variable(name: str, query: str, several: bool = False) -> dict[str, Any]:
    return {
        "name": name, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1,
        "multi": several, "includeAll": several, "allValue": ".*" if several else None,
    }


_SOURCES = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
_NAMESPACE = "label_values(weir_resource_condition, namespace)"
_MOVES = {
    "name": "Moves", "enable": True, "iconColor": "orange", "datasource": SOURCE, "step": "15s",
    "expr": f"changes(weir_knob_target{{{POD}}}[1m]) > 0", "titleFormat": "{{knob}} moved", "textFormat": "{{pod}}",
}


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.text, "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend or "__auto",
             **({"format": "table", "instant": True} if panel.kind == "table" else {})}
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }
    if panel.stacked:
        found["fieldConfig"]["defaults"]["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 20}
    return found


def _dashboard(
    uid: str, title: str, rows: list[tuple[str, list[Panel]]], variables: list[Any], marks: list[Any],
) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for name, row in rows:
        panels.append({"id": len(panels) + 1, "type": "row", "title": name, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > 24:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += HEIGHT
    return {
        "uid": uid, "title": title, "tags": ["weir"], "schemaVersion": 39, "editable": True, "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"}, "annotations": {"list": marks}, "templating": {"list": variables},
        "panels": panels,
    }


def dashboards() -> dict[str, str]:
    """File name → JSON."""
    name = _variable("name", 'label_values(weir_resource_condition{namespace="$namespace"}, name)')
    found = {
        "fleet": _dashboard("weir-fleet", "Weir: fleet", FLEET, [_SOURCES, _variable("namespace", _NAMESPACE, True)], []),
        "deployment": _dashboard(
            "weir-deployment", "Weir: one deployment", DEPLOYMENT,
            [_SOURCES, _variable("namespace", _NAMESPACE), name], [_MOVES],
        ),
    }
    return {f"{key}.json": json.dumps(value, indent=1, ensure_ascii=False) + "\n" for key, value in found.items()}
