"""An operator that dies at any write of a pass, before the API server has it or before it hears the answer: whoever comes next
finds what is there and finishes it, and writes nothing more after that."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from typing import Any

import pytest
from api_proxy import WRITING, ApiProxy
from control_plane_kit import Cluster, Operator, child, resource, settled, wait

from weir_operator.api import names
from weir_operator.io.apply import Writer
from weir_operator.io.kube import Kube
from weir_operator.loops.reconcile import Reconciler
from weir_operator.loops.store import CHILD_KINDS, Store

SCALED = {"mode": "External", "scaler": "HorizontalPodAutoscaler", "maxReplicas": 3}
FIRST = {"replicas": 2, "service": {"headless": True}}
THEN = {"autoscaling": SCALED, "service": {"headless": False}, "networkPolicy": {"enabled": False},
        "disruption": {"maxUnavailable": "50%"}}
"""A change that applies, hands the number of pods over, makes and deletes."""


class Died(BaseException):
    """Nothing may catch it: the process is gone."""


class Mortal(Kube):
    """Dies at its `last` write, `before` it is sent or after it was answered."""

    last, before = 0, True

    async def request(self, method: str, target: str, **rest: Any) -> dict[str, Any]:
        writes = method in WRITING
        self.last -= writes
        if writes and self.last == 0 and self.before:
            raise Died
        answer = await super().request(method, target, **rest)
        if writes and self.last == 0:
            raise Died
        return answer


async def one_pass(namespace: str, name: str, last: int = 0, before: bool = True) -> int:
    """An operator's life: it lists everything and passes over the resource. Returns how many writes it made."""
    async with await Mortal.connect() as kube:
        kube.last, kube.before = last, before
        reconciler = Reconciler(kube, Writer(kube), Store(), "registry/weir-server:test", b"key")
        kube.last += 10_000 if not last else 0
        begun = kube.last
        await reconciler.refresh((namespace,))
        try:
            await reconciler(f"{namespace}/{name}")
        except Died:
            return -1
        return begun - kube.last


def children(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    """Kind/name → spec, of all that is labelled as the resource's, without what differs between two of them."""
    kinds = ",".join(kind.lower() for kind in (*CHILD_KINDS, "Secret"))
    text = cluster.kubectl("get", kinds, "-n", namespace, "-l", f"weir.dev/name={name}", "-o", "json").stdout
    uid = cluster.get("infd", name, namespace)["metadata"]["uid"]
    found = {}
    for item in json.loads(text)["items"]:
        rest = {k: v for k, v in item.items() if k not in ("metadata", "status")}
        for key in ("clusterIP", "clusterIPs"):
            rest.get("spec", {}).pop(key, None)
        rest.get("data", {}).pop("token", None)
        text = json.dumps(rest, sort_keys=True).replace(uid[:8], "UID").replace(name, "NAME")
        found[f"{item['kind']}/{item['metadata']['name']}".replace(uid[:8], "UID").replace(name, "NAME")] = text
    return found


@pytest.mark.parametrize("before", [True, False], ids=["before-it-is-sent", "before-it-hears"])
async def test_a_pass_that_dies_at_any_write_is_finished_by_the_next(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch, before: bool,
) -> None:
    """A create and a change, each killed at each of its writes, against ones that nobody killed."""
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.kubeconfig))

    async def apply(name: str, spec: dict[str, Any]) -> None:
        await asyncio.to_thread(cluster.apply, resource(name, **spec), namespace)

    killed = {}
    for phase, spec in (("create", FIRST), ("change", THEN)):
        await apply("whole", spec)
        await one_pass(namespace, "whole")
        wanted = await asyncio.to_thread(children, cluster, namespace, "whole")
        for step in itertools.count(1):
            name = f"{phase}-{step}"
            await apply(name, FIRST)
            if phase == "change":
                await one_pass(namespace, name)
                await apply(name, spec)
            if await one_pass(namespace, name, step, before) >= 0:
                break  # it has fewer writes than that
            killed[phase] = step
            await one_pass(namespace, name)
            found = await asyncio.to_thread(children, cluster, namespace, name)
            assert found == wanted, f"{phase}, killed at write {step}"
            again = await one_pass(namespace, name)
            assert again <= 1, f"{phase}, killed at write {step}: {again} writes more"  # the Secret, which is never read
    print(f"killed at each of {killed['create']} writes of a create and {killed['change']} of a change")
    assert killed["create"] >= 8 and killed["change"] >= 4
    assert names.KIND not in {key.split("/")[0] for key in wanted}


def test_a_process_that_is_killed_in_the_midst_of_a_create_is_followed(cluster: Cluster, namespace: str) -> None:
    """The same with SIGKILL, at three writes of a real process; what it leaves is finished, and there is one of everything."""
    for turn, (step, moment) in enumerate(((2, "after"), (5, "before"), (9, "after"))):
        with ApiProxy(cluster) as proxy:
            operator = Operator(cluster, namespace, f"victim-{turn}", proxy.kubeconfig(f"victim-{turn}"))

            def kill(number: int, when: str) -> None:
                if (number, when) == (step, moment):  # noqa: B023
                    assert operator.process  # noqa: B023
                    os.kill(operator.process.pid, signal.SIGKILL)  # noqa: B023

            operator.start()
            wait(lambda: operator.metric("weir_operator_leader") == 1)  # noqa: B023
            proxy.seen["writes"], proxy.at_write = 0, kill
            cluster.apply(resource(), namespace)
            assert operator.process and operator.process.wait(30) == -signal.SIGKILL
        cluster.kubectl("delete", "lease", "weir-operator", "-n", namespace)  # else the next one waits for it to run out
        heir = Operator(cluster, namespace, f"heir-{turn}").start()
        settled(cluster, heir, namespace)
        wait(lambda: child(cluster, namespace, "pod"))
        cluster.quiet(heir, namespace)
        for kind in ("deployment", "configmap", "secret", "serviceaccount", "replicaset"):
            assert child(cluster, namespace, kind), f"one {kind}, after a kill at write {step}"
        assert heir.stop() == 0
        assert "Traceback" not in heir.log
        cluster.kubectl("delete", "infd", "chat", "-n", namespace)
        wait(lambda: child(cluster, namespace, "deployment") is None, 60, "the collector")
