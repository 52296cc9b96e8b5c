"""What is rendered, and what the operator makes, against the versions of Kubernetes that the chart says it runs on: no API that
one of them lacks, no field and no CEL function that is younger than the oldest. Their schemas are on no machine without a
network; what is younger than this is a short list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart_kit import CHART, HELMS, ROOT, call, kinds, needed

from weir_operator.plan.manifests import Defaults, children
from weir_operator.plan.plan import parse

pytestmark = pytest.mark.chart
OLDEST = int(re.findall(r"1\.(\d+)", yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"])[0])
VERSIONS = [29, 33, 36]
EVERYTHING = (
    "replicaCount=2,networkPolicy.enabled=true,metrics.serviceMonitor.enabled=true,metrics.serverPodMonitor.enabled=true,"
    "metrics.prometheusRule.enabled=true,metrics.dashboards.enabled=true,metrics.service.ipFamilyPolicy=PreferDualStack"
)

APIS = {
    "v1": 0, "apps/v1": 9, "rbac.authorization.k8s.io/v1": 8, "apiextensions.k8s.io/v1": 16, "networking.k8s.io/v1": 7,
    "policy/v1": 21, "autoscaling/v2": 23,
}
"""Kubernetes' own: the minor version that first served it; none of them has an end."""
BROUGHT = {"weir.dev/v1alpha1", "monitoring.coreos.com/v1", "keda.sh/v1alpha1"}
"""By a definition that has to be there: the chart's, or somebody's whose kind was asked for."""

FIELDS = {
    "spec.unhealthyPodEvictionPolicy": 27, "topologySpreadConstraints.matchLabelKeys": 27, "initContainers.restartPolicy": 29,
    "lifecycle.preStop.sleep": 30, "appArmorProfile": 31, "selectableFields": 31, "volumes.image": 33, "hostUsers": 33,
    "resizePolicy": 33, "lifecycle.stopSignal": 33, "trafficDistribution": 33, "x-kubernetes-validations.optionalOldSelf": 33,
    "template.spec.resources": 34,
}
"""Ends of paths: the minor version from which a cluster has the field by itself; image volumes: from which it may."""

FUNCTIONS = {
    "has": 25, "size": 25, "matches": 25, "startsWith": 25, "all": 25, "exists": 25, "string": 25, "type": 25, "duration": 25,
    "split": 25, "replace": 25, "quantity": 29, "isQuantity": 29, "compareTo": 29, "isGreaterThan": 29,
}
"""Of CEL as CustomResourceDefinitions have it. One that is not here has to be looked up first."""


def paths(value: Any, path: str = "") -> Iterator[str]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from paths(inner, f"{path}.{key}")
    for inner in value if isinstance(value, list) else ():
        yield from paths(inner, path)


def too_young(manifest: dict[str, Any], minor: int) -> list[str]:
    """APIs and fields that Kubernetes 1.`minor` lacks."""
    api = manifest["apiVersion"]
    found = [] if api in BROUGHT or APIS.get(api, 99) <= minor else [f"{api} {manifest['kind']}"]
    ends = {path: since for path in paths(manifest) for end, since in FIELDS.items() if path.endswith(f".{end}")}
    return found + [path for path, since in ends.items() if since > minor]


@pytest.mark.parametrize("minor", VERSIONS)
@pytest.mark.parametrize("values", ["", EVERYTHING], ids=["default", "everything"])
def test_what_the_chart_renders_is_known_to_each_version(minor: int, values: str) -> None:
    args = [f"--kube-version=1.{minor}.0", *([f"--set={values}"] if values else [])]
    for helm in HELMS or [needed("helm")]:
        text = call(helm, "template", "weir", str(CHART), "-n", "weir-system", *args).stdout
        manifests = [m for m in yaml.safe_load_all(text) if m]
        assert "Deployment" in kinds(manifests)
        assert [lack for m in manifests for lack in too_young(m, minor)] == []


def test_an_older_version_is_refused_before_anything_is_made() -> None:
    assert min(VERSIONS) == OLDEST, "what the chart says is what is tested"
    for helm in HELMS or [needed("helm")]:
        done = call(helm, "template", "weir", str(CHART), f"--kube-version=1.{OLDEST - 1}.9", check=False)
        assert done.returncode != 0 and "incompatible with Kubernetes" in done.stderr


def resource(source: str, **spec: Any) -> list[dict[str, Any]]:
    raw = {
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat", "uid": "u"},
        "spec": {"model": {"source": source}, "sidecar": True, "monitoring": {"podMonitor": True},
                 "service": {"headless": True},
                 "template": {"spec": {"containers": [{"name": "app", "image": "app"}]}}, **spec},
    }
    return [dict(m) for m in children(parse(raw), Defaults(image="i", token="t"))]


@pytest.mark.parametrize("scaler", ["HorizontalPodAutoscaler", "ScaledObject"])
def test_what_the_operator_makes_is_known_to_the_oldest(scaler: str) -> None:
    scaled = {"mode": "External", "scaler": scaler, "minReplicas": 1, "maxReplicas": 3, "prometheus": "http://p:9090"}
    made = resource("https://models.example/m.gguf", autoscaling=scaled)
    assert scaler in kinds(made) and any(path.endswith("initContainers.restartPolicy") for m in made for path in paths(m))
    assert [lack for m in made for lack in too_young(m, OLDEST)] == []


def test_an_image_as_a_volume_is_all_that_asks_for_more_and_it_is_said() -> None:
    lacks = [lack for m in resource("oci://registry.example/model:1") for lack in too_young(m, OLDEST)]
    assert lacks == [".spec.template.spec.volumes.image"]
    [described] = re.findall(r"mounted as a volume;\s+Kubernetes 1\.(\d+) or\s+later", (ROOT / "docs/api.md").read_text())
    assert int(described) == FIELDS["volumes.image"]


def test_the_definition_asks_for_no_younger_cel() -> None:
    text = (ROOT / "crds/weir.dev_inferencedeployments.yaml").read_text()
    rules = [rule["rule"] for rule in found(yaml.safe_load(text), "x-kubernetes-validations")]
    named = {name for rule in rules for name in re.findall(r"\b([A-Za-z]\w*)\(", re.sub(r"'[^']*'", "''", rule))}
    assert rules and {name for name in named if FUNCTIONS.get(name, 99) > OLDEST} == set()


def found(value: Any, key: str) -> Iterator[Any]:
    """All items of the lists called `key`, wherever they are."""
    if isinstance(value, dict):
        yield from value.get(key, ()) if isinstance(value.get(key), list) else ()
        for inner in value.values():
            yield from found(inner, key)
    for inner in value if isinstance(value, list) else ():
        yield from found(inner, key)
