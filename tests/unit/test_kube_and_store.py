"""Paths, proxies, and the cache of what the watches have seen."""

import json
from typing import Any

import pytest

from weir_operator.io.kube import ApiError, ByPath, path, proxy_for
from weir_operator.loops import store as module
from weir_operator.loops.children import _owns_replicas, fingerprint
from weir_operator.loops.store import Store

PROXY = {"https": "http://proxy:3128", "http": "http://proxy:3128"}


@pytest.mark.parametrize(("url", "no", "used"), [
    ("https://10.96.0.1:443", "127.0.0.1,localhost,10.0.0.0/8,.svc", False),
    ("https://10.96.0.1:443", "127.0.0.1, 10.0.0.0/8", False),  # a space after the comma
    ("https://kubernetes.default.svc", ".svc", False),
    ("https://api.example.com:6443", "10.0.0.0/8,.svc", True),
    ("https://api.example.com:6443", "example.com", False),
    ("https://notexample.com", "example.com", True),
    ("https://[fd00::1]:6443", "fd00::/8", False),
    ("https://api", "*", False),
    ("https://api", "", True),
    ("https://api", "not/a/network", True),
])
def test_no_proxy_is_read_as_go_reads_it(url: str, no: str, used: bool) -> None:
    assert (proxy_for(url, {**PROXY, "no": no}) is not None) is used


def test_without_proxies_none_is_used() -> None:
    assert proxy_for("https://api", {}) is None


def test_paths() -> None:
    root = "/apis/weir.dev/v1alpha1/namespaces/ns/inferencedeployments"
    assert path("InferenceDeployment", "ns", "chat", "status") == f"{root}/chat/status"
    assert path("Pod", None) == "/api/v1/pods"
    assert path("Lease", "ns", "weir-operator") == "/apis/coordination.k8s.io/v1/namespaces/ns/leases/weir-operator"


def obj(name: str, version: str = "1", uid: str = "u", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": version, "labels": labels}}


def test_an_older_event_does_not_overwrite_a_newer_object() -> None:
    store = Store()
    store.put("Service", obj("a", "9"))
    store.put("Service", obj("a", "10"))
    store.put("Service", obj("a", "9"))
    assert store.get("Service", "ns", "a")["metadata"]["resourceVersion"] == "10"
    store.put("Service", obj("a", "3", uid="another"))
    assert store.get("Service", "ns", "a")["metadata"]["uid"] == "another"


def test_autoscalers_of_others_are_found_by_what_they_scale() -> None:
    """A label comes first: what is ours has it, and what KEDA makes for a ScaledObject of ours has it copied."""
    store = Store()

    def scaler(name: str, kind: str, target: str, owner: str = "", **labels: str) -> None:
        found = obj(name, uid=name, **labels)
        found["metadata"]["ownerReferences"] = [{"uid": owner}] if owner else []
        store.put("HorizontalPodAutoscaler", {**found, "spec": {"scaleTargetRef": {"kind": kind, "name": target}}})

    scaler("own", "Deployment", "chat", owner="u", **{"weir.dev/name": "chat"})
    scaler("on-deployment", "Deployment", "chat")
    scaler("on-resource", "InferenceDeployment", "chat")
    scaler("on-set", "StatefulSet", "chat")
    scaler("on-another", "Deployment", "other")
    assert [o["metadata"]["name"] for o in store.autoscalers("ns/chat", "u")] == ["on-deployment", "on-resource"]
    scaler("on-deployment", "Deployment", "other")
    assert [o["metadata"]["name"] for o in store.autoscalers("ns/chat", "u")] == ["on-resource"]


def test_a_fresh_list_drops_what_no_watch_reported_as_deleted() -> None:
    store = Store()
    for name in ("a", "b"):
        store.put("Pod", obj(name, **{"weir.dev/name": "chat"}))
    store.replace("Pod", [obj("b", "2", **{"weir.dev/name": "chat"})], store.known("Pod"))
    assert [p["metadata"]["name"] for p in store.pods("ns/chat")] == ["b"]
    store.drop("Pod", obj("b", **{"weir.dev/name": "chat"}))
    assert store.pods("ns/chat") == []


def test_a_list_knows_nothing_of_what_watches_told_while_it_was_made() -> None:
    store = Store()
    store.told("Pod", obj("deleted meanwhile"), False)
    store.told("Pod", obj("made anew meanwhile", uid="old"), False)
    before = store.known("Pod")
    store.told("Pod", obj("deleted meanwhile"), True)
    store.told("Pod", obj("made anew meanwhile", uid="new"), False)
    store.told("Pod", obj("added meanwhile"), False)
    store.replace("Pod", [obj("deleted meanwhile")], before)
    assert sorted(store.known("Pod")) == ["ns/added meanwhile", "ns/made anew meanwhile"]


def test_a_watch_owes_what_a_list_showed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    store = Store()
    for name in ("same", "gone", "changed"):
        store.told("Pod", obj(name), False)
    store.replace("Pod", [obj("same"), obj("changed", "2")], store.known("Pod"))
    now[0] = 90.0
    assert store.lag() == 90
    store.told("Pod", obj("gone"), True)
    assert store.lag() == 90
    store.told("Pod", obj("changed", "2"), False)
    assert store.lag() == 0
    store.replace("Pod", [obj("same"), obj("changed", "2")], store.known("Pod"))
    assert store.lag() == 0


def test_a_watch_that_began_anew_does_not_owe_what_went_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    store = Store()
    for name in ("gone", "going", "new"):
        store.told("Pod", obj(name), False)
    store.replace("Pod", [obj("going"), obj("new")], store.known("Pod"))  # it went, and then the watch broke
    store.replace("Pod", [obj("new", "2")], store.known("Pod"), gap=True)
    now[0] = 90.0
    assert [o["metadata"]["name"] for o in store.known("Pod").values()] == ["new"]
    assert store.lag() == 90, "what is there it has to tell"
    store.told("Pod", obj("new", "2"), False)
    assert store.lag() == 0


def test_of_who_set_what_only_the_number_of_pods_is_kept() -> None:
    def entry(manager: str, **spec: Any) -> dict[str, Any]:
        return {"manager": manager, "operation": "Apply", "fieldsV1": {"f:spec": spec, "f:metadata": {"f:labels": {}}}}

    deployment = {**obj("chat"), "spec": {"replicas": 3}}
    deployment["metadata"]["managedFields"] = [
        entry("weir-operator", **{"f:replicas": {}, "f:template": {}}), entry("kubectl", **{"f:paused": {}}),
        {"manager": "kube-controller-manager", "fieldsV1": {"f:status": {"f:replicas": {}}}},
    ]
    store = Store()
    store.told("Deployment", deployment, False)
    kept = store.get("Deployment", "ns", "chat")
    assert kept and [e["manager"] for e in kept["metadata"]["managedFields"]] == ["weir-operator"]
    assert _owns_replicas(kept) and kept["spec"] == {"replicas": 3}
    assert len(deployment["metadata"]["managedFields"]) == 3, "whoever brought it keeps it whole"
    pod = obj("p")
    pod["metadata"]["managedFields"] = [entry("kubelet", **{"f:containers": {}})]
    store.told("Pod", pod, False)
    assert "managedFields" not in store.known("Pod")["ns/p"]["metadata"]


def test_equal_parts_of_two_objects_are_kept_once() -> None:
    """A thousand objects of a kind differ in little but their names: kept whole, they took five times the memory."""
    store = Store()

    def put(name: str, version: str, **spec: Any) -> dict[str, Any]:
        text = json.dumps({"metadata": {"namespace": "n", "name": name, "uid": name, "resourceVersion": version}, "spec": spec})
        store.put("Deployment", json.loads(text))
        kept = store.get("Deployment", "n", name)
        assert kept is not None and json.dumps(kept, sort_keys=True) == json.dumps(json.loads(text), sort_keys=True)
        return dict(kept["spec"])

    parts: dict[str, Any] = {"args": ["--x"], "image": {"tag": "registry/server:1"}, "size": 10**6}
    first, second = put("a", "1", **parts, own="a"), put("b", "1", **parts, own="registry/server:1")
    assert all(first[part] is second[part] for part in parts)
    assert second["own"] is first["image"]["tag"], "a string is one wherever it stands"
    assert next(iter(second)) is next(iter(first)), "a name, too"
    for number in (1, True, 1.0, 0, False):  # equal to Python, and not in a manifest
        assert type(put("n", "1", n=number)["n"]) is type(number)
    changed = put("b", "2", **{**parts, "size": 1}, own="b")
    assert changed["args"] is second["args"] and second["size"] == 10**6
    for empty in ({}, [], "", None, False):
        assert put("e", "1", args=empty, none=empty) == {"args": empty, "none": empty}
    other = put("c", "1", **{**parts, "args": ["--x", "--y"], "size": True}, own=1.0)
    assert other["image"] is first["image"] and other["args"][0] is first["args"][0]
    assert other["size"] is True and type(other["own"]) is float
    assert first["args"] == ["--x"], "what is kept of one is not changed by another"


class Pages(ByPath):
    """Five objects, three a page. The second page is refused once, where `expires`."""

    def __init__(self, expires: bool) -> None:
        self.expires, self.asked = expires, list[Any]()

    async def request(self, method: str, target: str, *, query: Any = None, **_: Any) -> dict[str, Any]:
        self.asked.append(dict(query))
        start = int(query.get("continue", 0))
        if start and self.expires:
            raise ApiError(410, "Expired", "The provided continue parameter is too old")
        most = 3 if "limit" in query else 5
        items = [{"metadata": {"name": str(i)}, "spec": {}} for i in range(start, min(5, start + most))]
        more = {"continue": str(start + most)} if start + most < 5 else {}
        return {"apiVersion": "v1", "kind": "PodList", "metadata": more, "items": items}


@pytest.mark.parametrize("expires", [False, True])
async def test_a_list_comes_in_pages_and_whole_where_it_grew_too_old_to_go_on(expires: bool) -> None:
    api = Pages(expires)
    assert [o["metadata"]["name"] for o in await api.list("Pod", "ns", "a=b")] == list("01234")
    assert [o["kind"] for o in await api.list("Pod", keep=lambda o: {"kind": o["kind"]})] == ["Pod"] * 5
    assert {"limit", "labelSelector"} == api.asked[0].keys()
    assert api.asked[2] == {"labelSelector": "a=b"} if expires else "continue" not in api.asked[2]


def test_a_fingerprint_sees_edits_and_not_bookkeeping() -> None:
    before = {**obj("a"), "spec": {"replicas": 1}, "status": {"readyReplicas": 0}}
    busy = {**obj("a", "2"), "spec": {"replicas": 1}, "status": {"readyReplicas": 1}}
    busy["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "3"}
    before["metadata"]["annotations"] = {}
    assert fingerprint(before) == fingerprint(busy)
    assert fingerprint(before) != fingerprint({**before, "spec": {"replicas": 2}})
    assert fingerprint(before) != fingerprint({**before, "metadata": {**before["metadata"], "labels": {"x": "y"}}})
