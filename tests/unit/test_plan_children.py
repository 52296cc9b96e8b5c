"""Manifests: what restarts pods, what belongs to whom, and that the server knows every flag that it is given."""

import base64
from typing import Any

import pytest
import yaml

from weir_operator.api.types import Spec
from weir_operator.plan.args import boot_file, server_args
from weir_operator.plan.manifests import Defaults, children
from weir_operator.plan.overlay import overlaid
from weir_operator.plan.pin import RESTARTING, of_spec
from weir_operator.plan.plan import parse
from weir_operator.plan.pods import pod_template, token_secret_name

DEFAULTS = Defaults(image="registry/weir-server:1", token="t0ken")


def resource(name: str = "chat", **spec: Any) -> Any:
    return parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": "team-a", "uid": "u-1", "generation": 1},
        "spec": {"model": {"source": "file:///models/m.gguf"}, **spec},
    })


def child(found: Any, kind: str) -> dict[str, Any]:
    [one] = [m for m in children(found, DEFAULTS) if m["kind"] == kind]
    return one


HUB = {"source": "hf://acme/tiny@main"}
MODEL = {"source": "file:///models/m.gguf"}
SCALER = {"mode": "External", "scaler": "ScaledObject", "maxReplicas": 4, "prometheus": "http://prometheus:9090"}
APP = {"spec": {"containers": [{"name": "app", "image": "app:1"}]}}
GROWS = {"engine": {"limits": {"maxBatchSize": 8}}, "tuning": {"knobs": {"maxBatchSize": {"max": 8}}}}
# field of the spec → (a value, does it restart pods?[, what it is a change of])
RESTARTS = {
    "model.source": ({"model": {"source": "file:///models/other.gguf"}}, True),
    "model.servedName": ({"model": {**MODEL, "servedName": "x"}}, True),
    "model.maxModelLen": ({"model": {**MODEL, "maxModelLen": 4096}}, True),
    "model.quantization": ({"model": {**MODEL, "quantization": "int8"}}, True),
    "model.dtype": ({"model": {**MODEL, "dtype": "float32"}}, True),
    "model.endpoint": ({"model": {**HUB, "endpoint": "https://hub.example"}}, True, {"model": HUB}),
    "model.sha256": (
        {"model": {"source": "hf://acme/tiny/m.gguf", "sha256": "0" * 64}}, True, {"model": {"source": "hf://acme/tiny/m.gguf"}},
    ),
    "model.secretRef.name": ({"model": {**HUB, "secretRef": {"name": "hub"}}}, True, {"model": HUB}),
    "model.cache.size": ({"model": {**HUB, "cache": {"size": "2Gi"}}}, True, {"model": HUB}),
    "model.cache.claimName": ({"model": {**HUB, "cache": {"claimName": "shared"}}}, True, {"model": HUB}),
    **{
        f"model.cache.{field}": (
            {"model": {**HUB, "cache": {"size": "2Gi", field: value}}}, False, {"model": {**HUB, "cache": {"size": "2Gi"}}},
        )
        for field, value in (("storageClassName", "fast"), ("accessMode", "ReadWriteMany"), ("reclaimPolicy", "Delete"))
    },
    "replicas": ({"replicas": 3}, False),
    **{
        f"autoscaling.{field}": ({"autoscaling": {**SCALER, field: value}}, False)
        for field, value in (
            ("mode", "External"), ("scaler", "HorizontalPodAutoscaler"), ("minReplicas", 2), ("maxReplicas", 9),
            ("waitingPerPod", 8), ("scaleDownStabilization", "1m"), ("prometheus", "https://other"),
        )
    },
    "engine.limits.maxBatchSize": ({"engine": {"limits": {"maxBatchSize": 64}}}, True),
    "engine.limits.kvCache": ({"engine": {"limits": {"kvCache": "2Gi"}}}, True),
    "engine.limits.batchTokens": ({"engine": {"limits": {"batchTokens": 512}}}, True),
    "engine.threads": ({"engine": {"threads": 2}}, True),
    "engine.prefillChunkTokens": ({"engine": {"prefillChunkTokens": 128}}, True),
    "engine.prefillGrantInterval": ({"engine": {"prefillGrantInterval": 4}}, True),
    "engine.scheduler": ({"engine": {"scheduler": "prefill_first"}}, True),
    "engine.preemption": ({"engine": {"preemption": "longest-first"}}, True),
    "engine.pressurePolicy": ({"engine": {"pressurePolicy": "least_progress"}}, True),
    "engine.offload": ({"engine": {"offload": "512Mi"}}, True),
    "engine.prefixCaching": ({"engine": {"prefixCaching": False}}, True),
    "engine.extraArgs": ({"engine": {"extraArgs": ["--page-size=32"]}}, True),
    "slo.ttft": ({"slo": {"ttft": "1s", "tpot": "80ms"}}, False),
    "slo.tpot": ({"slo": {"ttft": "2s", "tpot": "40ms"}}, False),
    "slo.percentile": ({"slo": {"ttft": "2s", "tpot": "40ms", "percentile": 90}}, False),
    "tuning.preset": ({"tuning": {"preset": "latency"}}, False),
    "tuning.mode": ({"tuning": {"mode": "Advise"}}, False),
    "tuning.envelope": (
        {"tuning": {"envelope": "Roll", **GROWS["tuning"]}, "engine": GROWS["engine"]}, False, {**GROWS},
    ),
    "tuning.paused": ({"tuning": {"paused": True}}, False),
    **{
        f"tuning.knobs.{knob}.{end}": ({"tuning": {"knobs": {knob: {end: value}}}}, False)
        for knob, value in (
            ("maxBatchSize", 7), ("maxQueueDepth", 9), ("kvCacheBudget", "1Gi"), ("admissionWatermarkPercent", 2),
        )
        for end in ("min", "initial", "max")
    },
    "drain.timeout": ({"drain": {"timeout": "5m"}}, False),
    "rollout.maxSurge": ({"rollout": {"maxSurge": "50%"}}, False),
    "rollout.maxUnavailable": ({"rollout": {"maxUnavailable": 1}}, False),
    "rollout.progressDeadline": ({"rollout": {"progressDeadline": "5m"}}, False),
    "disruption.maxUnavailable": ({"disruption": {"maxUnavailable": 0}}, False),
    "service.type": ({"service": {"type": "NodePort"}}, False),
    "service.port": ({"service": {"port": 80}}, False),
    "service.annotations": ({"service": {"annotations": {"a": "b"}}}, False),
    "service.headless": ({"service": {"headless": True}}, False),
    "auth.secretRef.name": ({"auth": {"secretRef": {"name": "keys"}}}, True),
    "auth.key": ({"auth": {"secretRef": {"name": "keys"}, "key": "x"}}, True, {"auth": {"secretRef": {"name": "keys"}}}),
    "monitoring.podMonitor": ({"monitoring": {"podMonitor": True}}, False),
    "monitoring.interval": ({"monitoring": {"interval": "5s"}}, False),
    "monitoring.labels": ({"monitoring": {"labels": {"release": "prometheus"}}}, False),
    "networkPolicy.enabled": ({"networkPolicy": {"enabled": False}}, False),
    "networkPolicy.clients": ({"networkPolicy": {"clients": [{"podSelector": {}}]}}, False),
    "image": ({"image": "registry/other:2"}, True),
    "imagePullPolicy": ({"imagePullPolicy": "Always"}, True),
    "sidecar": ({"sidecar": True, "template": APP}, True, {"template": APP}),
    "template": ({"template": {"spec": {"nodeSelector": {"gpu": "yes"}}}}, True),
}


def _leaves(model: Any, where: str = "") -> Any:
    for name, field in model.model_fields.items():
        path = f"{where}{field.alias or name}"
        inner = [a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if hasattr(a, "model_fields")]
        yield from _leaves(inner[0], f"{path}.") if inner else [path]


def test_the_table_names_every_field() -> None:
    assert set(RESTARTS) == set(_leaves(Spec))


@pytest.mark.parametrize("field", RESTARTS)
def test_what_restarts_pods(field: str) -> None:
    spec, restarts, *base = RESTARTS[field]
    before, after = resource(**(base[0] if base else {})), resource(**spec)
    assert before.spec != after.spec
    assert (pod_template(before, DEFAULTS.pinned) != pod_template(after, DEFAULTS.pinned)) is restarts
    assert not restarts or of_spec(before) != of_spec(after), "newer defaults are adopted only together with a restart"


@pytest.mark.parametrize("field", [f for f, (_, restarts, *_) in RESTARTS.items() if not restarts and "cache" not in f])
def test_what_restarts_nothing_adopts_nothing(field: str) -> None:
    spec, _, *base = RESTARTS[field]
    assert of_spec(resource(**(base[0] if base else {}))) == of_spec(resource(**spec))
    assert field.split(".")[0] not in RESTARTING


def test_a_drain_beyond_the_short_grace_is_in_the_pods() -> None:
    pods = [pod_template(resource(drain={"timeout": t}), DEFAULTS.pinned)["spec"] for t in ("5m", "20m")]
    assert [p["terminationGracePeriodSeconds"] for p in pods] == [330, 1230]


def test_what_moves_without_a_restart_is_in_the_boot_file() -> None:
    knobs = {
        "maxBatchSize": {"initial": 6}, "kvCacheBudget": {"initial": "1Gi"}, "admissionWatermarkPercent": {"initial": 3},
    }
    found = resource(slo={"ttft": "1500ms", "tpot": "80ms"}, tuning={"knobs": knobs}, drain={"timeout": "45s"})
    [text] = child(found, "ConfigMap")["data"].values()
    assert yaml.safe_load(text) == {
        "slo": {"ttft": 1.5, "tpot": 0.08}, "drain_timeout": 45.0,
        "initial": {"max_batch_size": 6, "kv_cache_budget": 2**30, "admission_watermark": 0.03},
    }


def test_every_child_is_owned_and_in_the_order_of_need() -> None:
    found = children(resource(), DEFAULTS)
    assert [m["kind"] for m in found] == [
        "ServiceAccount", "Secret", "ConfigMap", "Service", "NetworkPolicy", "Deployment",
    ]
    for manifest in found:
        [owner] = manifest["metadata"]["ownerReferences"]
        assert owner["uid"] == "u-1"
        assert owner["controller"] is True
        assert manifest["metadata"]["labels"]["weir.dev/managed"] == "true"
        assert "finalizers" not in manifest["metadata"]


@pytest.mark.parametrize(("spec", "there"), [
    ({}, False), ({"replicas": 2}, True), ({"disruption": {"maxUnavailable": 0}}, True), ({"autoscaling": SCALER}, True),
])
def test_a_disruption_budget_where_it_says_something(spec: dict[str, Any], there: bool) -> None:
    assert ("PodDisruptionBudget" in [m["kind"] for m in children(resource(**spec), DEFAULTS)]) is there


def test_the_token_is_in_a_secret_that_is_nobody_elses() -> None:
    secret = child(resource(), "Secret")
    assert base64.b64decode(secret["data"]["token"]) == b"t0ken"
    assert secret["metadata"]["name"] == token_secret_name(resource())
    assert secret["metadata"]["name"] != "chat-control"
    volumes = {v["name"]: v for v in child(resource(), "Deployment")["spec"]["template"]["spec"]["volumes"]}
    assert volumes["token"]["secret"]["secretName"] == secret["metadata"]["name"]


def test_pods_are_hardened_and_know_no_service_links() -> None:
    spec = child(resource(), "Deployment")["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["terminationGracePeriodSeconds"] < spec["terminationGracePeriodSeconds"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 300


@pytest.mark.parametrize("name", ["acme/Tiny Model:Q4", "x" * 200, "yes", "123", "1e3", "-dash", "a$(HOME)b"])
def test_a_served_name_is_one_argument_and_no_label(name: str) -> None:
    found = resource(model={"source": "file:///models/m.gguf", "servedName": name})
    [container] = child(found, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert f"--served-model-name={name}".replace("$(", "$$(") in container["args"]
    for manifest in children(found, DEFAULTS):
        assert name not in manifest["metadata"]["labels"].values()


def test_a_claim_is_mounted_and_the_model_read_from_it() -> None:
    spec = child(resource(model={"source": "pvc://weights/llama/7b"}), "Deployment")["spec"]["template"]["spec"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}} in spec["volumes"]
    assert spec["containers"][0]["args"][:2] == ["serve", "/models/llama/7b"]


def test_the_server_knows_every_flag_that_it_is_given() -> None:
    import typer
    from typer.main import get_command

    from weir_server.cli.flags import NOT_YET
    from weir_server.cli.serve import command

    app = typer.Typer()
    app.command()(command)
    serve = get_command(app)
    known = {name for param in serve.params for name in (*param.opts, *param.secondary_opts)}
    everything = resource(
        model={"source": "file:///m.gguf", "servedName": "x", "maxModelLen": 512, "quantization": "int8", "dtype": "float32"},
        engine={
            "limits": {"maxBatchSize": 8, "kvCache": "1Gi", "batchTokens": 64}, "prefillChunkTokens": 0, "threads": 1,
            "prefillGrantInterval": 0, "prefixCaching": False, "scheduler": "prefill_first", "preemption": "lowest-priority",
            "pressurePolicy": "auto", "offload": "512Mi",
        },
        auth={"secretRef": {"name": "keys"}},
    )
    [container] = child(everything, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert not any(arg.split("=")[0] in NOT_YET for arg in container["args"])
    flags = {arg.split("=")[0] for arg in container["args"] if arg.startswith("--")}
    assert flags - known == set()
    assert {"--cpu-offload-space=0.5", "--quantize=int8"} <= set(container["args"])
    assert len(flags) >= 20


def test_the_servers_boot_file_reader_takes_ours(tmp_path: Any) -> None:
    from weir_server.cli.bootfile import read_boot_file

    file = tmp_path / "boot.yaml"
    file.write_text(yaml.safe_dump(boot_file(resource(
        slo={"ttft": "1s", "tpot": "50ms"}, drain={"timeout": "9s"}, tuning={"knobs": {"maxQueueDepth": {"initial": 5}}},
    ).spec)))
    read = read_boot_file(str(file))
    assert (read.ttft, read.tpot, read.drain_timeout, read.initial) == (1.0, 0.05, 9.0, {"max_queue_depth": 5})


def test_a_context_is_the_rows_times_the_slots() -> None:
    args = server_args(resource(model={"source": "file:///m.gguf", "maxModelLen": 1000}).spec)
    assert {"--parallel=4", "--ctx-size=4000"} <= set(args)


def test_the_overlay_merges_by_name_and_adds_what_is_new() -> None:
    template = pod_template(resource(template={
        "metadata": {"annotations": {"team": "a"}},
        "spec": {
            "containers": [
                {"name": "server", "resources": {"limits": {"memory": "2.0Gi"}}, "env": [{"name": "HOME", "value": "/home"}]},
                {"name": "sidecar", "image": "s:1"},
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    }), DEFAULTS.pinned)
    server, sidecar = template["spec"]["containers"]
    assert server["image"] == "registry/weir-server:1"
    assert server["resources"] == {"limits": {"memory": "2.0Gi"}}  # the user's own spelling
    assert server["env"] == [{"name": "HOME", "value": "/home"}]
    assert sidecar == {"name": "sidecar", "image": "s:1"}
    assert [v["name"] for v in template["spec"]["volumes"]] == ["tmp", "boot", "token", "scratch"]
    assert template["metadata"]["labels"]["weir.dev/name"] == "chat"


CLAIM, FROM = {"persistentVolumeClaim": {"claimName": "scratch"}}, {"valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}


@pytest.mark.parametrize(("field", "ours", "theirs", "left"), [
    ("volumes", {"emptyDir": {}}, CLAIM, CLAIM),
    ("volumes", {"emptyDir": {}}, {"emptyDir": None, **CLAIM}, CLAIM),
    ("volumes", {"emptyDir": {}}, {"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "1Gi"}}),
    ("volumes", {"secret": {"secretName": "s"}}, {"secret": {"defaultMode": 256}},
     {"secret": {"secretName": "s", "defaultMode": 256}}),
    ("volumes", {"emptyDir": {}}, {}, {"emptyDir": {}}),
    ("env", {"value": "/tmp"}, FROM, FROM),
    ("env", {"value": "/tmp"}, {"value": "/home"}, {"value": "/home"}),
])
def test_what_may_be_of_one_kind_only_is_of_the_overlays(field: str, ours: Any, theirs: Any, left: Any) -> None:
    """Both kinds at once would be refused by the API server."""
    named = {"name": "x"}
    assert overlaid({field: [named | ours]}, {field: [named | theirs]}) == {field: [named | left]}


def test_another_handler_of_a_probe_replaces_ours_and_its_timing_stays() -> None:
    theirs = {"exec": {"command": ["true"]}, "periodSeconds": 60}
    overlay = {"spec": {"containers": [{"name": "server", "livenessProbe": theirs}]}}
    [server] = pod_template(resource(template=overlay), DEFAULTS.pinned)["spec"]["containers"]
    probe = server["livenessProbe"]
    assert "httpGet" not in probe and probe["exec"] == {"command": ["true"]}
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (60, 6)


@pytest.mark.parametrize("overlay", [
    {"metadata": None, "spec": None}, {"metadata": {"labels": None}},
    {"spec": {"containers": None, "initContainers": None, "volumes": None, "securityContext": None}},
    {"spec": {"containers": [{"name": "server", "volumeMounts": None, "livenessProbe": None, "args": None, "env": None}]}},
])
def test_a_null_takes_nothing_of_ours_away(overlay: dict[str, Any]) -> None:
    """Templates of manifests leave nulls where a value was empty; without its container there would be no server."""
    model = {"source": "hf://acme/tiny"}
    bare = pod_template(resource(model=model), DEFAULTS.pinned)
    assert pod_template(resource(model=model, template=overlay), DEFAULTS.pinned) == bare


def test_the_overlay_changes_neither_side() -> None:
    ours, theirs = {"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x", "w": 2}]}
    assert overlaid(ours, theirs) == {"a": [{"name": "x", "v": 1, "w": 2}]}
    assert (ours, theirs) == ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x", "w": 2}]})
