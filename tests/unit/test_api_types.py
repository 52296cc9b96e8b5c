"""The typed API: what a file may say, what a reader of a mistake is told, and the CRD that is generated from it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from status_kit import fields_of, full_status

from weir_operator.api.conditions import CATALOGUE, Condition, merged
from weir_operator.api.crd import crd, rendered
from weir_operator.plan.plan import SpecError, parse

ROOT = Path(__file__).resolve().parents[2]


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "team-a", "uid": "u-1", "generation": 3, "labels": {}},
        "spec": {"model": {"source": "file:///models/m.gguf"}, **spec},
    }


def test_generated_files_are_as_committed() -> None:
    for path, text in rendered().items():
        assert (ROOT / path).read_text() == text, f"{path} is out of date: run `make generate`"


STRUCTURAL = {
    "type", "format", "description", "properties", "items", "additionalProperties", "required", "default", "enum", "pattern",
    "minimum", "maximum", "minLength", "maxLength", "maxItems", "maxProperties", "anyOf",
}
"""What the schema of a definition may be made of; the API server refuses it whole for any other word of JSON schema."""


def test_the_schema_has_no_word_that_an_api_server_does_not_know() -> None:
    def words(node: dict[str, Any]) -> set[str]:
        inner = [*node.get("properties", {}).values(), *(node[k] for k in ("items", "additionalProperties") if k in node)]
        return set(node).union(*(words(part) for part in inner if isinstance(part, dict)))

    found = words(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    assert {word for word in found if not word.startswith("x-kubernetes-")} <= STRUCTURAL


def test_the_charts_copy_is_the_same_crd() -> None:
    text = (ROOT / "charts/weir/templates/crd.yaml").read_text()
    plain = [line for line in text.splitlines() if "{{" not in line and line != "  annotations:"]
    copied = yaml.safe_load("\n".join(plain).replace("    helm.sh/resource-policy: keep\n", ""))
    assert copied == crd()


def test_every_field_is_described_and_no_rule_is_without_a_sentence() -> None:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields = dict(fields_of(schema))
    assert len(fields) > 50
    assert [name for name, part in fields.items() if not part.get("description") and name != ".metadata"] == []
    for name, part in fields.items():
        for rule in part.get("x-kubernetes-validations", ()):
            assert rule["message"], name
        assert "$ref" not in part, name


def _untold(value: Any, schema: dict[str, Any], where: str) -> Any:
    """Paths below `value` that the schema does not declare; a place for anything is one itself."""
    if isinstance(value, list):
        for item in value:
            yield from _untold(item, schema["items"], f"{where}[]")
    elif isinstance(value, dict):
        if not schema.get("properties"):
            yield f"{where}.*"
        for name, inner in value.items() if schema.get("properties") else ():
            part = schema["properties"].get(name)
            yield from _untold(inner, part, f"{where}.{name}") if part else [f"{where}.{name}"]


def test_everything_that_the_operator_writes_is_declared() -> None:
    """And so explained. Open is what figures and knobs are called, and the tuner's memory, which is nobody else's."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    written = full_status()
    entry = ".tuning.history[]"
    assert set(_untold(written, schema, "")) == {
        ".tuning.state.*", *(f"{entry}.{part}.*" for part in ("changes", "predicted", "observed")),
    }
    assert {name for name, _ in fields_of(schema)} <= set(_paths(written, "")), "what is declared is written"


def _paths(value: Any, where: str) -> Any:
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{where}.{name}"
        yield from _paths(inner, f"{where}.{name}")
    for item in value if isinstance(value, list) else ():
        yield from _paths(item, f"{where}[]")


@pytest.mark.parametrize(("spec", "sentence"), [
    ({"model": {}}, "spec.model.source: is required"),
    ({"model": {"source": "http://x/y"}}, "spec.model.source: 'http://x/y' must be hf://ORG/NAME[@REVISION][/FILE], pvc://CLAIM/PATH"),
    ({"model": {"source": "file:///a/../b"}}, "spec.model.source: must not contain '..'"),
    ({"modell": 1}, "spec.modell: unknown field"),
    ({"replicas": -1}, "spec.replicas: Input should be greater than or equal to 0"),
    ({"slo": {"ttft": "2s"}}, "spec.slo.tpot: is required"),
    ({"slo": {"ttft": "2", "tpot": "80ms"}}, "spec.slo.ttft: '2' is not a duration"),
    ({"tuning": {"mode": False}}, "spec.tuning.mode: Input should be 'Auto', 'Advise' or 'Disabled'"),
    ({"tuning": {"knobs": {"maxBatchSize": {"min": 8, "max": 4}}}}, "spec.tuning.knobs.maxBatchSize: min must not exceed max"),
    ({"tuning": {"knobs": {"kvCacheBudget": {"min": "1Gi", "max": "1G"}}}}, "kvCacheBudget: min must not exceed max"),
    ({"tuning": {"knobs": {"kvCacheBudget": {"max": "1GB"}}}}, "kvCacheBudget.max: '1GB' is not a quantity"),
    ({"tuning": {"knobs": {"maxBatchSize": {"max": 9}}}, "engine": {"limits": {"maxBatchSize": 8}}}, "must not exceed engine"),
    ({"tuning": {"knobs": {"kvCacheBudget": {"initial": "2Gi"}}}, "engine": {"limits": {"kvCache": "1Gi"}}}, "must not exceed"),
    ({"tuning": {"knobs": {"maxBatchSize": {"min": 9}}}, "engine": {"limits": {"maxBatchSize": 8}}}, "Size.min must not"),
    ({"tuning": {"knobs": {"kvCacheBudget": {"min": "2Gi"}}}, "engine": {"limits": {"kvCache": "1Gi"}}}, "Budget.min must not"),
    ({"template": {"spec": {"containers": [{"name": "server", "args": ["--x"]}]}}}, "put yours in engine.extraArgs"),
    ({"drain": {"timeout": "31m"}}, "spec.drain.timeout: must not exceed 30m"),
    ({"engine": {"extraArgs": ["--port=1"]}}, "spec.engine.extraArgs: must be flags of weir-server"),
    ({"engine": {"extraArgs": ["-b"]}}, "spec.engine.extraArgs: must be flags of weir-server"),
    ({"engine": {"extraArgs": ["--api-key=x"]}}, "spec.engine.extraArgs: must be flags of weir-server"),
    ({"model": {"source": "file:///m", "cache": {"size": "1Gi"}}}, "spec.model: cache is for sources that are downloaded"),
    ({"model": {"source": "file:///m", "quantization": "int5"}}, "spec.model.quantization: Input should be 'auto', 'int8' or"),
    ({"model": {"source": "hf://a/b", "cache": {}}}, "spec.model.cache: give either size"),
    ({"model": {"source": "hf://a/b", "cache": {"claimName": "c", "storageClassName": "s"}}}, "claim that the operator makes"),
    ({"model": {"source": "hf://a/b", "sha256": "0" * 64}}, "spec.model: sha256 is of one file"),
    ({"autoscaling": {"scaler": "ScaledObject"}}, "spec.autoscaling: a scaler sets the replicas"),
    ({"autoscaling": {"mode": "External", "scaler": "HorizontalPodAutoscaler"}}, "a scaler needs maxReplicas"),
    ({"autoscaling": {"mode": "External", "scaler": "ScaledObject", "maxReplicas": 2}}, "needs prometheus"),
    ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "spec.autoscaling: minReplicas must not exceed maxReplicas"),
    ({"tuning": {"envelope": "Roll"}}, "spec: tuning.envelope Roll needs engine.limits.maxBatchSize, where it begins"),
    ({"tuning": {"envelope": "Roll", "knobs": {"maxBatchSize": {"max": 9, "initial": 9}}}, "engine": {
        "limits": {"maxBatchSize": 8}}}, "tuning.knobs.maxBatchSize.initial must not exceed engine.limits.maxBatchSize"),
    ({"autoscaling": {"mode": "Internal"}}, "spec.autoscaling: mode Internal needs maxReplicas"),
    ({"autoscaling": {"mode": "Internal", "maxReplicas": 2}}, "spec: autoscaling.mode Internal needs slo or tuning.preset"),
    ({"rollout": {"maxSurge": "0%"}}, "spec.rollout: maxSurge and maxUnavailable must not both be 0"),
    ({"disruption": {"maxUnavailable": "101%"}}, "must be a number of pods or a percentage"),
    ({"sidecar": True}, "spec: sidecar: true puts the server beside your application"),
    ({"sidecar": True, "template": {"spec": {}}}, "spec: sidecar: true puts the server beside your application"),
])
def test_a_mistake_is_one_sentence_that_names_the_field(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as e:
        parse(manifest(**spec))
    assert sentence in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["1st", "Upper", "a" * 53, "ends-", "dot.ted"])
def test_names_that_no_service_may_have_are_refused(name: str) -> None:
    raw = manifest()
    raw["metadata"]["name"] = name
    with pytest.raises(SpecError, match=r"metadata\.name"):
        parse(raw)


def test_integers_without_quotes_are_quantities_and_stay_as_written() -> None:
    resource = parse(manifest(tuning={"knobs": {"kvCacheBudget": {"min": 268435456, "max": "2.0Gi"}}}))
    budget = resource.spec.tuning.knobs.kv_cache_budget
    assert (budget.min, budget.max) == ("268435456", "2.0Gi")


def test_a_reason_outside_the_catalogue_cannot_be_made() -> None:
    with pytest.raises(KeyError):
        Condition("Ready", True, "BecauseISaySo")
    assert all(text.endswith((".", "words", "gone.")) for reasons in CATALOGUE.values() for text in reasons.values())


def test_a_transition_is_a_flip_of_status_and_nothing_else() -> None:
    first = merged([Condition("Ready", False, "Starting")], [], 1, "t1")
    same = merged([Condition("Ready", False, "CrashLooping", "x")], first, 2, "t2")
    assert same[0]["lastTransitionTime"] == "t1"
    assert merged([Condition("Ready", True, "Serving")], same, 2, "t3")[0]["lastTransitionTime"] == "t3"


def test_a_later_versions_field_is_passed_over_where_an_api_server_gave_it():
    raw = manifest()
    raw["spec"]["tuning"] = {"tomorrow": "Off"}
    raw["spec"]["template"] = {"spec": {"nodeSelector": {"of": "somebody"}}}
    with pytest.raises(SpecError, match=r"spec\.tuning\.tomorrow: unknown field"):
        parse(raw)
    assert parse(raw, lenient=True).spec == parse(manifest(template=raw["spec"]["template"])).spec
