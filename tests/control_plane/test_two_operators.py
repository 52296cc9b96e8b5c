"""Two operators that serve one namespace, each with a Lease and a key of its own: as two releases of the chart with namespaces
in common, or one that is run by hand; or two of one namespace with one key and a Lease each. Each resource has one of them, the
other leaves it alone, and who is gone is followed."""

from __future__ import annotations

import json
import signal
import time

import pytest
from control_plane_kit import Cluster, Operator, acted, child, condition, decoded, edit, resource, settled, wait
from test_rights import another


def beside(cluster: Cluster, namespace: str, name: str, own: str = "", *args: str) -> Operator:
    """One from another namespace that serves this one."""
    made = Operator(cluster, own or another(cluster), name)
    return made.start(f"--namespace={namespace}", "--poll-seconds=1", "--tick-seconds=4", *args, scope=False)


def holder(cluster: Cluster, namespace: str, name: str = "chat") -> str:
    return str((cluster.get("infd", name, namespace) or {}).get("status", {}).get("operator", ""))


def let_in(cluster: Cluster, namespace: str) -> str:
    """The operator's namespace from which the pods' control port is reached: what each would write otherwise."""
    [rule] = [r for r in (child(cluster, namespace, "networkpolicy") or {})["spec"]["ingress"] if r["ports"][0]["port"] == 8081]
    return str(rule["from"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])


def versions(cluster: Cluster, namespace: str) -> dict[str, str]:
    kinds = "deployment,service,serviceaccount,configmap,secret,networkpolicy"
    listed = json.loads(cluster.kubectl("get", kinds, "-n", namespace, "-l", "weir.dev/name", "-o", "json").stdout)["items"]
    return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["generation" if "generation" in o["metadata"] else
                                                             "resourceVersion"] for o in listed}


@pytest.mark.parametrize("together", [False, True], ids=["in two namespaces", "in one namespace"])
def test_of_two_operators_one_serves_a_resource_and_says_that_there_is_another(
    cluster: Cluster, namespace: str, together: bool,
) -> None:
    first = beside(cluster, namespace, "first")
    cluster.apply(resource(), namespace)
    settled(cluster, first, namespace)
    cluster.quiet(first, namespace)
    assert holder(cluster, namespace) == first.namespace == let_in(cluster, namespace)
    made = versions(cluster, namespace)

    second = beside(cluster, namespace, "second", *([first.namespace, "--lease-name=second"] if together else []))
    known = f"{second.namespace}/second" if together else second.namespace
    said = wait(lambda: (c := condition(cluster, namespace, "Contested")).get("status") == "True" and c, 30, "it asks, in vain")
    assert said["reason"] == "OtherOperator" and f" {known} " in said["message"]
    wait(lambda: holder(cluster, namespace) == first.namespace and "is left to the operator" in second.log, 30)
    for operator in (first, second):
        cluster.quiet(operator, namespace)
    assert versions(cluster, namespace) == made, "the other has touched nothing"

    before = len(cluster.writes(namespace))
    edit(cluster, namespace, 7)
    wait(lambda: acted(cluster, namespace, 7))
    cluster.apply(resource("new"), namespace)  # nobody's: both begin, one goes on
    wait(lambda: condition(cluster, namespace, "Ready", "new").get("reason"), why="a status")
    for operator in (first, second):
        cluster.quiet(operator, namespace)
    written = [w for w in cluster.writes(namespace)[before:] if w["responseStatus"]["code"] < 300]
    ours = [w for w in written if w["objectRef"]["resource"] == "configmaps" and w["objectRef"]["name"] == "chat-boot"]
    assert len(ours) == 1, "one change, one write"
    new = holder(cluster, namespace, "new")
    policy = cluster.get("networkpolicy", "new", namespace)
    assert new in (first.namespace, known) and new.partition("/")[0] in json.dumps(policy["spec"])
    of_new = [w["objectRef"]["resource"] for w in written if w["objectRef"]["name"].startswith("new")]
    print(f"a new resource cost {len(of_new)} writes of two operators: {of_new}")
    assert of_new.count("networkpolicies") == of_new.count("deployments") == 1, "one made it"

    for operator in (first, second):
        assert operator.stop() == 0
        assert "Traceback" not in operator.log


def test_an_operator_that_is_gone_is_followed_by_one_of_another_namespace(cluster: Cluster, namespace: str) -> None:
    """It was removed, and installed anew elsewhere: nobody has to be told. Its pods go on; the token is the new one's."""
    first = beside(cluster, namespace, "first")
    cluster.apply(resource(), namespace)
    settled(cluster, first, namespace)
    cluster.quiet(first, namespace)
    first.stop(signal.SIGKILL)
    second, began = beside(cluster, namespace, "second"), time.monotonic()
    edit(cluster, namespace, 9)
    wait(lambda: acted(cluster, namespace, 9), 90, "the second serves it")
    print(f"served {time.monotonic() - began:.0f} s after the second began")
    cluster.quiet(second, namespace)
    assert holder(cluster, namespace) == second.namespace == let_in(cluster, namespace)
    assert condition(cluster, namespace, "Contested")["status"] == "False"
    revision = cluster.get("deployment", "chat", namespace)["metadata"]["annotations"]["deployment.kubernetes.io/revision"]
    assert revision == "1", "no pod restarts for it"
    assert second.stop() == 0
    assert "Traceback" not in second.log


def test_two_operators_of_one_namespace_lead_each_for_its_own(cluster: Cluster, namespace: str) -> None:
    """As two releases in one namespace, each with a team to serve: neither stands by for the other."""
    other, own = another(cluster), another(cluster)
    first = beside(cluster, namespace, "first", own)
    second = beside(cluster, other, "second", own, "--lease-name=second")
    for served, operator, known in ((namespace, first, own), (other, second, f"{own}/second")):
        cluster.apply(resource(), served)
        settled(cluster, operator, served)
        assert holder(cluster, served) == known and let_in(cluster, served) == own
        assert condition(cluster, served, "Contested")["status"] == "False"
    assert first.metric("weir_operator_leader") == second.metric("weir_operator_leader") == 1
    key = cluster.get("secret", "weir-operator-key", own)
    first.stop(signal.SIGKILL)
    third = beside(cluster, namespace, "third", own)  # the first's next process
    edit(cluster, namespace, 7)
    wait(lambda: acted(cluster, namespace, 7), 60, "it takes over from the first and from nobody else")
    assert second.metric("weir_operator_leader") == 1
    assert decoded(cluster.get("secret", "weir-operator-key", own), "key") == decoded(key, "key"), "one key, made once"
    for operator in (second, third):
        assert operator.stop() == 0
        assert "Traceback" not in operator.log
    cluster.kubectl("delete", "infd", "--all", "-n", other)
