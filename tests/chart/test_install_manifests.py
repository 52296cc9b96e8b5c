"""kustomize and plain manifests say what the chart says: one source, and what is made from it is up to date."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from chart_kit import ROOT, call, generate, needed

pytestmark = pytest.mark.chart


def built(folder: str) -> list[dict[str, Any]]:
    text = call(needed("kubectl"), "kustomize", str(ROOT / folder)).stdout
    return [m for m in yaml.safe_load_all(text) if m]


def by_key(manifests: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    found = {generate.key(m): m for m in manifests}
    assert len(found) == len(manifests)
    return found


def without_place(manifests: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return by_key([m for m in manifests if m["kind"] not in ("Namespace", "CustomResourceDefinition")])


@pytest.mark.parametrize("path", sorted(generate.written()), ids=str)
def test_what_needs_no_other_program_is_up_to_date(path: Any) -> None:
    assert (ROOT / path).read_text() == generate.written()[path], "run `make generate`"


def test_what_helm_renders_is_up_to_date() -> None:
    for path, text in generate.by_helm(needed("helm")).items():
        assert (ROOT / path).read_text() == text, f"{path}: run `make generate` with helm on PATH or in KUBEBUILDER_ASSETS"


def test_both_helms_make_the_same_manifests() -> None:
    assert generate.by_helm(needed("helm")) == generate.by_helm(needed("helm3"))


@pytest.mark.parametrize(("folder", "values"), [
    ("config/default", []),
    ("config/overlays/full", [
        "replicaCount=2", "networkPolicy.enabled=true", "metrics.serviceMonitor.enabled=true",
        "metrics.serverPodMonitor.enabled=true", "metrics.prometheusRule.enabled=true",
    ]),
])
def test_an_overlay_is_the_chart_with_values(folder: str, values: list[str]) -> None:
    found = without_place(built(folder))
    assert found == by_key(generate.rendered(needed("helm"), *values))


def test_the_crd_of_kustomize_is_the_generated_one() -> None:
    [crd] = [m for m in built("config/default") if m["kind"] == "CustomResourceDefinition"]
    assert crd == yaml.safe_load((ROOT / generate.crd.CRD_PATH).read_text())


def test_the_plain_file_is_the_default_overlay_in_an_order_that_can_be_applied() -> None:
    plain = list(yaml.safe_load_all((ROOT / "dist/install.yaml").read_text()))
    assert by_key(plain) == by_key(built("config/default"))
    assert [m["kind"] for m in plain[:2]] == ["Namespace", "CustomResourceDefinition"]
    assert (ROOT / "dist/install.yaml").read_text() == generate.install((ROOT / generate.OPERATOR).read_text())


def test_a_single_namespace_may_have_any_name_and_needs_no_right_on_the_cluster() -> None:
    found = built("config/overlays/single-namespace")
    assert not [m for m in found if m["kind"].startswith(("Cluster", "Custom"))]
    assert {m["metadata"]["namespace"] for m in found} == {"team-a"}
    for binding in (m for m in found if m["kind"] == "RoleBinding"):
        assert [s["namespace"] for s in binding["subjects"]] == ["team-a"]
    container = generate.deployment(found)["spec"]["template"]["spec"]["containers"][0]
    assert "--namespace=$(POD_NAMESPACE)" in container["args"]
    assert "POD_NAMESPACE" in {e["name"] for e in container["env"]}
    chart = generate.single(generate.rendered(needed("helm"), "watch.namespaces={team-a}"))
    assert rules(found) == rules(chart) and len(rules(found)) == 2


def rules(manifests: list[dict[str, Any]]) -> set[str]:
    return {json.dumps(m["rules"], sort_keys=True) for m in manifests if m["kind"] == "Role"}


def test_no_trace_of_helm_is_left() -> None:
    text = (ROOT / "dist/install.yaml").read_text()
    assert "helm.sh" not in text and "Helm" not in text
