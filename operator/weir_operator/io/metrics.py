"""The operator's own metrics, every name once."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

API_CALLS = Counter("weir_operator_api_calls", "Requests to the API server.", ["verb", "code"])
RECONCILES = Counter("weir_operator_reconciles", "Passes over a resource.", ["result"])
RECONCILE_SECONDS = Histogram("weir_operator_reconcile_seconds", "Time of one pass over a resource.")
QUEUED_KEYS = Gauge("weir_operator_queued_keys", "Resources that wait for a pass.")
LEADER = Gauge("weir_operator_leader", "1 while this process holds the Lease.")
WATCH_LAG = Gauge("weir_operator_watch_lag_seconds", "For how long a watch has not told what a list showed.")
POLLS = Counter("weir_tuner_polls", "Readings of pods' windows.", ["result"])
DECISIONS = Counter("weir_tuner_decisions", "Outcomes of decisions, one for each pod and tick.", ["rule", "outcome"])
MOVES = Counter("weir_tuner_moves", "Knobs set, by how it went.", ["knob", "result"])
KNOB = Gauge("weir_tuner_knob", "Effective value as read back.", ["namespace", "name", "pod", "knob"])
