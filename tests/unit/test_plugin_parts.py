"""The plugin's pure parts: texts, edits of the spec, metrics, the words for kubectl, completion, the report of a load."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from rich.console import Console

from weir_operator.cli.plugin import bench, texts, tree, work
from weir_operator.cli.plugin.api import Cluster, port_of, proxied
from weir_operator.cli.plugin.bench import Load, Outcome, Report, play
from weir_operator.cli.plugin.edits import BEFORE, NothingToDo, Revision, chosen, to_release, to_rollback
from weir_operator.cli.plugin.metrics import parsed, quantile, reading
from weir_operator.io.kube import ApiError
from weir_operator.plan.manifests import Defaults, children
from weir_operator.plan.plan import parse
from weir_server.contract import CONTROL_PORT, HTTP_PORT

RAW: dict[str, Any] = {
    "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
    "spec": {
        "model": {"source": "file:///models/m.gguf"}, "slo": {"ttft": "2s", "tpot": "80ms"},
        "tuning": {"knobs": {"maxBatchSize": {"initial": 4, "max": 32}}},
    },
}
MOVE = {
    "time": "2026-01-01T00:00:00Z", "pod": "chat-1", "rule": "set-point", "outcome": "Moved", "reason": "r",
    "changes": {"max_batch_size": [4, 9], "admission_watermark": [0.01, 0.03], "kv_cache_budget": [377487360, 737280]},
}


def with_history(*entries: dict[str, Any], **annotations: str) -> dict[str, Any]:
    raw = {**RAW, "status": {"tuning": {"history": list(entries)}}}
    return {**raw, "metadata": {**RAW["metadata"], "annotations": annotations}}


def patched(raw: dict[str, Any], edit: Any) -> dict[str, Any]:
    """The resource after a merge patch, by the API server's rule."""
    def merge(value: Any, change: Any) -> Any:
        if not isinstance(change, dict):
            return change
        out = dict(value or {})
        for key, new in change.items():
            out.pop(key, None) if new is None else out.update({key: merge(out.get(key), new)})
        return out

    meta = {**raw["metadata"], "annotations": merge(raw["metadata"].get("annotations"), edit.annotations)}
    return {**raw, "spec": merge(raw["spec"], edit.spec), "metadata": meta}


# ---------------------------------------------------------------- edits

def test_a_rollback_pins_what_moved_and_a_release_restores_what_was_declared() -> None:
    held = {**MOVE, "outcome": "Holding", "changes": {}}
    raw = with_history(held, MOVE, {**MOVE, "changes": {"max_batch_size": [2, 4]}})
    edit = to_rollback(raw)
    pinned = patched(raw, edit)
    assert pinned["spec"]["tuning"]["knobs"] == {
        "maxBatchSize": {"min": 4, "initial": 4, "max": 4},
        "admissionWatermarkPercent": {"min": 1, "initial": 1, "max": 1},
        "kvCacheBudget": dict.fromkeys(("min", "initial", "max"), "377487360"),
    }
    assert parse({k: pinned[k] for k in ("apiVersion", "kind", "metadata", "spec")}).spec.tuning.knobs.max_batch_size.max == 4
    again = patched(pinned, to_rollback(pinned))  # twice keeps the first bounds, not the pins
    released = patched(again, to_release(again))
    assert released["spec"]["tuning"]["knobs"]["maxBatchSize"] == {"initial": 4, "max": 32}
    assert released["spec"]["tuning"]["knobs"]["kvCacheBudget"] == {}
    assert BEFORE not in released["metadata"]["annotations"]


def test_without_a_move_or_a_pin_there_is_nothing_to_do() -> None:
    for wrong, make in ((with_history(), to_rollback), (RAW, to_rollback), (RAW, to_release)):
        with pytest.raises(NothingToDo):
            make(wrong)
    for text in ("no json", "[]", '{"maxBatchSize": 3}'):
        with pytest.raises(NothingToDo):
            to_release(with_history(**{BEFORE: text}))


def test_the_revision_before_is_chosen_unless_another_is_named() -> None:
    kept = [Revision(n, "t", {"n": n}) for n in (7, 5, 2)]
    assert chosen(kept, None).number == 5
    assert chosen(kept, 2).number == 2
    with pytest.raises(NothingToDo, match="kept are: 7, 5, 2"):
        chosen(kept, 3)
    with pytest.raises(NothingToDo, match="no earlier revision"):
        chosen(kept[:1], None)


def test_the_deployment_carries_the_spec_that_its_pods_are_made_from() -> None:
    manifests = children(parse(RAW), Defaults("image", "token"))
    [deployment] = [m for m in manifests if m["kind"] == "Deployment"]
    assert json.loads(deployment["metadata"]["annotations"]["weir.dev/spec"]) == RAW["spec"]


# ---------------------------------------------------------------- texts

POD = {
    "pod": "chat-0", "next_tick": 118.0, "reachable": True,
    "record": {"t": 95.0, "outcome": "Holding", "rule": "set-point", "reason": "no other setting is better", "changes": {}},
    "limit": {
        "what": "kv", "running": 3, "batch": 8, "waiting": 5, "queue": 16, "kv_use": 0.97, "refused": 4.0,
        "head_wait": {"slots": 0.0, "kv": 0.9, "prefill": 0.0, "drain": 0.0},
    },
    "fit": {
        "coefficients": {
            "a": {"value": 0.042, "error": 0.0003}, "b": {"value": 0.0032, "error": 0.00002},
            "c": {"value": 0.0, "error": None}, "p": {"value": 0.002, "error": None},
        },
        "prefill_tokens": 64, "steps": 1234.0, "residual": 0.041,
    },
    "traffic": {"offered": 1.6, "output": 64.0, "prefill": 2.0, "context": 160.0},
    "settings": [
        {"batch": 4, "queue": 16, "goodput": 1.0, "interval": 0.0612, "accepted": 0.7, "mark": "present"},
        {"batch": 8, "queue": 5, "goodput": 1.4, "interval": 0.0812, "accepted": 0.9, "mark": "best"},
    ],
    "would_change": ["A.", "B."],
}


def said(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(what)
    return out.getvalue()


def test_an_explanation_reads_as_sentences() -> None:
    text = said(texts.explained(POD, 100.0, 30.0))
    assert "kv limit it, KV memory is full: 3 of 8 rows run, 5 of 16 wait, 97% of the KV budget is used" in text
    assert "waited for it 90% of the time, 4 rows were refused" in text
    assert "Last: Holding (set-point), 5 s ago: no other setting is better. The next decision is due in 18 s." in text
    step = "42 ± 0.3 ms a step + 3.2 ± 0.02 ms a row + 2 ms a prefilled token; from 1234 steps, 4% of a step unexplained."
    assert step in text
    assert [line.split() for line in text.splitlines() if "1.40/s" in line] == [
        ["8", "5", "1.40/s", "81", "ms", "90%", "best", "in", "reach"],
    ]
    assert text.index("What would change it: A.") < text.index("  B.")


def test_nothing_known_is_said_too() -> None:
    bare = {"pod": "chat-1", "record": None, "next_tick": None, "limit": None, "fit": None, "traffic": {}, "settings": ()}
    text = said(texts.explained(bare, 0.0, 30.0))
    assert "the pod was not read" in text
    assert "no decision yet" in text


def test_advice_is_what_the_most_careful_pod_asks_for() -> None:
    stays = {**POD, "pod": "chat-1", "settings": [POD["settings"][0]]}  # type: ignore[index]
    sentences, manifest = texts.advice([POD, stays])
    assert "chat-0: batch 4 → 8, queue 16 → 5: 1.40 rows/s in time are predicted, 1.00 as it is." in sentences
    assert "chat-1: keep batch 4 and queue 16" in sentences
    assert manifest["spec"]["tuning"]["knobs"] == {"maxBatchSize": {"initial": 4}, "maxQueueDepth": {"initial": 16}}
    sentences, manifest = texts.advice([{**POD, "reachable": False}])
    assert (sentences, manifest) == ("chat-0: no advice. A. B.", {})


# ---------------------------------------------------------------- metrics

def exposition(seen: int, start: float = 1.0) -> str:
    """Of a server that has finished `seen` rows, half of them with a TTFT under 0.5 s, the others under 1 s."""
    half = seen // 2
    return f"""
weir_process_start_time_seconds {start}
weir_requests_running 3
weir_requests_waiting 2
weir_requests_waiting_by_bound{{bound="slots"}} 2
weir_requests_waiting_by_bound{{bound="kv"}} 0
weir_kv_usage_ratio 0.25
weir_requests_rejected_total{{reason="queue_full",bound="slots"}} {seen}
weir_requests_finished_total{{reason="stop"}} {half}
weir_requests_finished_total{{reason="length"}} {seen - half}
weir_time_to_first_token_seconds_bucket{{le="0.5"}} {half}
weir_time_to_first_token_seconds_bucket{{le="1.0"}} {seen}
weir_time_to_first_token_seconds_bucket{{le="+Inf"}} {seen}
weir_time_per_output_token_seconds_bucket{{le="+Inf"}} {seen}
weir_knob_effective{{knob="max_batch_size"}} 4
"""


def test_a_reading_is_of_what_came_between_two_expositions() -> None:
    found = reading(parsed(exposition(100)), parsed(exposition(120)), 10.0)
    assert (found.running, found.waiting, found.bound, found.kv) == (3, 2, "slots", 0.25)
    assert (found.refused, found.finished) == (2.0, 2.0)
    assert found.ttft == (0.5, pytest.approx(0.95))
    assert found.knobs == {"max_batch_size": 4}
    assert reading(parsed(exposition(100)), parsed(exposition(100)), 10.0).ttft == (None, None)


def test_another_process_is_not_compared_with_the_one_before() -> None:
    found = reading(parsed(exposition(100)), parsed(exposition(20, start=2.0)), 10.0)
    assert (found.refused, found.finished) == (0.0, 0.0)
    assert found.ttft[0] == 0.5
    with pytest.raises(KeyError):
        reading(parsed(exposition(1)), parsed("weir_requests_running 3\n"), 1.0)


def test_a_quantile_in_the_open_bucket_is_its_start() -> None:
    text = 'x_bucket{le="1.0"} 0\nx_bucket{le="+Inf"} 5\n'
    assert quantile({}, parsed("# TYPE x histogram\n" + text), "x", 0.5) == 1.0


# ---------------------------------------------------------------- whom `explain` asks

class Leaders(Cluster):
    """An API server with a pod of an operator in each of some namespaces; who may see the whole cluster is another matter."""

    def __init__(self, *namespaces: str, everywhere: bool = True) -> None:
        self.namespaces, self.everywhere, self.asked = namespaces, everywhere, list[str]()

    async def list(self, kind: str, namespace: str | None = None, selector: str | None = None) -> Any:
        assert selector == "app.kubernetes.io/component=operator,app.kubernetes.io/part-of=weir"
        if namespace is None and not self.everywhere:
            raise ApiError(403, "Forbidden", "not the whole cluster")
        container = {"name": "operator", "ports": [{"name": "health", "containerPort": 8082}]}
        return [
            {"metadata": {"namespace": n, "name": "weir"}, "spec": {"containers": [container]}}
            for n in self.namespaces if namespace in (n, None)
        ]

    async def text(self, target: str) -> str:
        self.asked.append(target)
        return "{}"


@pytest.mark.parametrize(("named", "place"), [("b", "b"), ("b/weir-two", "b"), ("gone", "a"), ("", "a"), (None, "a")])
async def test_the_operator_that_the_status_names_is_asked(named: str | None, place: str) -> None:
    raw = {**RAW, "status": {"operator": named}} if named is not None else RAW
    api = Leaders("a", "b")
    await api.explained(raw)
    assert api.asked == [f"/api/v1/namespaces/{place}/pods/weir:8082/proxy/explain/ns/chat"]
    if named and place in named:  # with rights there alone
        assert await Leaders("a", "b", everywhere=False).explained(raw) == {}


# ---------------------------------------------------------------- size

SIDECAR = {"sidecar": True, "template": {"spec": {
    "initContainers": [{"name": "waits-for-the-server", "image": "app:1"}], "containers": [{"name": "app", "image": "app:1"}],
}}}
BESIDE = pytest.mark.parametrize("more", [{}, SIDECAR], ids=["alone", "sidecar"])


def template(**spec: Any) -> dict[str, Any]:
    manifests = children(parse({**RAW, "spec": {**RAW["spec"], **spec}}), Defaults("image", "token"))
    [found] = [m["spec"]["template"] for m in manifests if m["kind"] == "Deployment"]
    return dict(found)


@BESIDE
def test_a_pod_that_does_the_arithmetic_has_the_template_and_nothing_that_makes_it_found(more: dict[str, Any]) -> None:
    made = template(**more, model={"source": "hf://acme/tiny"})
    words = work.once("chat-size-1", made, ["--output=json"])
    assert words[0] == "run" and words[1] == "chat-size-1" and "--rm" in words
    pod = json.loads(next(w for w in words if w.startswith("--overrides=")).removeprefix("--overrides="))
    [container] = pod["spec"]["containers"]
    assert container["args"][:2] == ["size", "/models/hf/acme/tiny"] and container["args"][-1] == "--output=json"
    assert not [a for a in container["args"] if a.startswith(("--port", "--control", "--boot-file"))]
    assert "labels" not in pod.get("metadata", {}) and pod["spec"]["restartPolicy"] == "Never"
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports", "restartPolicy"} & set(container)
    assert pod["spec"]["volumes"] == made["spec"]["volumes"]
    assert [c["name"] for c in pod["spec"]["initContainers"]] == ["fetch"], "what waits for the server would wait for ever"


@BESIDE
def test_the_servers_ports_and_restarts_are_found_wherever_it_is_in_the_pod(more: dict[str, Any]) -> None:
    kind = "initContainerStatuses" if more else "containerStatuses"
    seen = {"name": "server", "ready": False, "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    pod = {**template(**more), "metadata": {"name": "chat-1", "namespace": "ns"}, "status": {kind: [seen]}}
    assert (port_of(pod, "http"), port_of(pod, "control")) == (HTTP_PORT, CONTROL_PORT)
    assert proxied(pod, "http", "metrics") == f"/api/v1/namespaces/ns/pods/chat-1:{HTTP_PORT}/proxy/metrics"
    child = tree._child("Pod", pod, {})
    assert (child.healthy, "3 restarts" in child.detail, "CrashLooping" in child.detail) == (False, True, True)


@pytest.mark.parametrize(("status", "healthy", "said"), [
    ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}, None, "Evicted: The node was low"),
    ({"phase": "Pending", "containerStatuses": [{"name": "server", "state": {"waiting": {"reason": "ContainerCreating"}}}]},
     False, "not ready (ContainerCreating)"),
    ({"phase": "Running", "containerStatuses": [{
        "name": "server", "started": True, "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}},
    }]}, False, "not ready (Running)"),  # that end is over
])
def test_why_a_pod_is_not_ready_is_of_now(status: dict[str, Any], healthy: bool | None, said: str) -> None:
    child = tree._child("Pod", {"metadata": {"name": "chat-1"}, "spec": {}, "status": status}, {})
    assert child.healthy is healthy and said in child.detail


def test_what_is_left_out_of_a_size_is_what_the_servers_size_does_not_take() -> None:
    from typer.main import get_command

    from weir_server.cli.serve import command as serve
    from weir_server.cli.size import command as size

    def flags(command: Any) -> set[str]:
        app = typer.Typer(add_completion=False)
        app.command()(command)
        return {o for p in get_command(app).params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}

    assert flags(serve) - flags(size) == set(work.SERVE_ONLY)


# ---------------------------------------------------------------- bench

async def test_a_load_is_open_loop_and_every_end_is_counted() -> None:
    """A server that serves every third, refuses every third and breaks off every third."""
    seen: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        kind = len(seen) % 3
        if kind == 1:
            return web.json_response({"error": {"message": "Server is busy. Retry later.", "type": "overloaded"}}, status=503)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for event in ({"choices": [{"text": ""}]}, {"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}):
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if kind == 2:
            await answer.write(b'data: {"error": {"message": "inference backend error"}}\n\n')
        else:
            await answer.write(b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        load = Load(rate=30.0, seconds=1.0, prompt=5, output=2, seed=3)
        report = (await play([f"http://127.0.0.1:{runner.addresses[0][1]}"], "m", load, (2.0, 1.0), None)).to_json()
    finally:
        await runner.cleanup()
    draw, expected, at = random.Random(3), 0, 0.0
    while (at := at + draw.expovariate(30.0)) < 1.0:
        expected += 1
        bench.prompt(draw, 5)
    assert report["offered"] == len(seen) == expected > 10
    served = sum(i % 3 == 0 for i in range(1, expected + 1))
    assert report["served"] == report["good"] == served
    assert report["refused"] == {"Server is busy. Retry later.": sum(i % 3 == 1 for i in range(1, expected + 1))}
    assert report["failed"] == {"inference backend error": sum(i % 3 == 2 for i in range(1, expected + 1))}
    assert len({body["prompt"] for body in seen}) > 5
    assert seen[0]["max_tokens"] == 2 and seen[0]["stream"] is True


def test_goodput_counts_what_met_both_objectives_and_nothing_else() -> None:
    outcomes = [
        Outcome(200, ttft=1.0, tpot=0.05), Outcome(200, ttft=3.0, tpot=0.05), Outcome(200, ttft=1.0, tpot=0.09),
        Outcome(200, ttft=1.0, tpot=None), Outcome(503), Outcome(0, "cannot connect"), Outcome(200, "broke", 1.0, 0.05),
        Outcome(200),
    ]
    report = Report(Load(1.0, 8.0, 1, 1), (2.0, 0.08), 8.0, outcomes)
    assert report.good == 2
    assert Report(Load(1.0, 8.0, 1, 1), (None, None), 8.0, outcomes).good == 4
    assert report.to_json()["goodputPerSecond"] == 0.25
    assert "goodput   0.25/s in time (ttft ≤ 2.00 s and tpot ≤ 80 ms)" in work.report_text(report.to_json())
    empty = Report(Load(1.0, 1.0, 1, 1), (None, None), 1.0, []).to_json()
    assert empty["ttft"] == {"p50": None, "p95": None, "p99": None}
    assert "TTFT      p50 – p95 – p99 –" in work.report_text(empty)


# ---------------------------------------------------------------- the program

def plugin(*args: str, entry: str = "main", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from weir_operator.cli.plugin import {entry}; {entry}()", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60, check=False)


@pytest.mark.parametrize(("words", "found"), [
    ((), "explain"), (("",), "status"), (("tuning", ""), "rollback"), (("tuning", "mo"), "mode"),
    (("explain", "--loc"), "--local"), (("tuning", "mode", "chat", "A"), "Advise"),
])
def test_kubectl_completes_the_plugins_words(words: tuple[str, ...], found: str, tmp_path: Path) -> None:
    done = plugin(*words, entry="complete", WEIR_LOCAL_DIR=str(tmp_path), KUBECONFIG=str(tmp_path / "none"))
    lines = done.stdout.splitlines()
    assert lines[-1] == ":4" and done.returncode == 0, done.stderr
    assert found in [line.split("\t")[0] for line in lines]


def test_a_tab_without_a_cluster_or_a_local_deployment_says_nothing(tmp_path: Path) -> None:
    for words in (("explain", ""), ("explain", "--local", "")):
        done = plugin(*words, entry="complete", WEIR_LOCAL_DIR=str(tmp_path), KUBECONFIG=str(tmp_path / "none"))
        assert (done.stdout, done.stderr) == (":4\n", "")


MISTAKES = [
    (("status", "--local"), 1, "no local deployment runs"),
    (("explain", "chat"), 1, "no cluster"),
    (("status", "-o", "xml"), 2, "-o must be text, json or yaml"),
    (("tuning", "mode", "chat", "Off"), 2, "the mode is Auto, Advise or Disabled"),
]


@pytest.mark.parametrize(("words", "status", "said"), MISTAKES)
def test_a_mistake_is_one_line_and_a_status(words: tuple[str, ...], status: int, said: str, tmp_path: Path) -> None:
    done = plugin(*words, WEIR_LOCAL_DIR=str(tmp_path), KUBECONFIG=str(tmp_path / "none"), KUBERNETES_SERVICE_HOST="")
    assert done.returncode == status
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("kubectl-infd: ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_for_each_shell(shell: str) -> None:
    done = plugin(_KUBECTL_INFD_COMPLETE=f"source_{shell}")
    assert done.returncode == 0 and "kubectl-infd" in done.stdout, done.stderr


@pytest.mark.parametrize("verb", [
    "status", "explain", "history", "advise", "top", "logs", "bench", "size", "pause", "resume", "rollback", "tuning",
])
def test_every_verb_has_help(verb: str) -> None:
    from typer.testing import CliRunner

    from weir_operator.cli.plugin.commands import app

    result = CliRunner().invoke(app, [verb, "-h"])
    assert result.exit_code == 0 and len(result.output) > 300
