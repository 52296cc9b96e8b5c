"""Who may reach what: the policies of the chart and of an InferenceDeployment, by the API's own rules."""

from __future__ import annotations

from typing import Any

import pytest
from chart_kit import HELMS, needed, one, render
from network_rules import Outside, Pod, allowed

from weir_operator.plan.manifests import Defaults, children
from weir_operator.plan.plan import parse
from weir_server.contract import CONTROL_PORT, HTTP_PORT

SYSTEM = "weir-system"

# ------------------------------------------------------------------------------------------------ the evaluator itself

WEB, DB = Pod("a", {"app": "web"}, "10.0.0.1"), Pod("a", {"app": "db"}, "10.0.0.2", {"sql": 5432})
STRANGER, FRIEND = Pod("b", {"app": "web"}, "10.0.1.1"), Pod("c", {"app": "web"}, "10.0.2.1", namespace_labels={"team": "x"})


def policy(namespace: str = "a", select: Any = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": namespace}, "spec": {"podSelector": select or {}, **spec}}


def ingress(*rules: Any, **more: Any) -> dict[str, Any]:
    return policy(select={"matchLabels": {"app": "db"}}, ingress=list(rules), **more)


@pytest.mark.parametrize(("policies", "source", "port", "may"), [
    ([], STRANGER, 5432, True),
    ([policy(policyTypes=["Ingress"])], WEB, 5432, False),  # selected, and nothing is allowed
    ([policy(namespace="b", policyTypes=["Ingress"])], WEB, 5432, True),  # another namespace's
    ([policy(select={"matchLabels": {"app": "other"}}, policyTypes=["Ingress"])], WEB, 5432, True),
    ([ingress({})], STRANGER, 1, True),  # an empty rule allows everything
    ([ingress({"ports": [{"port": 5432}]})], STRANGER, 5432, True),
    ([ingress({"ports": [{"port": 5432}]})], STRANGER, 5433, False),
    ([ingress({"ports": [{"port": "sql"}]})], STRANGER, 5432, True),
    ([ingress({"ports": [{"port": "http"}]})], STRANGER, 5432, False),  # the pod has no such port
    ([ingress({"ports": [{"port": 5000, "endPort": 6000}]})], STRANGER, 5432, True),
    ([ingress({"ports": [{"port": 5432, "protocol": "UDP"}]})], STRANGER, 5432, False),
    ([ingress({"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]})], WEB, 5432, True),
    ([ingress({"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]})], STRANGER, 5432, False),  # its own namespace alone
    ([ingress({"from": [{"namespaceSelector": {"matchLabels": {"team": "x"}}}]})], FRIEND, 5432, True),
    ([ingress({"from": [{"namespaceSelector": {"matchLabels": {"team": "x"}}}]})], STRANGER, 5432, False),
    ([ingress({"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "db"}}}]})], FRIEND, 5432, False),
    ([ingress({"from": [{"namespaceSelector": {}}, {"podSelector": {"matchLabels": {"app": "db"}}}]})], FRIEND, 5432, True),
    ([ingress({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.1.0/24"]}}]})], STRANGER, 5432, False),
    ([ingress({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]})], Outside("10.9.9.9"), 5432, True),
    ([ingress({"from": [{"namespaceSelector": {}}]})], Outside("10.9.9.9"), 5432, False),
    ([ingress({"ports": [{"port": 1}]}), ingress({"ports": [{"port": 5432}]})], STRANGER, 5432, True),  # they add up
    ([policy(select={"matchExpressions": [{"key": "app", "operator": "In", "values": ["db", "x"]}]}, policyTypes=["Ingress"])],
     WEB, 5432, False),
    ([policy(select={"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, policyTypes=["Ingress"])],
     WEB, 5432, True),
    ([policy(select={"matchLabels": {"app": "web"}}, egress=[])], WEB, 5432, False),  # the source's own egress
    ([policy(select={"matchLabels": {"app": "web"}}, egress=[{"ports": [{"port": "sql"}]}])], WEB, 5432, True),
    ([policy(select={"matchLabels": {"app": "web"}}, policyTypes=["Ingress"], egress=[])], WEB, 5432, True),
])
def test_the_evaluator(policies: Any, source: Any, port: int, may: bool) -> None:
    assert allowed(policies, source, DB, port) is may


# ------------------------------------------------------------------------------------------------ ours


def resource(**spec: Any) -> Any:
    return parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "team", "uid": "u", "generation": 1},
        "spec": {"model": {"source": "file:///m.gguf"}, **spec},
    })


def served(**spec: Any) -> tuple[list[Any], Pod]:
    """The policies of a resource, and one of its pods."""
    made = children(resource(**spec), Defaults(image="i", token="t", operator_namespace=SYSTEM))
    template = one(made, "Deployment")["spec"]["template"]
    ports = {p["name"]: p["containerPort"] for c in template["spec"]["containers"] for p in c.get("ports", ())}
    return [m for m in made if m["kind"] == "NetworkPolicy"], Pod("team", template["metadata"]["labels"], "10.1.0.9", ports)


@pytest.fixture(scope="module")
def installed() -> tuple[list[Any], Pod]:
    """The chart's policy, and its pod."""
    manifests = render(HELMS[0] if HELMS else needed("helm"), "--set=networkPolicy.enabled=true",
                       "--set=networkPolicy.apiServer.cidrs={192.0.2.1/32}")
    template = one(manifests, "Deployment")["spec"]["template"]
    ports = {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
    return [one(manifests, "NetworkPolicy")], Pod(SYSTEM, template["metadata"]["labels"], "10.1.0.1", ports)


CLIENTS = [
    Pod("team", {"app": "web"}, "10.1.0.2"), Pod("other", {"app": "web"}, "10.1.0.3"), Outside("203.0.113.9"),
    Pod("team", {"app.kubernetes.io/component": "operator"}, "10.1.0.4"),  # looks like the operator, elsewhere
    Pod(SYSTEM, {"app": "web"}, "10.1.0.5"),  # is beside the operator
]


@pytest.mark.chart
def test_the_operator_reaches_the_control_port_and_nobody_else_does(installed: tuple[list[Any], Pod]) -> None:
    (own, operator), (theirs, server) = installed, served()
    policies = [*own, *theirs]
    assert allowed(policies, operator, server, CONTROL_PORT)
    for client in CLIENTS:
        assert not allowed(policies, client, server, CONTROL_PORT), client
        assert allowed(policies, client, server, HTTP_PORT), client


@pytest.mark.chart
def test_servers_do_not_reach_one_anothers_control_port(installed: tuple[list[Any], Pod]) -> None:
    theirs, server = served()
    assert not allowed([*installed[0], *theirs], server, server, CONTROL_PORT)


@pytest.mark.chart
def test_named_clients_alone_reach_the_api_where_they_are_named() -> None:
    web = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}
    policies, server = served(networkPolicy={"enabled": True, "clients": [web]})
    assert allowed(policies, CLIENTS[0], server, HTTP_PORT) and allowed(policies, CLIENTS[1], server, HTTP_PORT)
    assert not allowed(policies, CLIENTS[3], server, HTTP_PORT)
    assert not allowed(policies, CLIENTS[0], server, CONTROL_PORT)


@pytest.mark.chart
def test_without_a_policy_the_token_alone_protects_the_control_port() -> None:
    policies, server = served(networkPolicy={"enabled": False})
    assert policies == [] and allowed(policies, CLIENTS[0], server, CONTROL_PORT)


@pytest.mark.chart
def test_the_operator_talks_to_dns_to_the_api_server_and_to_servers_alone(installed: tuple[list[Any], Pod]) -> None:
    policies, operator = installed
    api, dns = Outside("192.0.2.1"), Pod("kube-system", {"k8s-app": "kube-dns"}, "10.1.0.7")
    assert allowed(policies, operator, api, 443) and allowed(policies, operator, api, 6443)
    assert allowed(policies, operator, dns, 53, "UDP") and allowed(policies, operator, dns, 53)
    assert not allowed(policies, operator, Outside("203.0.113.9"), 443)
    assert not allowed(policies, operator, api, 22)
    assert not allowed(policies, operator, Pod("team", {"app": "web"}), CONTROL_PORT)


@pytest.mark.chart
def test_only_the_health_port_of_the_operator_is_open(installed: tuple[list[Any], Pod]) -> None:
    policies, operator = installed
    assert allowed(policies, Outside("10.2.0.1"), operator, 8082)
    assert not allowed(policies, Outside("10.2.0.1"), operator, 8083)
    monitoring = "networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring"
    manifests = render(HELMS[0], "--set=networkPolicy.enabled=true", f"--set-string={monitoring}")
    closed = [one(manifests, "NetworkPolicy")]
    assert allowed(closed, Pod("monitoring"), operator, 8082) and not allowed(closed, CLIENTS[0], operator, 8082)
