"""The chart on a real API server, with helm 3 and helm 4: installed, upgraded, uninstalled; and every documented combination of
values, every overlay and the plain file accepted by the API server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from control_plane_kit import ASSETS, ROOT, Cluster, Operator, condition, resource, token_of, wait
from test_rights import another

CHART = ROOT / "charts/weir"
CRD = "inferencedeployments.weir.dev"
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["helm", "helm3"])
def helm(request: pytest.FixtureRequest, cluster: Cluster) -> Helm:
    program = Path(ASSETS, request.param)
    if not program.exists():
        pytest.skip(f"no {request.param} in KUBEBUILDER_ASSETS")

    def run(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(program), "--kubeconfig", str(cluster.kubeconfig), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def left(cluster: Cluster, namespace: str) -> list[str]:
    """What of a release is there, in its namespace and in the cluster."""
    spaced = "deployments,services,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies,configmaps"
    mine = ["-l", "app.kubernetes.io/instance=weir", "-o", "name"]
    found = cluster.kubectl("get", spaced, "-n", namespace, *mine).stdout.split()
    wide = cluster.kubectl("get", "clusterroles,clusterrolebindings", *mine).stdout.split()
    return sorted(found + [name for name in wide if f"/{namespace}-" in name])


def crd(cluster: Cluster) -> dict[str, Any]:
    return json.loads(cluster.kubectl("get", "crd", CRD, "-o", "json").stdout)


def test_a_definition_that_is_there_is_named_before_anything_is_changed(cluster: Cluster, helm: Helm) -> None:
    own = another(cluster)
    refused = helm("install", "weir", str(CHART), "-n", own, check=False)
    assert refused.returncode != 0 and f"{CRD} is there already and belongs to no release" in refused.stderr
    assert "Set crds.install=false" in refused.stderr
    assert left(cluster, own) == []
    helm("install", "weir", str(CHART), "-n", own, "--set=crds.install=false")
    helm("uninstall", "weir", "-n", own)


def test_install_upgrade_uninstall_and_install_again(cluster: Cluster, namespace: str, helm: Helm) -> None:
    own = another(cluster)
    cluster.apply(resource(), namespace)
    served = cluster.get("infd", "chat", namespace)
    refusal = helm("install", "weir", str(CHART), "-n", own, check=False).stderr
    for command in refusal[refusal.index("kubectl label"):].strip().split(" && "):  # what it says is what helps
        cluster.kubectl(*command.split()[1:])
    said = helm("install", "weir", str(CHART), "-n", own).stdout
    assert f"runs in namespace {own} and serves all namespaces" in said and "helm test weir" in said
    first = cluster.get("deployment", "weir", own)
    assert first["spec"]["replicas"] == 1 and crd(cluster)["metadata"]["annotations"]["meta.helm.sh/release-namespace"] == own

    other = helm("install", "weir", str(CHART), "-n", another(cluster), check=False)
    assert f"belongs to release {own}/weir" in other.stderr

    values = ["--set=replicaCount=2,networkPolicy.enabled=true,commonLabels.team=a,tuner.tickSeconds=10"]
    helm("upgrade", "weir", str(CHART), "-n", own, *values)
    second = cluster.get("deployment", "weir", own)
    assert second["spec"]["replicas"] == 2 and second["metadata"]["uid"] == first["metadata"]["uid"]
    assert "--tick-seconds=10" in second["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"poddisruptionbudget.policy/weir", "networkpolicy.networking.k8s.io/weir"} <= set(left(cluster, own))

    helm("rollback", "weir", "1", "-n", own)
    assert cluster.get("deployment", "weir", own)["spec"]["replicas"] == 1
    assert not [name for name in left(cluster, own) if "policy" in name]

    helm("uninstall", "weir", "-n", own)
    assert left(cluster, own) == []
    assert crd(cluster)["metadata"]["name"] == CRD
    assert cluster.get("infd", "chat", namespace)["metadata"]["uid"] == served["metadata"]["uid"]
    helm("install", "weir", str(CHART), "-n", own)  # over the definition that was kept
    assert left(cluster, own) != []
    helm("uninstall", "weir", "-n", own)
    strip = '{"metadata":{"annotations":{"meta.helm.sh/release-name":null,"meta.helm.sh/release-namespace":null}}}'
    cluster.kubectl("patch", "crd", CRD, "--type=merge", "-p", strip)


def test_a_second_release_is_warned_that_two_would_steer_the_same_pods(cluster: Cluster, helm: Helm) -> None:
    one, two = another(cluster), another(cluster)
    helm("install", "weir", str(CHART), "-n", one, "--set=crds.install=false")
    said = helm("install", "weir", str(CHART), "-n", two, "--set=crds.install=false").stdout
    assert f"WARNING: {one}-weir is another operator that serves all namespaces" in said
    before = left(cluster, two)
    helm("uninstall", "weir", "-n", one)
    assert left(cluster, two) == before and left(cluster, one) == []
    quiet = helm("upgrade", "weir", str(CHART), "-n", two, "--set=crds.install=false").stdout
    assert "WARNING" not in quiet
    helm("uninstall", "weir", "-n", two)


def test_two_releases_in_one_namespace_serve_a_team_each(cluster: Cluster, helm: Helm) -> None:
    """With the arguments and the rights that the chart gives to each."""
    own, running = another(cluster), []
    teams = {"weir": another(cluster), "llm": another(cluster)}
    for release, team in teams.items():
        helm("install", release, str(CHART), "-n", own, "--set=crds.install=false", f"--set=watch.namespaces={{{team}}}")
        cluster.apply(resource(), team)
        name = "weir" if release == "weir" else "llm-weir"
        pod = cluster.get("deployment", name, own)["spec"]["template"]["spec"]
        args = [a for a in pod["containers"][0]["args"] if a.startswith(("--namespace=", "--lease-name="))]
        config = cluster.token_config(token_of(cluster, own, pod["serviceAccountName"]), f"{release}-{own}")
        running.append(Operator(cluster, own, release, config).start(*args, scope=False))
    for team in teams.values():
        wait(lambda: condition(cluster, team, "Ready").get("reason"), 30, "it is served")  # noqa: B023
    assert [o.metric("weir_operator_leader") for o in running] == [1, 1]
    assert cluster.get("infd", "chat", teams["weir"])["status"]["operator"] == own  # as `weir-operator run` has it by itself
    assert cluster.get("infd", "chat", teams["llm"])["status"]["operator"] == f"{own}/llm-weir-operator"
    for operator in running:
        assert operator.stop() == 0
        assert "forbidden" not in operator.log.lower()
    for release, team in teams.items():
        helm("uninstall", release, "-n", own)
        cluster.kubectl("delete", "infd", "--all", "-n", team)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_helm_test_makes_a_resource_then_asks_and_clears_up(cluster: Cluster, helm: Helm, phase: str) -> None:
    """There is no node: the test says how the pod ended. What the pod does: tests/chart/test_completion_script.py."""
    own = another(cluster)
    helm("install", "weir", str(CHART), "-n", own, "--set=crds.install=false")
    with ThreadPoolExecutor(1) as pool:
        testing = pool.submit(helm, "test", "weir", "-n", own, "--timeout=60s", check=False)
        pod = wait(lambda: cluster.get("pod", "weir-test", own), 60, "the pod that asks")
        served = cluster.get("infd", "weir-test", own)  # before the pod, or it would ask nobody
        status = {"status": {"phase": phase, "startTime": pod["metadata"]["creationTimestamp"]}}
        where = ("-n", own, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        cluster.kubectl("patch", "pod", "weir-test", *where)
        done = testing.result(90)
    assert served["spec"]["model"]["source"].startswith("package://")
    assert (done.returncode == 0) is (phase == "Succeeded"), done.stdout + done.stderr
    if phase == "Succeeded":
        wait(lambda: not any(cluster.get(kind, "weir-test", own) for kind in ("infd", "pod")), 30, "nothing is left")
    else:  # to look at; the next test begins by removing it
        assert cluster.get("pod", "weir-test", own)
    helm("uninstall", "weir", "-n", own)


UNSAFE = [("replicaCount=0", "no operator runs"), ("rbac.create=false", "from elsewhere")]


@pytest.mark.parametrize(("value", "words"), UNSAFE)
def test_the_notes_warn_of_what_is_unsafe(cluster: Cluster, helm: Helm, value: str, words: str) -> None:
    own = another(cluster)
    args = ("--dry-run=server", "--set=crds.install=false", f"--set={value}")
    said = helm("install", "weir", str(CHART), "-n", own, *args).stdout
    assert "WARNING" in said and words in said


COMBINATIONS = {
    "default": "",
    "namespaces": "watch.namespaces={team-a,team-b}",
    "two replicas": "replicaCount=2",
    "monitoring by service": "metrics.serviceMonitor.enabled=true,metrics.serverPodMonitor.enabled=true,"
                             "metrics.prometheusRule.enabled=true,metrics.prometheusRule.labels.release=prom",
    "monitoring by pod": "metrics.service.enabled=false,metrics.podMonitor.enabled=true",
    "dual stack": "metrics.service.ipFamilyPolicy=PreferDualStack",
    "dashboards": "metrics.dashboards.enabled=true,metrics.dashboards.annotations.grafana_folder=Weir",
    "network policy": "networkPolicy.enabled=true,networkPolicy.apiServer.cidrs={10.0.0.1/32}",
    "any user": "podSecurityContext.runAsUser=null,podSecurityContext.runAsGroup=null",
    "own account": "serviceAccount.create=false,serviceAccount.name=weir-sa",
    "no rights": "rbac.create=false",
    "registry": f"image.repository=r.example/weir,image.digest=sha256:{'a' * 64},imagePullSecrets[0].name=registry",
    "scheduling": "nodeSelector.disk=ssd,priorityClassName=system-cluster-critical,"
                  "tolerations[0].key=x,tolerations[0].operator=Exists",
    "names": "nameOverride=river,fullnameOverride=dam,commonLabels.team=a",
    "budget": "podDisruptionBudget.enabled=true,podDisruptionBudget.maxUnavailable=50%",
    "extras": "extraArgs[0]=--tick-seconds=9,extraEnv[0].name=A,extraEnv[0].value=b,extraVolumes[0].name=v,"
              "extraVolumes[0].emptyDir.medium=Memory,extraVolumeMounts[0].name=v,extraVolumeMounts[0].mountPath=/v,"
              "extraObjects[0].apiVersion=v1,extraObjects[0].kind=ConfigMap,extraObjects[0].metadata.name=extra",
    "everything": "replicaCount=2,networkPolicy.enabled=true,metrics.serviceMonitor.enabled=true,"
                  "metrics.serverPodMonitor.enabled=true,metrics.prometheusRule.enabled=true,metrics.dashboards.enabled=true,"
                  "log.format=text,crds.keep=false,test.memory=4Gi",
}


def test_every_combination_is_accepted_by_the_api_server(cluster: Cluster, helm: Helm, optional_kinds: None) -> None:
    """The rendered objects, hooks included, as a server-side dry run."""
    own = another(cluster)
    for name in ("team-a", "team-b"):
        cluster.kubectl("create", "namespace", name, check=False)
    for what, values in COMBINATIONS.items():
        settings = [f"--set={values}"] if values else []
        text = helm("template", "weir", str(CHART), "-n", own, "--kube-version=1.36.0", *settings).stdout
        objects = [m for m in yaml.safe_load_all(text) if m]
        for m in objects:
            if m["kind"] == "ConfigMap":
                m["metadata"].setdefault("namespace", own)
        done = cluster.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-",
                               stdin="\n---\n".join(map(json.dumps, objects)), check=False)
        assert done.returncode == 0, f"{what}: {done.stderr}"
        assert len(done.stdout.splitlines()) == len(objects), what


def test_overlays_and_the_plain_file_are_accepted_by_the_api_server(cluster: Cluster, optional_kinds: None) -> None:
    for name in ("weir-system", "team-a"):
        cluster.kubectl("create", "namespace", name, check=False)
    dry = ("apply", "--server-side", "--force-conflicts", "--dry-run=server")
    for folder in ("config/crd", "config/default", "config/overlays/full", "config/overlays/single-namespace"):
        cluster.kubectl(*dry, "-k", str(ROOT / folder))
    cluster.kubectl(*dry, "-f", str(ROOT / "dist/install.yaml"))


def test_the_operators_of_overlays_and_chart_can_be_told_from_their_labels(cluster: Cluster) -> None:
    """A NetworkPolicy of a server lets in what carries the first, the plugin asks what carries both, whichever way it was
    installed."""
    text = (ROOT / "dist/install.yaml").read_text()
    pods = [m["spec"]["template"]["metadata"]["labels"] for m in yaml.safe_load_all(text) if m["kind"] == "Deployment"]
    found = [(labels["app.kubernetes.io/component"], labels["app.kubernetes.io/part-of"]) for labels in pods]
    assert found == [("operator", "weir")]
