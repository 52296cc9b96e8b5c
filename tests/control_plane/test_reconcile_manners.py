"""What an operator must not do: restart pods by being newer, move the number of pods that another owns, fight with kubectl."""

from __future__ import annotations

import json
from typing import Any

import yaml
from control_plane_kit import (
    Cluster,
    Operator,
    child,
    condition,
    make_ready,
    replicas,
    resource,
    settled,
    wait,
    watching_replicas,
)


def patch(cluster: Cluster, namespace: str, change: Any) -> None:
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", json.dumps(change))


def image(cluster: Cluster, namespace: str) -> str:
    pod = cluster.get("deployment", "chat", namespace)["spec"]["template"]["spec"]
    return str(pod["containers"][0]["image"])


def replica_sets(cluster: Cluster, namespace: str) -> int:
    return len(cluster.kubectl("get", "rs", "-n", namespace, "-l", "weir.dev/name=chat", "-o", "name").stdout.split())


def test_a_newer_operator_restarts_nothing_until_the_users_next_change(cluster: Cluster, namespace: str) -> None:
    def operator(name: str, its_image: str) -> Operator:
        return Operator(cluster, namespace, name).start(f"--server-image={its_image}")

    first = operator("one", "registry/weir-server:1")
    cluster.apply(resource(), namespace)
    settled(cluster, first, namespace)
    wait(lambda: replica_sets(cluster, namespace) == 1)
    assert first.stop() == 0

    second = operator("two", "registry/weir-server:2")
    patch(cluster, namespace, {"spec": {"slo": {"ttft": "3s"}, "replicas": 2}})  # restarts nothing, so it adopts nothing
    wait(lambda: "ttft: 3.0" in (child(cluster, namespace, "configmap") or {})["data"]["boot.yaml"])
    wait(lambda: cluster.get("deployment", "chat", namespace)["spec"]["replicas"] == 2)
    cluster.quiet(second, namespace)
    assert (image(cluster, namespace), replica_sets(cluster, namespace)) == ("registry/weir-server:1", 1)
    patch(cluster, namespace, {"spec": {"engine": {"threads": 2}}})
    wait(lambda: image(cluster, namespace) == "registry/weir-server:2", why="it restarts anyway, so it adopts")
    wait(lambda: replica_sets(cluster, namespace) == 2)
    assert second.stop() == 0

    third = operator("three", "registry/weir-server:3")
    wait(lambda: third.metric("weir_operator_leader") == 1)
    cluster.quiet(third, namespace)
    assert image(cluster, namespace) == "registry/weir-server:2"
    for value, wanted in (("now", 3), ("now", 3)):  # the same value once more asks for nothing
        patch(cluster, namespace, {"metadata": {"annotations": {"weir.dev/upgrade": value}}})
        wait(lambda: image(cluster, namespace) == f"registry/weir-server:{wanted}")  # noqa: B023
    cluster.kubectl("annotate", "deployment/chat", "-n", namespace, "weir.dev/pinned={}", "--overwrite")
    wait(lambda: "defaults" in cluster.get("deployment", "chat", namespace)["metadata"]["annotations"]["weir.dev/pinned"])
    assert third.stop() == 0
    for one in (first, second, third):
        assert "Traceback" not in one.log


def test_the_number_of_pods_is_handed_to_an_autoscaler_and_back_without_a_dip(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    cluster.apply(resource(replicas=5), namespace)
    settled(cluster, operator, namespace)
    wait(lambda: replicas(cluster, namespace) == 5)
    with watching_replicas(cluster, namespace) as seen:
        patch(cluster, namespace, {"spec": {"autoscaling": {"mode": "External"}, "replicas": 1}})
        wait(lambda: condition(cluster, namespace, "AutoscalerOwned").get("status") == "True")
        cluster.quiet(operator, namespace)
        owners = {
            entry["manager"] for entry in cluster.get("deployment", "chat", namespace)["metadata"]["managedFields"]
            if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
        }
        assert "weir-operator" not in owners and owners, owners
        cluster.kubectl("autoscale", "deployment/chat", "--min=7", "--max=9", "-n", namespace)
        wait(lambda: replicas(cluster, namespace) == 7, 60, "the autoscaler takes over")
        cluster.quiet(operator, namespace)
        before = len(cluster.writes(namespace))
        cluster.kubectl("annotate", "infd/chat", "-n", namespace, "note=again")
        cluster.quiet(operator, namespace)
        assert cluster.writes(namespace)[before:] == [], "what the autoscaler does is no drift"
        assert "of 7 pods" in condition(cluster, namespace, "Ready")["message"]

        cluster.kubectl("delete", "hpa", "chat", "-n", namespace)
        patch(cluster, namespace, {"spec": {"autoscaling": {"mode": "Disabled"}, "replicas": 6}})
        wait(lambda: replicas(cluster, namespace) == 6)
        patch(cluster, namespace, {"spec": {"autoscaling": {"mode": "External"}}})
        wait(lambda: condition(cluster, namespace, "AutoscalerOwned").get("status") == "True")
        cluster.quiet(operator, namespace)
        assert replicas(cluster, namespace) == 6
    assert min(seen) >= 5, seen
    assert 7 in seen


def test_an_autoscaler_on_the_resource_and_re_apply_do_not_meet(cluster: Cluster, namespace: str, operator: Operator) -> None:
    manifest = resource()
    cluster.apply(manifest, namespace)
    settled(cluster, operator, namespace)
    cluster.kubectl("autoscale", "infd/chat", "--min=5", "--max=9", "-n", namespace)
    wait(lambda: replicas(cluster, namespace) == 5, 60, "the autoscaler writes the resource, and we the Deployment")
    with watching_replicas(cluster, namespace) as seen:
        cluster.apply(manifest, namespace)
        cluster.kubectl("apply", "--server-side", "--field-manager=gitops", "--force-conflicts", "-n", namespace, "-f", "-",
                        stdin=yaml.safe_dump(manifest))
        patch(cluster, namespace, {"spec": {"slo": {"ttft": "4s"}}})
        wait(lambda: "ttft: 4.0" in (child(cluster, namespace, "configmap") or {})["data"]["boot.yaml"])
        cluster.kubectl("delete", "hpa", "chat", "-n", namespace)
        cluster.quiet(operator, namespace)
    assert set(seen) == {5}


def test_a_rollout_that_does_not_get_ready_stops_while_the_old_pod_serves(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    cluster.apply(resource(rollout={"progressDeadline": "6s"}), namespace)
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Progressing").get("reason") == "Complete")
    patch(cluster, namespace, {"spec": {"image": "registry/none:1"}})
    new = wait(lambda: [p for p in pods(cluster, namespace) if "none" in p["spec"]["containers"][0]["image"]], why="a new pod")
    fail(cluster, namespace, new[0]["metadata"]["name"], {
        "waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image registry/none:1"},
    })
    said = wait(lambda: (c := condition(cluster, namespace, "Progressing")).get("reason") == "DeadlineExceeded" and c, 60)
    assert "1 pods of the template before go on" in said["message"]
    assert "registry/none:1" in said["message"] and "check spec.image" in said["message"]
    assert condition(cluster, namespace, "Ready")["status"] == "True"
    assert len(pods(cluster, namespace)) == 2, "one surge, none missing"
    strategy = cluster.get("deployment", "chat", namespace)["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


def pods(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    listed = cluster.kubectl("get", "pods", "-n", namespace, "-l", "weir.dev/name=chat", "-o", "json").stdout
    return list(json.loads(listed)["items"])


def fail(
    cluster: Cluster, namespace: str, pod: str, state: Any, *, last: Any = None, name: str = "server", init: bool = False,
) -> None:
    """There is no kubelet: say in its place how a container fares."""
    container = {
        "name": name, "ready": False, "started": False, "restartCount": 1, "image": "x", "imageID": "x", "state": state,
        "lastState": last or {},
    }
    status = {"phase": "Pending", "initContainerStatuses" if init else "containerStatuses": [container]}
    cluster.kubectl("patch", "pod", pod, "-n", namespace, "--subresource=status", "--type=merge",
                    "-p", json.dumps({"status": status}))


def ended(code: int, message: str, reason: str = "Error") -> dict[str, Any]:
    when = "2026-01-01T00:00:00Z"
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": when, "finishedAt": when}}


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}


def test_what_befalls_pods_becomes_a_condition_that_says_what_to_do(
    cluster: Cluster, namespace: str, operator: Operator,
) -> None:
    model = {"source": "hf://acme/tiny", "secretRef": {"name": "hub"}}
    cluster.apply(resource(model=model), namespace)
    pod = wait(lambda: child(cluster, namespace, "pod"), why="a pod")["metadata"]["name"]

    def becomes(reason: str, *words: str, kind: str = "Ready") -> None:
        said = wait(lambda: (c := condition(cluster, namespace, kind)).get("reason") == reason and c, why=reason)
        for word in words:
            assert word in said["message"], said

    fail(cluster, namespace, pod, {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, name="fetch", init=True)
    becomes("Downloading", "fetch", kind="ModelLoaded")
    gone = ended(2, "line\nweir-server: acme/tiny is gated: accept its terms there")
    fail(cluster, namespace, pod, BACK_OFF, last=gone, name="fetch", init=True)
    becomes("DownloadFailed", "is gated: accept its terms there", "model.secretRef")
    becomes("DownloadFailed", "is gated", kind="ModelLoaded")
    cluster.kubectl("patch", "pod", pod, "-n", namespace, "--subresource=status", "--type=merge",
                    "-p", '{"status":{"initContainerStatuses":[]}}')
    for state, last, reason, words in (
        ({"waiting": {"reason": "ErrImagePull", "message": "not found"}}, None, "ImagePullFailed", ("imagePullSecrets",)),
        (BACK_OFF, ended(137, "", "OOMKilled"), "OutOfMemory", ("memory limit", "engine.limits.kvCache")),
        (BACK_OFF, ended(1, "boom"), "CrashLooping", ("boom", "kubectl logs --previous")),
        ({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}}, None, "ConfigError",
         ('secret "keys" not found', "spec.auth")),
    ):
        fail(cluster, namespace, pod, state, last=last)
        becomes(reason, *words)
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: Insufficient memory."}
    cluster.kubectl("patch", "pod", pod, "-n", namespace, "--subresource=status", "--type=merge",
                    "-p", json.dumps({"status": {"containerStatuses": [], "conditions": [full]}}))
    becomes("Unschedulable", "Insufficient memory", "requests")
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready")["status"] == "True")
    cluster.kubectl("patch", "pod", pod, "-n", namespace, "--subresource=status", "--type=merge", "-p", json.dumps({"status": {
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-02T00:00:00Z"}],
        "containerStatuses": [{
            "name": "server", "ready": False, "started": True, "restartCount": 0, "image": "x", "imageID": "x",
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }],
    }}))
    becomes("ProbeFailing", "no longer answers its readiness probe")


def test_edit_apply_and_server_side_apply_do_not_fight_with_us(cluster: Cluster, namespace: str, operator: Operator) -> None:
    template = {"spec": {"containers": [{"name": "server", "resources": {"limits": {"cpu": "1500m", "memory": "2.0Gi"}}}]}}
    manifest = resource(slo={"ttft": "2000ms", "tpot": "80ms"}, tuning={}, template=template)
    del manifest["spec"]["model"]
    manifest["spec"]["model"] = {"source": "file:///models/m.gguf"}
    text = yaml.safe_dump(manifest)
    cluster.apply(manifest, namespace)
    settled(cluster, operator, namespace)
    make_ready(cluster, namespace)
    wait(lambda: condition(cluster, namespace, "Ready").get("status") == "True")
    for _ in range(2):
        assert "unchanged" in cluster.apply(manifest, namespace).stdout
    gitops = ("--server-side", "--field-manager=gitops", "-n", namespace, "-f", "-")
    cluster.kubectl("apply", "--force-conflicts", *gitops, stdin=text)
    cluster.quiet(operator, namespace)
    assert cluster.kubectl("diff", "-n", namespace, "-f", "-", stdin=text, check=False).returncode == 0
    assert cluster.kubectl("diff", *gitops, stdin=text, check=False).returncode == 0
    made = cluster.get("infd", "chat", namespace)
    assert made["metadata"]["generation"] == 1
    assert "weir.dev/pinned" not in made["metadata"].get("annotations", {})
    writers = {e["manager"] for e in made["metadata"]["managedFields"] if "f:spec" in e["fieldsV1"]}
    assert not {w for w in writers if w.startswith("weir")}, writers
    ours = cluster.get("deployment", "chat", namespace)
    assert ours["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1500m", "memory": "2Gi"}
    generation = ours["metadata"]["generation"]
    cluster.kubectl("annotate", "infd/chat", "-n", namespace, "note=x")
    cluster.quiet(operator, namespace)
    assert cluster.get("deployment", "chat", namespace)["metadata"]["generation"] == generation
