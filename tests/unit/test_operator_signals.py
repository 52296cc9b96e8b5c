"""What the operator tells of itself: metrics by a closed catalogue, one JSON object a log line, Events on news alone."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from weir_operator.api.conditions import CATALOGUE
from weir_operator.io import logs, metrics
from weir_operator.io.apply import NotLeader
from weir_operator.io.kube import APPLY, MERGE, ApiError, Unreachable, path
from weir_operator.loops import tuner
from weir_operator.loops.events import BURST, MOST_WAITING, REFILL_SECONDS, REPEAT_SECONDS, Recorder
from weir_operator.loops.steering import Pod
from weir_operator.loops.store import Store
from weir_operator.loops.tuner import _show_reading
from weir_operator.plan.news import BAD, GOOD, news
from weir_operator.tuner.types import Poll

# ------------------------------------------------------------------------------------------------ metrics


def test_every_family_of_ours_is_in_the_catalogue_and_nothing_else_is() -> None:
    exposed = {f.name + ("_total" if f.type == "counter" else "")
               for f in text_string_to_metric_families(generate_latest().decode()) if f.name.startswith("weir_")}
    assert exposed == {name for name, *_ in metrics.catalogue()}


def test_the_catalogue_names_units_and_says_what_each_family_means() -> None:
    for name, kind, _labels, text in metrics.catalogue():
        assert text.endswith("."), name
        assert (kind == "counter") == name.endswith("_total")
        assert name.startswith(("weir_operator_", "weir_tuner_", "weir_resource_"))


@pytest.mark.parametrize(("method", "target", "content", "verb"), [
    ("GET", path("Pod", None), "", "list"),
    ("GET", path("Pod", "ns"), "", "list"),
    ("GET", path("Pod", "ns", "p"), "", "get"),
    ("GET", path("Deployment", None), "", "list"),
    ("GET", path("Deployment", "ns"), "", "list"),
    ("GET", path("Lease", "ns", "weir-operator"), "", "get"),
    ("PATCH", path("Deployment", "ns", "d"), APPLY, "apply"),
    ("PATCH", path("InferenceDeployment", "ns", "d", "status"), MERGE, "patch"),
    ("POST", path("Event", "ns"), "", "create"),
    ("PUT", path("Lease", "ns", "weir-operator"), "", "update"),
])
def test_a_request_is_counted_under_its_verb(method: str, target: str, content: str, verb: str) -> None:
    assert metrics.verb(method, target, content) == verb


def test_conditions_are_exported_while_their_resource_is_known_and_unknown_is_absent() -> None:
    def said(kind: str) -> float | None:
        return REGISTRY.get_sample_value("weir_resource_condition", {"namespace": "ns", "name": "chat", "condition": kind})

    status = {"conditions": [
        {"type": "Ready", "status": "True"}, {"type": "Degraded", "status": "False"}, {"type": "SLOMet", "status": "Unknown"},
    ]}
    before = metrics.KNOWN.resources
    try:
        metrics.KNOWN.resources = lambda: [{"metadata": {"namespace": "ns", "name": "chat"}, "status": status}]
        assert (said("Ready"), said("Degraded"), said("SLOMet"), said("Progressing")) == (1.0, 0.0, None, None)
        assert REGISTRY.get_sample_value("weir_operator_resources") == 1
        metrics.KNOWN.resources = tuple
        assert said("Ready") is None
    finally:
        metrics.KNOWN.resources = before


def test_exported_conditions_are_in_the_catalogue_of_conditions() -> None:
    assert set(metrics.CONDITIONS) <= set(CATALOGUE)


def test_the_last_reading_is_the_oldest_of_the_ready_pods_and_goes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def pod(*polls: tuple[float, bool]) -> Pod:
        return Pod(polls=deque(Poll(at, FakeServer("h", 1, "t").window() if good else None) for at, good in polls))

    def said() -> float | None:
        return REGISTRY.get_sample_value("weir_tuner_last_reading_timestamp_seconds", {"namespace": "ns", "name": "chat"})

    monkeypatch.setattr(tuner.time, "time", lambda: 5000.0)  # the polls' clock has another beginning, and never jumps
    _show_reading("ns/chat", [pod((10, True), (20, True)), pod((10, True), (20, False))], 20)
    assert said() == 4990
    _show_reading("ns/chat", [pod((30, False), (40, False))], 40)  # never read: since the first attempt
    assert said() == 4990
    monkeypatch.setattr(tuner.time, "time", lambda: 1405.0)  # an hour back
    _show_reading("ns/chat", [pod((10, True), (45, True))], 50)
    assert said() == 1400
    _show_reading("ns/chat", [], 50)
    assert said() is None
    _show_reading("ns/chat", [], 50)


def test_a_watchs_news_are_dated() -> None:
    store, began = Store(), time.time()
    store.told("Pod", {"metadata": {"namespace": "ns", "name": "p", "uid": "u", "resourceVersion": "1"}}, False)
    before = metrics.KNOWN.heard
    try:
        metrics.KNOWN.heard = lambda: store.heard
        at = REGISTRY.get_sample_value("weir_operator_watch_event_timestamp_seconds", {"kind": "Pod"})
        assert at is not None and at >= began
    finally:
        metrics.KNOWN.heard = before


# ------------------------------------------------------------------------------------------------ log lines


def line(write: Any) -> dict[str, Any]:
    """The one line that `write(logger)` leaves."""
    out, logger = io.StringIO(), logging.getLogger("weir.test")
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonLines())
    logger.addHandler(handler)
    try:
        write(logger)
    finally:
        logger.removeHandler(handler)
    assert out.getvalue().count("\n") == 1
    return json.loads(out.getvalue())


def test_a_line_has_its_four_keys_and_of_the_others_those_that_apply() -> None:
    said = {"event": "decision", "resource": "ns/chat", "changes": {"max_batch_size": (4, 8)}, "unheard_of": 1}
    found = line(lambda log: log.warning("over\ntwo lines: %s", "ü", extra=said))
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning", "logger": "weir.test", "message": "over\ntwo lines: ü",
        "event": "decision", "resource": "ns/chat", "changes": {"max_batch_size": [4, 8]},
    }


def test_a_traceback_is_one_value_of_its_line() -> None:
    def fail(log: logging.Logger) -> None:
        try:
            raise ValueError("no")
        except ValueError:
            log.exception("failed", extra={"changes": {"a": object()}})

    assert line(fail)["error"].endswith("ValueError: no")


def test_the_catalogue_of_log_events_is_what_the_code_says_and_each_line_keeps_to_the_keys() -> None:
    found = set()
    for file in Path(logs.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Dict) or file == Path(logs.__file__):
                continue
            said = {k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
            if "event" in said:
                found.add(ast.literal_eval(said["event"]))
                assert said.keys() <= logs.KEYS.keys(), f"{file}:{node.lineno}"
    assert found == {word for word, _ in logs.EVENTS}


@pytest.mark.parametrize("style", ["json", "text"])
def test_an_operator_that_cannot_begin_says_why_in_its_last_line(style: str, tmp_path: Path) -> None:
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "weir_operator", "run", f"--log-format={style}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    said = done.stderr.splitlines()  # before its own line the client may warn of the kubeconfig
    assert done.returncode == 2 and "no cluster" in said[-1] and "Traceback" not in done.stderr
    if style == "json":
        assert [json.loads(line) for line in said][-1]["event"] == "ended"


# ------------------------------------------------------------------------------------------------ which changes are news


def conditions(**reasons: str) -> list[dict[str, str]]:
    return [{"type": kind, "reason": reason, "message": f"{reason}."} for kind, reason in reasons.items()]


@pytest.mark.parametrize(("before", "after", "told"), [
    ({}, {"Ready": "Starting"}, []),
    ({"Ready": "Starting"}, {"Ready": "Serving"}, ["Serving"]),
    ({"Ready": "Serving"}, {"Ready": "Serving"}, []),
    ({"Ready": "Serving"}, {"Ready": "CrashLooping"}, ["CrashLooping!"]),
    ({"Ready": "CrashLooping"}, {"Ready": "OutOfMemory"}, ["OutOfMemory!"]),
    ({"MetricsAvailable": "Polled"}, {"MetricsAvailable": "NoPodAnswers"}, ["NoPodAnswers!"]),
    ({"MetricsAvailable": "NoPodAnswers"}, {"MetricsAvailable": "Polled"}, ["Polled"]),
    ({"MetricsAvailable": "NoPods"}, {"MetricsAvailable": "Polled"}, []),
    ({"Tuned": "Holding", "Saturated": "NotRefusing"}, {"Tuned": "Moving", "Saturated": "Refusing"}, []),
    ({"Tuned": "Moving"}, {"Tuned": "KnobDrift"}, ["KnobDrift!"]),
])
def test_news(before: dict[str, str], after: dict[str, str], told: list[str]) -> None:
    found = news(conditions(**before), conditions(**after))
    assert [n.reason + "!" * n.warning for n in found] == told


def test_another_message_is_news_where_it_says_what_to_mend_and_only_there() -> None:
    def both(reason: str, *messages: str) -> list[Any]:
        old, new = ([{"type": "Ready", "reason": reason, "message": m}] for m in messages)
        return news(old, new)

    assert [n.message for n in both("ApplyRefused", "a", "b")] == ["b"]
    assert both("ApplyRefused", "a", "a") == []
    assert both("CrashLooping", "exit 1, 3 times", "exit 1, 4 times") == []


def test_what_is_told_is_in_the_catalogue() -> None:
    for kind, reason in GOOD | BAD:
        assert reason in CATALOGUE[kind]


# ------------------------------------------------------------------------------------------------ how often


class Api:
    """Stands for the writer: remembers what it was told."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str, str, int]] = []
        self.fails: Exception | None = None

    async def event(self, raw: Any, reason: str, message: str, warning: bool, times: int) -> None:
        if fails := self.fails:
            self.fails = None
            raise fails
        self.written.append((raw["metadata"]["uid"], reason, message, times))


class Bench:
    def __init__(self) -> None:
        self.now, self.api = 0.0, Api()
        self.recorder = Recorder(self.api, lambda: self.now)  # type: ignore[arg-type]

    def tell(self, reason: str, message: str, uid: str = "u", warning: bool = False) -> None:
        self.recorder.tell({"metadata": {"uid": uid, "name": "chat", "namespace": "ns"}}, reason, message, warning)

    async def written(self) -> list[tuple[str, str, str, int]]:
        """What was written since the last call."""
        running = asyncio.create_task(self.recorder.run())
        async with asyncio.timeout(5):
            while not self.recorder._waiting.empty():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        found, self.api.written = self.api.written, []
        return found


async def test_a_message_that_was_just_written_is_held_and_counted_with_the_next() -> None:
    bench = Bench()
    for _ in range(4):
        bench.tell("KnobsMoved", "a")
    assert await bench.written() == [("u", "KnobsMoved", "a", 1)]
    bench.now += REPEAT_SECONDS
    bench.tell("KnobsMoved", "a")
    assert await bench.written() == [("u", "KnobsMoved", "a", 4)]


async def test_a_resource_that_flaps_for_hours_causes_less_than_one_event_a_minute() -> None:
    bench = Bench()
    for second in range(0, 3 * 3600, 5):
        bench.now = float(second)
        bench.tell("KnobsMoved", f"max_batch_size={second % 2 + 4}/{second}")
        bench.tell("CrashLooping", f"exit {second}", warning=True)
    found = await bench.written()
    assert len(found) == 2 * (BURST + int((3 * 3600 - 5) // REFILL_SECONDS)) < 180
    for reason in ("KnobsMoved", "CrashLooping"):  # what was held is in the counts
        assert 2000 < sum(times for _, why, _, times in found if why == reason) <= 2160


async def test_one_resource_does_not_use_up_the_room_of_another() -> None:
    bench = Bench()
    for i in range(3 * BURST):
        bench.tell("KnobsMoved", str(i))
    bench.tell("KnobsMoved", "other", uid="v")
    assert (await bench.written())[-1] == ("v", "KnobsMoved", "other", 1)


@pytest.mark.parametrize("why", [Unreachable("gone"), NotLeader("lost"), ApiError(403, "Forbidden", "no")])
async def test_a_lost_event_ends_nothing_and_is_told_with_the_next(why: Exception) -> None:
    bench = Bench()
    bench.api.fails = why
    lost = metrics.EVENTS.labels("lost")._value.get()
    bench.tell("Serving", "a")
    bench.tell("CrashLooping", "b")
    assert await bench.written() == [("u", "CrashLooping", "b", 1)]
    assert metrics.EVENTS.labels("lost")._value.get() == lost + 1
    bench.tell("Serving", "a")
    assert await bench.written() == [("u", "Serving", "a", 2)], "it is news as it was, and counts for both"


async def test_what_finds_no_place_among_those_that_wait_is_told_with_the_next() -> None:
    """As where a node goes with the pods of hundreds of resources."""
    bench, uids = Bench(), [f"u{i}" for i in range(MOST_WAITING + 144)]
    for uid in uids:
        bench.tell("ProbeFailing", "no longer answers", uid, warning=True)
    first = await bench.written()
    for uid in uids:
        bench.tell("ProbeFailing", "no longer answers", uid, warning=True)
    second = await bench.written()
    assert [uid for uid, *_ in first] == uids[:MOST_WAITING]
    assert second == [(uid, "ProbeFailing", "no longer answers", 2) for uid in uids[MOST_WAITING:]]
    for i in range(BURST - 1):  # and it has used no room
        bench.tell("ProbeFailing", str(i), uids[-1], warning=True)
    assert len(await bench.written()) == BURST - 1
