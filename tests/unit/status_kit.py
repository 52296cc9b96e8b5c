"""A whole status: everything that the operator ever writes there, made by what writes it; and a schema's fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fake_server import FakeServer

from weir_operator.plan.manifests import Defaults
from weir_operator.plan.observed import Observed
from weir_operator.plan.plan import parse, plan
from weir_operator.plan.tuning import counted, proposed, remembered, report, resumable, scaled
from weir_operator.tuner.plant import Plant
from weir_operator.tuner.replicas import ReplicaDecision, ReplicaState, Scaling
from weir_operator.tuner.types import Canary, Learned, Mix, Outcome, Pending, PodState, PodView, Poll, Record, TunerState
from weir_server.contract import SLOS

NOW = "2026-01-01T00:00:00Z"
PLANT = Plant(0.04, 0.003, 1e-6, 0.002, 64)
SPEC: dict[str, Any] = {
    "model": {"source": "file:///models/m.gguf"}, "slo": {"ttft": "2s", "tpot": "80ms"},
    "engine": {"limits": {"maxBatchSize": 8}},
    "tuning": {"envelope": "Roll", "knobs": {"maxBatchSize": {"max": 64}}},
    "autoscaling": {"mode": "Internal", "minReplicas": 2, "maxReplicas": 9},
}


def fields_of(schema: dict[str, Any], where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and schema of every field that a schema declares."""
    for name, part in schema.get("properties", {}).items():
        yield f"{where}.{name}", part
        yield from fields_of(part, f"{where}.{name}")
        yield from fields_of(part.get("items", {}), f"{where}.{name}[]")


def _polls() -> tuple[Poll, ...]:
    server = FakeServer()
    windows = []
    for finished in (0, 20):
        server.counters = {"instance": "i", "slo_total": finished, "slo_good": dict.fromkeys(SLOS, finished)}
        windows.append(server.window())
    return tuple(Poll(1000.0 + 5 * i, window) for i, window in enumerate(windows))


def full_status() -> dict[str, Any]:
    resource = parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment", "spec": SPEC,
        "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "generation": 1},
    })
    figures = {"goodput": 1.5, "interval": 0.0123456789}
    move = Record(1000.0, "a", "set-point", Outcome.MOVED, "more fit", {"max_batch_size": (4.0, 9.0)}, {}, figures, figures)
    pod = PodState(
        "i", 5.0, prior=PLANT, mix=Mix(1.0, (1.0,), 64.0, 2.0, 100.0), pending=Pending(1.0, {"a": 1.0}, {"a": 2.0}, 3.0),
        spread={150: 0.5}, ceiling=9, ceiling_until=9999.0,
    )
    learned = Learned("llama////", 64.5, 2.0, 100.0, 8, 16, 0.01, 8, 10.25, PLANT, 900.0)
    state = TunerState(1030.0, {"a": pod}, (learned,), {"llama////": Canary("a", "i", 9, 1.0)})
    count = ReplicaDecision(ReplicaState(1.0, wanted=((1.0, 3),)), 3, Scaling.OUT, "more is offered")
    history = scaled(remembered((), [move]), 2, count, 1000.0)
    news = report(resource, {"a": PodView("a", "llama////", None, _polls())}, {"a"}, {"a": move}, state, history, {}, "", ())
    shown = {"outcome": Scaling.OUT.value, "leaving": ["a"]}
    news = resumable(counted(proposed(news, 16), 3, count, shown, 1), state, count.state)
    done = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, "observedGeneration": 1}
    deployment = {"metadata": {"generation": 1}, "spec": {"replicas": 2}, "status": done}
    found = plan(resource, Observed(NOW, deployment, tuning=news), Defaults("i", "t")).status
    return {**found, "operator": "weir-system"}
