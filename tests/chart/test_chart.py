"""The chart with helm 3 and helm 4: it lints, renders what is needed and no more, and refuses typos with their path."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.chart
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/weir"
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")


def _find(name: str) -> str | None:
    return shutil.which(name) or (shutil.which(name, path=ASSETS) if ASSETS else None)


HELMS = [found for name in ("helm", "helm3") if (found := _find(name))]


@pytest.fixture(params=HELMS or [None], ids=lambda h: Path(h).name if h else "none")
def helm(request: pytest.FixtureRequest) -> Any:
    if request.param is None:
        pytest.skip("no helm on PATH or in KUBEBUILDER_ASSETS")

    def run(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([request.param, *args], capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def render(helm: Any, *args: str, chart: Path = CHART) -> list[dict[str, Any]]:
    text = helm("template", "weir", str(chart), "-n", "weir-system", "--kube-version=1.36.0", *args).stdout
    return [m for m in yaml.safe_load_all(text) if m]


def kinds(manifests: list[dict[str, Any]]) -> list[str]:
    return sorted(m["kind"] for m in manifests)


def test_it_lints(helm: Any) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART)).stdout


def test_the_default_is_hardened_and_asks_for_little(helm: Any) -> None:
    manifests = render(helm)
    assert kinds(manifests) == [
        "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Deployment", "Role", "RoleBinding", "ServiceAccount",
    ]
    [pod] = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] == "Deployment"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert {"--tick-seconds=30", "--poll-seconds=5", "--lease-seconds=180"} <= set(container["args"])


def test_the_rights_have_no_wildcard_and_read_no_secret_but_the_key(helm: Any) -> None:
    for extra in ((), ("--set=watch.namespaces={team-a}",)):
        for role in (m for m in render(helm, *extra) if m["kind"] in ("Role", "ClusterRole")):
            for rule in role["rules"]:
                assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
                if "secrets" in rule["resources"] and {"get", "list", "watch"} & set(rule["verbs"]):
                    assert (rule["resourceNames"], rule["verbs"]) == (["weir-operator-key"], ["get"])
                assert "deletecollection" not in rule["verbs"]
                if "delete" in rule["verbs"]:  # what may be asked for and not asked for, and nothing else
                    assert set(rule["resources"]) <= {
                        "services", "persistentvolumeclaims", "poddisruptionbudgets", "networkpolicies",
                        "horizontalpodautoscalers", "podmonitors", "scaledobjects",
                    }


def test_namespaces_replace_cluster_rights(helm: Any) -> None:
    manifests = render(helm, "--set=watch.namespaces={team-a,team-b}", "--set=crds.install=false")
    assert not [m for m in manifests if m["kind"].startswith(("Cluster", "Custom"))]
    assert sorted(m["metadata"]["namespace"] for m in manifests if m["kind"] == "Role") == ["team-a", "team-b", "weir-system"]
    [container] = next(m for m in manifests if m["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"--namespace=team-a", "--namespace=team-b"} <= set(container["args"])


def test_the_crd_is_kept_unless_told_otherwise(helm: Any) -> None:
    def notes(*args: str) -> dict[str, str]:
        [crd] = [m for m in render(helm, *args) if m["kind"] == "CustomResourceDefinition"]
        return crd["metadata"].get("annotations") or {}

    assert notes() == {"helm.sh/resource-policy": "keep"}
    assert notes("--set=crds.keep=false") == {}


def test_two_releases_share_no_cluster_wide_object(helm: Any) -> None:
    def cluster_wide(namespace: str) -> set[tuple[str, str]]:
        text = helm("template", "weir", str(CHART), "-n", namespace, "--kube-version=1.36.0", "--set=crds.install=false").stdout
        return {(m["kind"], m["metadata"]["name"]) for m in yaml.safe_load_all(text) if m and m["kind"].startswith("Cluster")}

    assert cluster_wide("team-a") & cluster_wide("team-b") == set()


@pytest.mark.parametrize(("setting", "words"), [
    ("replicaCont=2", "replicaCont"),
    ("tuner.tick=3", "tick"),
    ("replicaCount=two", "replicaCount"),
    ("image.digest=latest", "digest"),
    ("tuner.pollSeconds=60", "tuner.pollSeconds must not exceed tuner.tickSeconds"),
    ("tuner.leaseSeconds=6", "tuner.leaseSeconds must be at least twice"),
])
def test_a_wrong_value_is_refused_by_name(helm: Any, setting: str, words: str) -> None:
    done = helm("template", "weir", str(CHART), "--kube-version=1.36.0", f"--set={setting}", check=False)
    assert done.returncode != 0
    assert words in done.stderr


def test_it_can_be_a_dependency(helm: Any, tmp_path: Path) -> None:
    """Helm hands `global` and `enabled` to sub-charts (helm/helm#10392)."""
    for alias in (None, "llm"):
        name = alias or "weir"
        parent = tmp_path / name
        (parent / "templates").mkdir(parents=True)
        dependency = {"name": "weir", "version": "0.1.0", "repository": f"file://{CHART}", "condition": f"{name}.enabled"}
        dependency.update({"alias": alias} if alias else {})
        chart = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [dependency]}
        (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
        values = {"global": {"imageRegistry": "r.example", "foo": {"bar": 1}}, name: {"enabled": True}}
        (parent / "values.yaml").write_text(yaml.safe_dump(values))
        helm("dependency", "build", str(parent))
        assert "Deployment" in kinds(render(helm, chart=parent))
        helm("lint", str(parent))
        done = helm("template", "x", str(parent), "--kube-version=1.36.0", f"--set={name}.replicaCont=2", check=False)
        assert "replicaCont" in done.stderr


def test_an_image_may_be_named_by_digest_and_the_servers_image_by_value(helm: Any) -> None:
    digest = "sha256:" + "a" * 64
    manifests = render(helm, f"--set=image.digest={digest}", "--set=serverImage=r/s:2", "--set=extraArgs={--tick-seconds=9}")
    [container] = next(m for m in manifests if m["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith("@" + digest)
    assert "--server-image=r/s:2" in container["args"]
    assert container["args"][-1] == "--tick-seconds=9"
