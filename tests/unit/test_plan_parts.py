"""The small decisions of a plan: where a model lies, what a preset fills, what is pinned, what troubles a pod."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from weir_operator.api.knobs import RowsKnob
from weir_operator.plan import pin
from weir_operator.plan.manifests import Defaults, children, missing_kinds, wanted_replicas
from weir_operator.plan.observed import Observed
from weir_operator.plan.plan import parse
from weir_operator.plan.presets import PRESETS
from weir_operator.plan.sources import fetch_args, locate, served_name
from weir_operator.plan.trouble import ADVICE, downloading, load_failure, troubles

NOW = "2026-01-01T01:00:00Z"


def resource(annotations: Any = None, **spec: Any) -> Any:
    return parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "generation": 1, "annotations": annotations or {}},
        "spec": {"model": {"source": "file:///m.gguf"}, **spec},
    })


@pytest.mark.parametrize(("source", "path", "name", "mounted"), [
    ("file:///data/m.gguf", "/data/m.gguf", "m", None),
    ("package://dist/m.Q4.gguf", "package://dist/m.Q4.gguf", "m.Q4", None),
    ("pvc://weights/llama/7b", "/models/llama/7b", "7b", "weights"),
    ("oci://ghcr.io/acme/tiny:1", "/models", "tiny", "ghcr.io/acme/tiny:1"),
    ("oci://ghcr.io/acme/tiny@sha256:00#a/m.gguf", "/models/a/m.gguf", "m", "ghcr.io/acme/tiny@sha256:00"),
    ("hf://acme/Tiny-1.5", "/models/hf/acme/Tiny-1.5", "acme/Tiny-1.5", None),
    ("hf://acme/tiny@v1", "/models/hf/acme/tiny@v1", "acme/tiny", None),
    ("hf://acme/tiny@v1/q/m.gguf", "/models/hf/acme/tiny@v1/q/m.gguf", "m", None),
    ("s3://bucket/a/folder/", "/models/s3/bucket/a/folder", "folder", None),
    ("https://host:8443/a/m.gguf", "/models/https/host:8443/a/m.gguf", "m", None),
])
def test_where_a_model_lies_and_what_it_is_called(source: str, path: str, name: str, mounted: str | None) -> None:
    found = resource(model={"source": source}).spec
    located = locate(found)
    assert (located.path, served_name(found.model), located.claim or located.image) == (path, name, mounted)
    assert (fetch_args(found)[:3] == ["fetch", source, f"--to={path}"]) is located.downloaded


def test_a_preset_fills_what_is_left_out_and_overrules_nothing() -> None:
    for name, (slo, bounds) in PRESETS.items():
        spec = resource(tuning={"preset": name}).spec
        assert spec.slo == slo
        assert spec.tuning.knobs.max_queue_depth == RowsKnob(initial=bounds["initial"], max=bounds["max"])
        own = {"ttft": "9s", "tpot": "9ms"}
        for knob in ({"max": 4}, {"min": 5000}, {"initial": 2000}, {"min": 1, "initial": 2, "max": 3}):
            spec = resource(slo=own, tuning={"preset": name, "knobs": {"maxQueueDepth": knob}}).spec
            made = spec.tuning.knobs.max_queue_depth
            assert (spec.slo and spec.slo.ttft) == "9s"
            assert {k: getattr(made, k) for k in knob} == knob
            assert (made.min or 0) <= (made.initial or 0) <= (made.max or 0), "and the three agree"
    assert resource().spec.slo is None


def made_with(resource_: Any, image: str, **changes: Any) -> dict[str, Any]:
    notes = pin.annotation(resource_, pin.Pinned(image, **changes))
    return {"metadata": {"annotations": notes}, "spec": {"replicas": 4}}


CURRENT = pin.Pinned("new:2")


def test_pinned_defaults_hold_until_what_restarts_pods_changes() -> None:
    deployment = made_with(resource(), "old:1", parallel=2)
    assert pin.in_force(resource(), deployment, CURRENT) == pin.Pinned("old:1", parallel=2)
    assert pin.in_force(resource(slo={"ttft": "1s", "tpot": "9ms"}, replicas=3), deployment, CURRENT).image == "old:1"
    assert pin.in_force(resource(engine={"prefixCaching": True}), deployment, CURRENT).image == "old:1", "a default, declared"
    assert pin.in_force(resource(engine={"threads": 2}), deployment, CURRENT) == CURRENT
    assert pin.in_force(resource({"weir.dev/upgrade": "now"}), deployment, CURRENT) == CURRENT
    again = made_with(resource({"weir.dev/upgrade": "now"}), "new:2")
    assert pin.in_force(resource({"weir.dev/upgrade": "now"}), again, pin.Pinned("newer:3")).image == "new:2"
    assert pin.in_force(resource(), None, CURRENT) == CURRENT


@pytest.mark.parametrize("text", [
    "", "x", "{}", "[]", "null", '{"of": 1}', '{"of": "OF"}', '{"of": "OF", "defaults": []}', '{"of": "OF", "defaults": {}}',
    '{"of": "OF", "defaults": {"parallel": 2}}',
])
def test_a_pin_that_somebody_spoilt_is_made_anew(text: str) -> None:
    note = text.replace("OF", pin.of_spec(resource()))
    deployment = {"metadata": {"annotations": {"weir.dev/pinned": note}}}
    assert pin.in_force(resource(), deployment, CURRENT) == CURRENT


@pytest.mark.parametrize("lacking", [f.name for f in fields(pin.Pinned) if f.name != "image"])
def test_a_field_of_a_later_operator_restarts_nothing_that_an_earlier_one_made(lacking: str) -> None:
    """It means what there was before it, whatever new pods get; and what an earlier operator does not know, it passes over."""
    deployment = made_with(resource(), "old:1")
    saved = json.loads(deployment["metadata"]["annotations"]["weir.dev/pinned"])
    del saved["defaults"][lacking]
    saved["defaults"]["of-a-later-one"] = 1
    deployment["metadata"]["annotations"]["weir.dev/pinned"] = json.dumps(saved)
    assert pin.in_force(resource(), deployment, replace(CURRENT, **{lacking: 77})) == pin.Pinned("old:1")


def test_the_users_image_is_the_users() -> None:
    own = resource(image="mine:1")
    seen = Observed(deployment=made_with(own, "old:1"))
    [deployment] = [m for m in children(own, Defaults("new:2", "t"), seen) if m["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"
    assert json.loads(deployment["metadata"]["annotations"]["weir.dev/pinned"])["defaults"]["image"] == "old:1"


EXTERNAL = {"autoscaling": {"mode": "External", "minReplicas": 3}, "replicas": 2}


@pytest.mark.parametrize(("spec", "there", "written", "wanted"), [
    ({"replicas": 2}, False, 2, 2), ({"replicas": 2}, True, 2, 2), (EXTERNAL, False, 3, 3), (EXTERNAL, True, None, 4),
])
def test_the_number_of_pods_has_one_owner(spec: Any, there: bool, written: int | None, wanted: int) -> None:
    seen = Observed(deployment={"metadata": {}, "spec": {"replicas": 4}} if there else None)
    [deployment] = [m for m in children(resource(**spec), Defaults("i", "t"), seen) if m["kind"] == "Deployment"]
    assert deployment["spec"].get("replicas") == written
    assert wanted_replicas(resource(**spec), seen) == wanted


def test_a_kind_that_the_cluster_lacks_is_left_out_and_told() -> None:
    asked = resource(monitoring={"podMonitor": True}, autoscaling={
        "mode": "External", "scaler": "ScaledObject", "maxReplicas": 3, "prometheus": "http://p:9090",
    })
    for there in (frozenset[str](), frozenset({"PodMonitor"}), frozenset({"PodMonitor", "ScaledObject"})):
        seen = Observed(kinds=there)
        made = {m["kind"] for m in children(asked, Defaults("i", "t"), seen)} & {"PodMonitor", "ScaledObject"}
        assert made == there
        assert set(missing_kinds(asked, seen)) == {"PodMonitor", "ScaledObject"} - there
    assert missing_kinds(resource(), Observed(kinds=frozenset())) == []


def pod(
    *containers: dict[str, Any], ready_since: str = "2026-01-01T00:00:00Z", phase: str = "Running", **meta: Any,
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": ready_since}]
    status = {"phase": phase, "conditions": conditions, "containerStatuses": list(containers)}
    return {"metadata": {"name": "p", **meta}, "status": status}


def running(since: str, started: bool = True, name: str = "server", last: Any = None) -> dict[str, Any]:
    state = {"running": {"startedAt": since}}
    return {"name": name, "ready": False, "started": started, "state": state, "lastState": (last or {}).get("state", {})}


def ended(code: int, reason: str = "Error", name: str = "server") -> dict[str, Any]:
    return {"name": name, "ready": False, "state": {"terminated": {"exitCode": code, "reason": reason, "message": "a\nlast"}}}


@pytest.mark.parametrize(("found", "reason"), [
    (pod(running("2026-01-01T00:59:00Z")), None),  # starts
    (pod(running("2026-01-01T00:00:00Z", started=False)), None),  # loads for an hour: its start-up probe decides
    (pod(running("2026-01-01T00:30:00Z"), ready_since="2026-01-01T00:40:00Z"), "ProbeFailing"),  # was ready
    (pod(running("2026-01-01T00:30:00Z")), "ProbeFailing"),  # never was, for half an hour
    (pod(running("2026-01-01T00:30:00Z", name="app")), None),  # not ours to judge
    (pod(ended(0)), None),
    (pod(ended(1)), "CrashLooping"),
    (pod(ended(137, "OOMKilled")), "OutOfMemory"),
    (pod(ended(2, name="fetch")), "DownloadFailed"),
    (pod(ended(1), deletionTimestamp=NOW), None),  # it is on its way out
    (pod(running("2026-01-01T00:30:00Z", last=ended(1)), ready_since="2026-01-01T00:40:00Z"), "ProbeFailing"),  # not that end
    (pod(running("2026-01-01T00:30:00Z", last=ended(137, "OOMKilled"))), "ProbeFailing"),
    (pod(running("2026-01-01T00:59:00Z", last=ended(1))), None),  # it has started again
    (pod(running("2026-01-01T00:59:00Z", started=False, last=ended(1))), "CrashLooping"),  # another try of what failed
    (pod(running("2026-01-01T00:59:00Z", started=False, last=ended(137, "OOMKilled"))), "OutOfMemory"),
    (pod(running("2026-01-01T00:59:00Z", name="fetch", last=ended(1, name="fetch"))), None),  # downloads, this time
    (pod(ended(137), phase="Failed"), None),  # evicted: another is in its place
    (pod(ended(137), phase="Succeeded"), None),
    (pod(ended(137), phase="Running"), "CrashLooping"),
])
def test_what_troubles_a_pod(found: dict[str, Any], reason: str | None) -> None:
    said = troubles([found], NOW)
    assert [r for r, _ in said] == ([reason] if reason else [])
    assert all(words.startswith("p: ") and words.endswith(ADVICE[r]) for r, words in said)


@pytest.mark.parametrize(("found", "words"), [
    (pod(ended(2)), "last"),
    (pod(ended(1)), None),
    (pod(running("2026-01-01T00:59:00Z", started=False, last=ended(2))), "last"),  # another try of what failed
    (pod(running("2026-01-01T00:30:00Z", last=ended(2))), None),  # it was loaded since
    (pod(ended(2), phase="Failed"), None),
    (pod(ended(2), deletionTimestamp=NOW), None),
])
def test_what_cannot_be_loaded_is_what_a_pod_of_now_could_not_load(found: dict[str, Any], words: str | None) -> None:
    assert load_failure([found]) == words


def test_an_evicted_pod_says_nothing_of_the_one_in_its_place() -> None:
    evicted, fresh = pod(ended(137), phase="Failed"), pod(running("2026-01-01T00:59:00Z", started=False))
    assert troubles([evicted, fresh], NOW) == []
    fetching = running("2026-01-01T00:59:00Z", name="fetch")
    assert (downloading([pod(fetching)]), downloading([pod(fetching, phase="Failed")])) == (True, False)


def test_a_claim_that_cannot_be_used_is_told_apart_from_a_node_without_room() -> None:
    def waiting(words: str) -> dict[str, Any]:
        full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
        return {"metadata": {"name": "p"}, "status": {"conditions": [full]}}

    volume, room = waiting('0/1 nodes: persistentvolumeclaim "x" not found'), waiting("0/1 nodes: Insufficient cpu.")
    assert [t[0] for t in troubles([room, volume, pod(ended(1))], NOW)] == ["CrashLooping", "VolumeNotReady", "Unschedulable"]
