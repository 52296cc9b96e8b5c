"""Status: conditions that stay honest on the way down (kserve/kserve#1859), and that do not change by themselves."""

import json
from typing import Any

import pytest
from fake_server import FakeServer

from weir_operator.api.conditions import Condition
from weir_operator.plan.manifests import Defaults
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.plan import parse, plan
from weir_operator.plan.status import _TUNED, invalid_status
from weir_operator.plan.tuning import _CALMEST_FIRST, remembered, resumable, tuner_spec
from weir_operator.plan.tuning import report as published
from weir_operator.tuner.types import Outcome, Pending, PodState, PodView, Poll, Record, TunerState

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def resource(replicas: int = 1, status: Any = None, **spec: Any) -> Any:
    return parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "generation": 2},
        "spec": {"model": {"source": "file:///m.gguf"}, "replicas": replicas, "slo": {"ttft": "1s", "tpot": "9ms"}, **spec},
        "status": status or {},
    })


def deployment(ready: int, total: int = 1, **status: Any) -> dict[str, Any]:
    counts = {"replicas": total, "updatedReplicas": total, "readyReplicas": ready, "observedGeneration": 5}
    return {"metadata": {"generation": 5}, "status": {**counts, **status}}


def pod(name: str = "chat-x", ready: bool = False, state: Any = None, last: Any = None, conditions: Any = ()) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns"},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}, *conditions],
            "containerStatuses": [{"name": "server", "ready": ready, "state": state or {}, "lastState": last or {}}],
        },
    }


def conditions(found: Any, **seen: Any) -> dict[str, tuple[str, str, str]]:
    status = plan(found, Observed(**{"now": NOW, **seen}), Defaults("i", "t")).status
    return {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
READY = [
    ("serving", resource(1), {"deployment": deployment(1)}, "True", "Serving"),
    ("zero wanted", resource(0), {"deployment": deployment(0, 0)}, "False", "ScaledToZero"),
    ("nothing there yet", resource(1), {}, "False", "Starting"),
    ("one of two lost", resource(2), {"deployment": deployment(1, 2)}, "False", "SomePodsUnready"),
    ("image", resource(1), {"pods": [pod(state={"waiting": {"reason": "ImagePullBackOff"}})]}, "False", "ImagePullFailed"),
    ("crash", resource(1), {"pods": [pod(state=BACK_OFF, last={"terminated": {"exitCode": 1}})]}, "False", "CrashLooping"),
    ("memory", resource(1), {"pods": [pod(state=BACK_OFF, last={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})]},
     "False", "OutOfMemory"),
    ("node", resource(1), {"pods": [pod(conditions=[{"type": "PodScheduled", "reason": "Unschedulable", "message": "full"}])]},
     "False", "Unschedulable"),
    ("config", resource(1), {"pods": [pod(state={"waiting": {"reason": "CreateContainerConfigError"}})]},
     "False", "ConfigError"),
    ("taken", resource(1), {"deployment": deployment(1), "trouble": Condition("Ready", False, "NameTaken", "Service chat")},
     "False", "NameTaken"),
]


@pytest.mark.parametrize(("found", "seen", "status", "reason"), [case[1:] for case in READY], ids=[case[0] for case in READY])
def test_ready(found: Any, seen: Any, status: str, reason: str) -> None:
    assert conditions(found, **seen)["Ready"][:2] == (status, reason)


def test_one_of_two_lost_is_available_and_degraded() -> None:
    said = conditions(resource(2), deployment=deployment(1, 2))
    assert said["Available"][0] == "True"
    assert said["Degraded"][0] == "True"


def test_a_server_that_cannot_load_says_so_in_its_own_words() -> None:
    words = "INFO starting\nweir-server: /m.gguf: expected 91 bytes, the file has 50"
    ended = {"terminated": {"exitCode": 2, "message": words}}
    said = conditions(resource(1), pods=[pod(state=BACK_OFF, last=ended)])
    assert said["ModelLoaded"] == ("False", "LoadFailed", words.splitlines()[-1])
    assert words.splitlines()[-1] in said["Ready"][2]


def test_a_stuck_rollout_is_said_while_old_pods_serve() -> None:
    stuck = deployment(1, 2, conditions=[{"type": "Progressing", "reason": "ProgressDeadlineExceeded", "message": "late"}])
    said = conditions(resource(1), deployment=stuck)
    assert said["Progressing"][:2] == ("False", "DeadlineExceeded")
    assert said["Ready"][0] == "True"


@pytest.mark.parametrize(("seen", "reason"), [
    ({"deployment": deployment(1)}, "Complete"),
    ({"deployment": deployment(1, observedGeneration=4)}, "RollingOut"),  # its counts are of the template before
    ({"deployment": deployment(1), "applied": False}, "RollingOut"),
])
def test_a_rollout_is_complete_only_of_the_present_template(seen: dict[str, Any], reason: str) -> None:
    assert conditions(resource(1), **seen)["Progressing"][1] == reason


WRONG = Condition("Ready", False, "SpecInvalid", "spec.template: x")


@pytest.mark.parametrize(("ready", "there", "told"), [
    (2, True, {"Available": "True", "Degraded": "False", "ModelLoaded": "True", "Progressing": "False"}),
    (1, True, {"Available": "True", "Degraded": "True", "ModelLoaded": "True", "Progressing": "True"}),
    (0, True, {"Available": "False", "Degraded": "True", "ModelLoaded": "False", "Progressing": "True"}),
    (0, False, {"Available": "False", "Degraded": "True", "ModelLoaded": "False"}),
])
def test_pods_are_told_of_whatever_became_of_the_spec(ready: int, there: bool, told: dict[str, str]) -> None:
    """What takes a spec to say stays, of the spec that it was said of."""
    def made(serving: int) -> dict[str, Any]:
        return {**deployment(serving, 2), "spec": {"replicas": 2}}

    before = plan(resource(2), Observed(NOW, made(2)), Defaults("i", "t")).status
    raw = {"metadata": {"name": "chat", "namespace": "ns", "uid": "u", "generation": 3}, "status": before}
    failed = [pod(state={"terminated": {"exitCode": 2, "message": "no model"}})] if not ready else []
    found = invalid_status(raw, WRONG, Observed(LATER, made(ready) if there else None, failed))
    said = {c["type"]: c for c in found["conditions"]}
    known = {c["type"]: c for c in before["conditions"]}
    assert said["Ready"]["reason"] == "SpecInvalid" and said["ModelLoaded"]["reason"] == ("Loaded" if ready else "LoadFailed")
    assert {kind: said[kind]["status"] for kind in told} == told
    assert {kind for kind in known if kind not in said} == ({"Progressing"} if not there else set())
    assert all(said[kind] == known[kind] for kind in ("Tuned", "SLOMet", "AutoscalerOwned", "IntegrationsReady"))
    assert (found["observedGeneration"], found["readyReplicas"], found["url"]) == (3, ready, before["url"])
    again = {**raw, "status": json.loads(json.dumps(found))}
    assert invalid_status(again, WRONG, Observed("2026-01-01T00:02:00Z", made(ready) if there else None, failed)) == found


def test_of_a_spec_that_could_never_be_read_no_pod_is_missed() -> None:
    found = invalid_status({"metadata": {"name": "chat", "namespace": "ns", "uid": "u", "generation": 1}}, WRONG, Observed(NOW))
    assert {c["type"]: c["status"] for c in found["conditions"]} == dict.fromkeys(
        ("Ready", "Available", "Degraded", "ModelLoaded", "Contested"), "False",
    )
    assert (found["replicas"], found["readyReplicas"]) == (0, 0)


def test_a_message_that_names_every_pod_is_cut() -> None:
    said = conditions(resource(), tuning=report(outcome=Outcome.HOLDING, drift="x" * 9000))
    assert len(said["Tuned"][2]) == 1024


def report(**more: Any) -> TuningReport:
    return TuningReport(**{"status": {"mode": "Auto"}, "ready": 2, "answering": 2, **more})


TRAFFIC = [
    ({"tuning": None}, "MetricsAvailable", "Unknown", "NoPods"),
    ({"tuning": report()}, "MetricsAvailable", "True", "Polled"),
    ({"tuning": report(answering=1, silent={"a": "no answer in 2 s"})}, "MetricsAvailable", "False", "SomePodsSilent"),
    ({"tuning": report(answering=0, silent={"a": "x", "b": "y"})}, "MetricsAvailable", "False", "NoPodAnswers"),
    ({"tuning": report()}, "SLOMet", "Unknown", "NoTraffic"),
    ({"tuning": report(good_percent=95)}, "SLOMet", "True", "Met"),
    ({"tuning": report(good_percent=0)}, "SLOMet", "False", "Missed"),
    ({"tuning": report(refusing=True)}, "Saturated", "True", "Refusing"),
    ({"tuning": report(outcome=Outcome.HOLDING)}, "Tuned", "True", "Holding"),
    ({"tuning": report(outcome=Outcome.MOVED)}, "Tuned", "False", "Moving"),
    ({"tuning": report(outcome=Outcome.HOLDING, drift="x")}, "Tuned", "False", "KnobDrift"),
    ({"tuning": report(outcome=Outcome.NOT_SET, reason="409: x")}, "Tuned", "False", "Frozen"),
    ({"tuning": report(other_contract=("chat-0",))}, "KnobsUnsupported", "True", "OtherContract"),
]


@pytest.mark.parametrize(("seen", "kind", "status", "reason"), TRAFFIC)
def test_traffic(seen: Any, kind: str, status: str, reason: str) -> None:
    assert conditions(resource(), **seen)[kind][:2] == (status, reason)


def test_without_objectives_nothing_is_tuned_and_it_says_why() -> None:
    said = conditions(resource(slo=None), tuning=report(outcome=Outcome.NO_OBJECTIVES))
    assert said["SLOMet"][1] == "NoObjectives"
    assert "spec.slo" in said["Tuned"][2]


def test_every_outcome_of_the_tuner_has_a_reason_and_a_rank() -> None:
    assert set(_TUNED) == set(Outcome) == set(_CALMEST_FIRST)


def test_an_unchanged_observation_is_an_unchanged_status() -> None:
    seen = {"deployment": deployment(1), "tuning": report(outcome=Outcome.HOLDING)}
    first = plan(resource(), Observed(NOW, **seen), Defaults("i", "t")).status
    again = plan(resource(status=json.loads(json.dumps(first))), Observed(LATER, **seen), Defaults("i", "t")).status
    assert again == first


def test_what_the_tuner_said_outlives_a_restart_of_the_operator() -> None:
    before = {"tuning": {"mode": "Auto", "knobs": {"maxBatchSize": 9}}}
    assert plan(resource(status=before), Observed(NOW), Defaults("i", "t")).status["tuning"] == before["tuning"]


def full(size: int) -> PodState:
    spread = {bucket: 0.123456789 * bucket for bucket in range(150, 150 + size)}
    return PodState(instance="i" * 36, seen=12345.678901234, spread=spread, prefill=spread)


@pytest.mark.parametrize("pods", [3, 50, 200])
def test_the_status_of_many_pods_stays_small(pods: int) -> None:
    names = [f"{'chat' * 12}-7d9f8b6c5d-{i:05d}" for i in range(pods)]
    views = {name: PodView(name, "c", None, (Poll(0.0, FakeServer().window()),)) for name in names}
    values = {f"figure_{i}": 0.12345 * i for i in range(6)}
    moved = ("set-point", Outcome.MOVED, "r" * 150)
    records = [
        Record(1.79e9 + i, names[i % pods], *moved, {"max_batch_size": (4.0, float(i))}, {}, values, values)
        for i in range(30)
    ]
    state = TunerState(1.79e9, {name: full(50) for name in names})
    history, outcomes = remembered((), records), {r.pod: r for r in records}
    found = resumable(published(resource(), views, set(names), outcomes, state, history, {}, "", ()), state, None).status
    assert len(found["history"]) == 20
    assert len(found["pods"]) == min(pods, 50)
    assert len(json.dumps(plan(resource(), Observed(NOW, tuning=report(status=found)), Defaults("i", "t")).status)) < 32 * 1024
    assert TunerState.from_json(found["state"]).next_tick == 1.79e9
    assert found["state"]["pods"]


def test_a_state_survives_a_place_that_cannot_hold_nulls() -> None:
    plain, busy = PodState("i", 5.0), PodState("i", 5.0, ceiling=9, pending=Pending(1.0, {"a": 1.0}, {"a": 2.0}, 3.0))
    state = TunerState(None, {"a": plain, "b": busy})
    found = resumable(published(resource(), {}, set(), {}, state, (), {}, "", ()), state, None).status["state"]
    assert "null" not in json.dumps(found)
    assert TunerState.from_json(json.loads(json.dumps(found))) == state


def poll(at: float, **counters: Any) -> Poll:
    server = FakeServer()
    server.counters = {"instance": "one", **counters}
    return Poll(at, server.window())


def published_of(*polls: Poll, ready: bool = True, silent: bool = False) -> TuningReport:
    ends = {"a": "gone"} if silent else {}
    record = Record(0.0, "a", "gate", Outcome.STALE_METRICS, "x")
    views = {"a": PodView("a", "c", None, polls)}
    return published(resource(), views, {"a"} if ready else set(), {"a": record}, TunerState(), (), ends, "", ())


def test_what_a_silent_pod_said_long_ago_is_not_said_again() -> None:
    refusing = {"refused": {"queue_full": {"slots": 5}}}
    spoke = [poll(0.0), poll(5.0, **refusing)]
    assert published_of(*spoke).refusing
    assert "knobs" in published_of(*spoke, Poll(10.0, None)).status
    silent = published_of(*spoke, *(Poll(10.0 + 5 * i, None) for i in range(12)), silent=True)
    assert not silent.refusing
    assert "knobs" not in silent.status
    assert silent.status["pods"] == []


def test_a_pod_that_is_not_ready_is_shown_and_not_counted() -> None:
    found = published_of(poll(0.0), ready=False, silent=True)
    assert (found.ready, found.answering, found.silent, found.outcome) == (0, 0, {}, None)
    assert [p["name"] for p in found.status["pods"]] == ["a"]


def advice(*batches: int) -> list[Record]:
    return [
        Record(30.0 * i, "a", "set-point", Outcome.ADVISED, f"{i} rows/s", {"max_batch_size": (4.0, float(b))})
        for i, b in enumerate(batches)
    ]


def test_the_same_advice_is_remembered_once() -> None:
    history = remembered((), advice(8, 8, 8, 9, 9))
    assert [h["changes"]["max_batch_size"] for h in history] == [[4, 9], [4, 8]]
    moves = [Record(1.0, "a", "set-point", Outcome.MOVED, "x", {"max_batch_size": (4.0, 8.0)})] * 2
    assert len(remembered((), moves)) == 2


def test_without_objectives_the_tuner_only_advises() -> None:
    assert tuner_spec(resource(slo=None).spec, 30, 5).mode == "Advise"
    assert tuner_spec(resource().spec, 30, 5).mode == "Auto"
    assert tuner_spec(resource(slo=None, tuning={"mode": "Disabled"}).spec, 30, 5).mode == "Disabled"
