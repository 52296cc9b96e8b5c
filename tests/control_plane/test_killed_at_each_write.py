"""The operator is killed at each single write of a pass, and another one comes to the same end.

A proxy of its own kills each process by SIGKILL, just before a write is passed on or just after it was carried out and before
its answer is. The next process ends what that one began, and is the one that is killed in the next turn, until a turn has fewer
writes than its number.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
from api_proxy import ApiProxy
from control_plane_kit import Cluster, Operator, resource, wait, watching_replicas

from weir_operator.api import names
from weir_operator.loops.tuner import TunerSettings

KINDS = "deployments,services,serviceaccounts,configmaps,secrets,poddisruptionbudgets,networkpolicies,hpa,pvc"
MOMENTS, NEVER = ("before", "after"), (0, "")
TICK_SECONDS = 4.0
REPORT_SECONDS = TunerSettings(tick=TICK_SECONDS).report_every
ONE = {"slo": {"ttft": "2s", "tpot": "80ms"}, "replicas": 2, "disruption": {"maxUnavailable": 1}}
OTHER = {
    "slo": {"ttft": "3s", "tpot": "80ms"}, "replicas": 2, "disruption": {"maxUnavailable": 2},
    "autoscaling": {"mode": "External"},  # the number of pods changes hands: two writes of one object
    "networkPolicy": {"enabled": False}, "engine": {"limits": {"maxBatchSize": 4}}, "service": {"headless": True},
}


class Mortal:
    """An operator that `dies` at a moment of a write, counted from there."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.proxy = cluster, namespace, ApiProxy(cluster)
        self._name, self._wrote, self._at = name, 0, (0, "")

    def __enter__(self) -> Mortal:
        self.proxy.__enter__()
        self.proxy.at_write = self._write
        config = self.proxy.kubeconfig(f"{self.namespace}-{self._name}")
        self.operator = Operator(self.cluster, self.namespace, self._name, config)
        self.operator.start("--poll-seconds=1", f"--tick-seconds={TICK_SECONDS:g}")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self.dead:
            assert self.operator.stop() == 0
        assert "Traceback" not in self.operator.log, self.operator.log
        self.proxy.__exit__(kind, value, trace)

    def dies(self, number: int, moment: str) -> None:
        self._wrote, self._at = 0, (number, moment)

    def _write(self, _: int, moment: str, _path: str) -> None:
        self._wrote += moment == "before"
        if (self._wrote, moment) == self._at:
            self.proxy.away = True  # what is on its way from a dead process arrives nowhere
            self.process.send_signal(signal.SIGKILL)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.operator.process
        return self.operator.process

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def quiet(self) -> bool:
        """Wait until it is dead, or leads and has nothing left to do. Whether it lives."""
        wait(lambda: self.dead or self.operator.metric("weir_operator_leader") == 1)
        self.cluster.quiet(self.operator, self.namespace, unless=lambda: self.dead)
        return not self.dead


class Line:
    """Operators, one after the other. Where one was killed, its Lease is given back in its name: that it would run out by
    itself is another test's."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace, self.kills = cluster, namespace, 0
        self._made, self._written = itertools.count(), 0
        self._now: Mortal | None = None

    def __enter__(self) -> Line:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._now:
            self._now.__exit__(kind, value, trace)

    @property
    def dead(self) -> bool:
        return self._now is not None and self._now.dead

    def one(self) -> Mortal:
        """The one that lives."""
        if self._now and self._now.dead:
            self._now.__exit__(None, None, None)
            self._now, self.kills = None, self.kills + 1
            free = ("--type=merge", "-p", '{"spec": {"holderIdentity": ""}}')
            self.cluster.kubectl("patch", "lease", "weir-operator", "-n", self.namespace, *free, check=False)
        if self._now is None:
            self._now = Mortal(self.cluster, self.namespace, f"o{next(self._made)}").__enter__()
        return self._now

    def settle(self) -> None:
        """Wait until nothing is left to do, and count from here."""
        assert self.one().quiet()
        self._written = len(self.cluster.writes(self.namespace))

    def silent(self) -> None:
        """Wait until nothing was written for longer than between two reports of the tuner."""
        count, since = -1, 0.0

        def still() -> bool:
            nonlocal count, since
            before, count = count, len(self.cluster.writes(self.namespace))
            since = since if count == before else time.monotonic()
            return time.monotonic() - since > REPORT_SECONDS + 2

        wait(still, 90, "nothing is written any more")

    def survives(self, number: int, moment: str, spec: dict[str, Any], name: str) -> bool:
        """Apply it, with the operator to die then; whoever is next ends it. Whether nobody had to die. Until then nobody has
        written since the last time, but for the tuner's report, which has its own pace."""
        late = [w["requestURI"] for w in self.cluster.writes(self.namespace)[self._written:]]
        assert [where for where in late if "/status?" not in where] == [] and len(late) <= 1, late
        self.one().dies(number, moment)
        self.cluster.apply(resource(name, **spec), self.namespace)
        lived = self.one().quiet()
        self.one().dies(*NEVER)
        assert lived or self.one().quiet()
        self._written = len(self.cluster.writes(self.namespace))
        return lived


def listed(cluster: Cluster, namespace: str, name: str, kinds: str) -> list[dict[str, Any]]:
    mine = ("-l", f"{names.OWNER_LABEL}={name}", "-o", "json", "--show-managed-fields")
    return list(json.loads(cluster.kubectl("get", kinds, "-n", namespace, *mine).stdout)["items"])


def state(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    """What there is of a resource, without what is of another name or time."""
    whole, children = cluster.get("infd", name, namespace), [bare(live) for live in listed(cluster, namespace, name, KINDS)]
    status = whole["status"]
    assert status["observedGeneration"] == whole["metadata"]["generation"]
    said = [(c["type"], c["status"], c["reason"]) for c in status["conditions"]]
    counts = [status[k] for k in ("replicas", "desiredReplicas", "readyReplicas")]
    text = json.dumps({"children": children, "conditions": said, "counts": counts})
    text = text.replace(whole["metadata"]["uid"], "UID").replace(name, "NAME")
    return dict(json.loads(re.sub(r"-control-[0-9a-f-]+", "-control", text)))


def bare(live: dict[str, Any]) -> dict[str, Any]:
    meta = live["metadata"]
    notes = {k: v for k, v in (meta.get("annotations") or {}).items() if not k.startswith("deployment.kubernetes.io/")}
    fields = {(m["manager"], m["operation"]): m["fieldsV1"] for m in meta["managedFields"] if m["manager"].startswith("weir")}
    spec = {k: v for k, v in live.get("spec", {}).items() if k not in ("clusterIP", "clusterIPs", "ipFamilies")}
    return {
        "kind": live["kind"], "name": meta["name"], "labels": meta["labels"], "owners": meta["ownerReferences"], "notes": notes,
        "spec": spec, "data": live.get("data") if live["kind"] == "ConfigMap" else None,
        "fields": sorted((*who, json.dumps(what)) for who, what in fields.items()),
    }


def left(cluster: Cluster, namespace: str) -> list[str]:
    kinds = f"{KINDS},replicasets,pods"
    return cluster.kubectl("get", kinds, "-n", namespace, "-l", names.MANAGED_SELECTOR, "-o", "name").stdout.split()


GRID = pytest.mark.parametrize("moments", [
    pytest.param(lambda number: MOMENTS[number % 2:][:1], id="in turn"),
    pytest.param(lambda _: MOMENTS, id="both", marks=pytest.mark.slow),
])
"""At which moments of a write, by its number."""
Moments = Callable[[int], tuple[str, ...]]


@GRID
@pytest.mark.timeout(1200)
def test_killed_at_each_write_of_a_create(cluster: Cluster, namespace: str, moments: Moments) -> None:
    with Line(cluster, namespace) as line:
        for moment in MOMENTS:  # the first write of all is the key, before there is a Lease
            line.one().dies(1, moment)
            wait(lambda: line.dead, why="killed at the key")
        line.settle()
        assert line.survives(*NEVER, ONE, "whole")
        expected = state(cluster, namespace, "whole")
        assert {"Deployment", "Secret", "NetworkPolicy", "PodDisruptionBudget"} <= {o["kind"] for o in expected["children"]}
        cluster.kubectl("delete", "infd", "whole", "-n", namespace)
        lived = [False]
        for number in itertools.takewhile(lambda _: not all(lived), itertools.count(1)):
            lived.clear()
            for moment in moments(number):
                name = f"n{number}-{moment}"
                lived.append(line.survives(number, moment, ONE, name))
                assert state(cluster, namespace, name) == expected, name
                assert len(listed(cluster, namespace, name, "replicasets")) == 1, "no pod was made anew"
                cluster.kubectl("delete", "infd", name, "-n", namespace)
        wait(lambda: left(cluster, namespace) == [], 60, "nothing is orphaned")
        line.silent()
        print(f"a create: killed {line.kills} times, the key included, of {number - 1} writes")
        assert line.kills >= 10


@GRID
@pytest.mark.timeout(1200)
def test_killed_at_each_write_of_a_change(cluster: Cluster, namespace: str, moments: Moments) -> None:
    """From one spec to another and back: children are changed, deleted and made anew, and the number of pods changes hands."""
    expected, specs = {}, {"one": ONE, "other": OTHER}
    with Line(cluster, namespace) as line:
        for word in (*specs, *specs):  # the second time a change finds what it will always find
            assert line.survives(*NEVER, specs[word], "chat")
            expected[word] = state(cluster, namespace, "chat")
        assert expected["one"] != expected["other"]
        lived = [False]
        with watching_replicas(cluster, namespace) as seen:
            for number in itertools.takewhile(lambda _: not all(lived), itertools.count(1)):
                lived.clear()
                for moment, word in itertools.product(moments(number), specs):
                    lived.append(line.survives(number, moment, specs[word], "chat"))
                    assert state(cluster, namespace, "chat") == expected[word], (number, moment, word)
        line.silent()
        print(f"a change: killed {line.kills} times, of {number - 1} writes")
        assert line.kills >= 10
    assert set(seen) == {2}, "the number of pods never dipped"
