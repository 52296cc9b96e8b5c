"""One journey on a real cluster: installed, overloaded, tuned, left alone, taken up again, deleted, uninstalled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import SYSTEM, Deployment, batch_moves, declare, eventually, get, goodput, kubectl, measured, phase, run

LEASE = 15
SECONDS_A, SECONDS_B = 60, 150
QUIET = {"tuning": {"mode": "Advise", "knobs": {"maxQueueDepth": {"initial": 2}}}}
"""A queue this short makes even the boot values worth something, or there would be nothing to compare with."""


@pytest.mark.timeout(1200)
async def test_overload_is_tuned_and_the_pod_survives_its_operator(release: str, namespace: str, tmp_path: Path) -> None:
    async with Deployment(namespace, QUIET) as deployment:
        await deployment.ready()
        sizing = await measured(deployment)
        await declare(deployment, sizing.objectives)
        boot = (await deployment.control("state"))["boot"]

        before = await phase(deployment, "Advise", SECONDS_A, sizing.rate, sizing.objectives, tmp_path)
        assert (await deployment.control("state"))["effective"] == boot, "advice alone moves nothing"
        a = goodput(before, sizing.objectives)
        assert a > 0, "with nothing good at boot values there is nothing to compare with"

        after = await phase(deployment, "Auto", SECONDS_B, sizing.rate, sizing.objectives, tmp_path)
        b = goodput(after, sizing.objectives)
        assert b > a, f"tuned {b:.0%}, at boot values {a:.0%}"
        await a_batch_move_settled(deployment)

        await left_alone(deployment, release, boot)
        await taken_up_again(deployment, release)
    await everything_is_gone(namespace)
    await uninstalled(release)


async def a_batch_move_settled(deployment: Deployment) -> None:
    """Every batch that was moved to was in force by the pod's own word, and its prediction stands beside what was observed."""
    history, state = deployment.history(), await deployment.control("state")
    moved = [h["changes"]["max_batch_size"][1] for h in batch_moves(history)]
    assert moved, f"no batch move among {[(h['outcome'], h['reason']) for h in history]}"
    assert set(moved[1:]) <= deployment.batches, f"moved to {moved}, the pod said {deployment.batches}"
    assert state["effective"] == state["target"], "the last one has settled"
    assert state["effective"]["max_batch_size"] == moved[0], f"moved to {moved}, in force is {state['effective']}"
    assert any(h.get("observed") and h.get("predicted") for h in history), f"no prediction beside what was observed: {history}"


async def left_alone(deployment: Deployment, release: str, boot: dict[str, Any]) -> None:
    """Without its operator the pod keeps serving, and when the lease runs out it returns to its fallback."""
    pod = deployment.pod()["metadata"]["name"]
    kubectl("scale", f"deployment/{release}", "-n", SYSTEM, "--replicas=0")

    async def back() -> bool:
        await deployment.completion()
        state = await deployment.control("state")
        return state["effective"] == state["fallback"] and state["lease"]["expires_in_seconds"] is None

    await eventually(back, "the lease runs out and the fallback is in force", 4 * LEASE)
    assert (await deployment.control("state"))["fallback"] == boot, "nothing has held for ten minutes: the declared values"
    now = deployment.pod()
    assert (now["metadata"]["name"], now["status"]["containerStatuses"][0]["restartCount"]) == (pod, 0)


async def taken_up_again(deployment: Deployment, release: str) -> None:
    """The operator is back: it steers the same pod with a later fence, and has not forgotten what it did."""
    fence, known = (await deployment.control("state"))["fence"], deployment.history()
    kubectl("scale", f"deployment/{release}", "-n", SYSTEM, "--replicas=1")

    async def steering() -> bool:
        now = (await deployment.control("state"))["fence"]
        return (now["epoch"], now["seq"]) > (fence["epoch"], fence["seq"])

    await eventually(steering, "the restarted operator steers the pod", 90)
    assert [h for h in deployment.history() if h in known], "its history is kept"


async def everything_is_gone(namespace: str) -> None:
    """Owner references take every child along."""
    kinds = "deployments,replicasets,pods,services,configmaps,secrets,serviceaccounts,infd"
    own = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}

    def left() -> bool:
        found = {(i["kind"], i["metadata"]["name"]) for i in get(kinds, "-n", namespace)["items"]} - own
        assert not found, found
        return True

    await eventually(left, "nothing is left of the deployment", 120)


async def uninstalled(release: str) -> None:
    """The chart leaves the CRD, and the operator leaves its key and its Lease; everything else goes."""
    run("helm", "uninstall", release, "-n", SYSTEM, "--wait", "--timeout=120s")

    def left() -> bool:
        kinds = "deployments,pods,services,secrets,configmaps,serviceaccounts,roles,rolebindings,leases"
        own = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
        found = {(i["kind"], i["metadata"]["name"]) for i in get(kinds, "-n", SYSTEM)["items"]} - own
        assert found == {("Secret", "weir-operator-key"), ("Lease", "weir-operator")}, found
        roles = {i["metadata"]["name"] for i in get("clusterroles,clusterrolebindings")["items"]}
        assert not (ours := {r for r in roles if release in r}), ours
        return True

    await eventually(left, "nothing is left of the release but what is kept", 60)
    assert get("crd", "inferencedeployments.weir.dev")["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    await asyncio.to_thread(kubectl, "get", "infd", "-A")
