"""The tuner loop over real sockets, against a control port with the server's own knob rules.

The law itself is tested elsewhere: here its decisions are given, and what is asked of the pods is what counts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from fake_server import BOOT, FakeServer, until
from prometheus_client import REGISTRY

from weir_operator.io import scrape
from weir_operator.io.scrape import ControlClient, Endpoint, Silent, url_for
from weir_operator.loops import tuner as module
from weir_operator.loops.steering import VERIFIED_SECONDS, Steering, Subject
from weir_operator.loops.tuner import Round, TunerLoop, TunerSettings
from weir_operator.plan.observed import TuningReport
from weir_operator.plan.plan import parse
from weir_operator.tuner.types import Decision, Move, Outcome, Record, TunerState
from weir_server.contract import Histogram

EPOCH = 7 * 2**16


SLO = {"ttft": "1s", "tpot": "50ms"}


def resource(slo: Any = SLO, **tuning: Any) -> Any:
    return parse({
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat", "uid": "u"},
        "spec": {"model": {"source": "file:///m.gguf"}, "slo": slo, "tuning": tuning},
    })


class News:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.reports: list[TuningReport] = []
        self.rounds: list[Round] = []

    def publish(self, subject: Subject, news: TuningReport) -> None:
        self.reports.append(news)

    def polled(self, subject: Subject, round_: Round) -> None:
        self.rounds.append(round_)

    def forgotten(self, key: str) -> None:
        pass


class Law:
    """Stands where `decide` stands: gives the moves that the test queued, and a record for each pod."""

    def __init__(self) -> None:
        self.moves: list[dict[str, float]] = []

    def __call__(self, state: TunerState, pods: Any, spec: Any, now: float) -> Decision:
        knobs = self.moves.pop(0) if self.moves else None
        if knobs is None:
            return Decision(state, (), tuple(Record(now, p, "set-point", Outcome.HOLDING, "nothing better") for p in pods))
        moves = tuple(Move(p, knobs, "set-point", "better") for p in pods)
        changes = {k: (0.0, v) for k, v in knobs.items()}
        records = tuple(Record(now, p, "set-point", Outcome.MOVED, "better", changes) for p in pods)
        return Decision(state, moves, records)


class Bench:
    """A loop with a clock that the test moves."""

    def __init__(self, client: ControlClient, endpoints: list[Endpoint], law: Law) -> None:
        self.client, self.endpoints, self.law = client, endpoints, law
        self.resource, self.saved = resource(), {}
        self.now, self.epoch, self.news = 1000.0, EPOCH, News()
        self.fresh()

    def fresh(self) -> None:
        """As another operator process."""
        self.loop = TunerLoop(
            self.client, lambda: [Subject("ns/chat", self.resource, tuple(self.endpoints), self.saved)], lambda: self.epoch,
            self.news, TunerSettings(tick=30, poll=5, lease=180), clock=lambda: self.now,
        )

    async def poll(self, seconds: float = 5.0) -> None:
        self.now += seconds
        await self.loop.once()


@pytest.fixture
async def server() -> Any:
    async with FakeServer() as s:
        yield s


@pytest.fixture
async def bench(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    law = Law()
    monkeypatch.setattr(module, "decide", law)
    async with ControlClient() as client:
        yield Bench(client, [server.endpoint()], law)


async def test_a_move_takes_the_next_seq_and_reads_back(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    await bench.poll()
    assert server.board.target.max_batch_size == 9
    assert (server.board.fence.epoch, server.board.fence.seq) == (EPOCH, 1)
    assert type(server.puts[0]["knobs"]["max_batch_size"]) is int
    assert server.puts[0]["slo"] == {"ttft": 1.0, "tpot": 0.05}
    assert bench.news.reports[-1].drift == ""
    assert len(server.puts) == 1


async def test_a_lease_is_renewed_word_for_word_after_a_third_of_it(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    for _ in range(14):
        await bench.poll(10.0)
    assert server.puts[0] == server.puts[1] == server.puts[2]
    assert len(server.puts) == 3  # 130 s of 180
    await bench.poll()
    bench.law.moves = [{"max_queue_depth": 5.0}]
    await bench.poll()
    assert server.puts[-1]["seq"] == 2
    assert (server.board.target.max_batch_size, server.board.target.max_queue_depth) == (9, 5)


@pytest.mark.parametrize("mode", ["Advise", "Disabled"])
async def test_advise_and_disabled_put_the_declared_values_in_force(server: FakeServer, bench: Bench, mode: str) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    assert server.board.target.max_batch_size == 9
    bench.resource = resource(mode=mode, knobs={"maxBatchSize": {"initial": 6}})
    await bench.poll()
    assert server.board.target.max_batch_size == 6
    assert server.puts[-1]["lease_seconds"] == 0
    count = len(server.puts)
    for _ in range(30):
        await bench.poll()
    assert len(server.puts) == count  # once is enough


async def test_paused_holds_the_lease_and_the_values(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    bench.resource = resource(paused=True)
    await bench.poll(70.0)
    await bench.poll(70.0)
    assert server.board.target.max_batch_size == 9
    assert len(server.puts) == 3
    assert bench.news.reports[-1].status["mode"] == "Paused"


async def test_a_knob_that_reads_back_otherwise_is_drift_and_then_the_truth(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    server.board.target = server.board.target.merged({"max_batch_size": 5})
    await bench.poll(40.0)
    assert "max_batch_size was set to 9 and reads 5" in bench.news.reports[-1].drift
    await bench.poll(70.0)
    assert server.board.target.max_batch_size == 5  # not fought: the next decision starts from what is


async def test_a_report_has_what_the_next_operator_goes_on_from(bench: Bench) -> None:
    bench.saved = {"state": TunerState(1030.5).to_json()}
    await bench.poll()
    [news] = bench.news.reports
    assert Steering.resumed(news.status).state == TunerState(1030.5)


async def test_an_operator_that_restarts_goes_on_from_what_it_reads(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    await bench.poll(40.0)
    bench.saved, bench.epoch = json.loads(json.dumps(dict(bench.news.reports[-1].status))), EPOCH + 1
    bench.fresh()
    await bench.poll()
    assert server.board.target.max_batch_size == 9
    assert (server.board.fence.epoch, server.board.fence.seq) == (EPOCH + 1, 1)
    await bench.poll(40.0)
    assert any(h["outcome"] == "Moved" for h in bench.news.reports[-1].status["history"])


class Died(BaseException):
    """The operator's process is gone: nothing may catch it."""


@pytest.mark.parametrize("moment", ["before-it-is-sent", "before-the-answer", "before-the-report"])
async def test_an_operator_that_dies_in_the_midst_of_a_move_is_followed(
    server: FakeServer, bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str,
) -> None:
    """Whatever the pod got of it, the next one goes on from there: no drift, one writer, a lease on what is in force."""
    await bench.poll()
    before = server.board.target.max_batch_size
    ask, publish, died = bench.client.put_knobs, bench.news.publish, []

    async def dying(endpoint: Endpoint, request: Any) -> Any:
        if moment == "before-the-answer":
            await ask(endpoint, request)
        died.append(request)
        raise Died

    def gone(subject: Subject, news: TuningReport) -> None:
        died.append(news)
        raise Died

    if moment == "before-the-report":
        monkeypatch.setattr(bench.news, "publish", gone)
    else:
        monkeypatch.setattr(bench.client, "put_knobs", dying)
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll(40.0)
    assert died
    arrived = moment != "before-it-is-sent"
    assert server.board.target.max_batch_size == (9 if arrived else before)
    monkeypatch.setattr(bench.client, "put_knobs", ask)
    monkeypatch.setattr(bench.news, "publish", publish)

    bench.saved, bench.epoch = json.loads(json.dumps(dict(bench.news.reports[-1].status))), EPOCH + 1
    bench.fresh()
    await bench.poll()
    await bench.poll(40.0)
    assert server.board.target.max_batch_size == (9 if arrived else before)
    assert (server.board.fence.epoch, server.board.fence.seq) == (EPOCH + 1, 1)
    assert bench.news.reports[-1].drift == ""
    bench.law.moves = [{"max_batch_size": 7.0}]
    await bench.poll()
    assert server.board.target.max_batch_size == 7


async def test_readings_of_a_pod_hold_in_common_what_did_not_change(server: FakeServer, bench: Bench) -> None:
    """There are 66 of every pod: 2 GB for a thousand pods if each stood alone."""
    await bench.poll()
    server.counters = {"queued": 3, "histograms": {**server.window().histograms, "ttft": Histogram(5, array("q", [3]), 1.0)}}
    await bench.poll()
    old, new = (p.window for p in bench.news.rounds[-1].pods["chat-0"].polls)
    assert new.monotonic > old.monotonic and (old.queued, new.queued) == (0, 3), "each says what it read"
    assert (old.histograms["ttft"].count, new.histograms["ttft"].count) == (0, 3)
    for name in ("step", "products", "target", "envelope", "refused", "settled", "instance"):
        assert getattr(new, name) is getattr(old, name), name
    assert new.histograms["tpot"] is old.histograms["tpot"]


async def test_a_saved_state_of_another_version_is_dropped(bench: Bench) -> None:
    bench.saved = {"state": {"next_tick": None, "pods": {"chat-0": {"odd": 1}}}, "history": []}
    await bench.poll()
    assert bench.news.rounds[0].before == TunerState()


async def test_an_old_leader_that_wakes_up_is_refused(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    bench.epoch, old = EPOCH + 5, bench.epoch
    bench.fresh()
    await bench.poll()
    bench.epoch, bench.law.moves = old, [{"max_batch_size": 2.0}]
    bench.fresh()
    await bench.poll()
    assert server.board.target.max_batch_size == 9
    assert bench.news.rounds[-1].failed["chat-0"].startswith("409")


async def test_without_leadership_nothing_is_asked(server: FakeServer, bench: Bench) -> None:
    bench.epoch = None
    await bench.poll()
    assert server.seen == []


async def test_leadership_lost_between_poll_and_move_moves_nothing(server: FakeServer, bench: Bench) -> None:
    async def lose(request: web.Request) -> None:
        bench.epoch = None

    server.behave, bench.law.moves = lose, [{"max_batch_size": 9.0}]
    await bench.poll()
    assert server.puts == []
    assert "no longer leads" in bench.news.rounds[-1].failed["chat-0"]


async def test_another_process_behind_the_address_starts_afresh(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    server.restart()
    await bench.poll()
    assert server.board.target == BOOT
    assert server.puts[-1]["instance"] == server.board.instance


async def test_a_declared_value_outside_the_envelope_does_not_stop_the_rest(server: FakeServer, bench: Bench) -> None:
    bench.resource = resource(knobs={"maxBatchSize": {"initial": 500}})
    bench.law.moves = [{"max_queue_depth": 7.0}]
    await bench.poll()
    assert server.board.target.max_queue_depth == 7
    assert server.board.fallback.max_batch_size == 64


async def test_values_that_met_the_objectives_for_long_become_the_fallback(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    await bench.poll()
    for i in range(int(VERIFIED_SECONDS / 50) + 2):
        server.counters = {"slo_total": 100 * (i + 1), "slo_good": {"ttft": 0, "tpot": 0, "both": 99 * (i + 1)}}
        assert server.board.fallback.max_batch_size == 4
        if i * 50 >= VERIFIED_SECONDS - 50:
            break
        await bench.poll(50.0)
    await bench.poll(60.0)
    await bench.poll(5.0)
    assert server.board.fallback.max_batch_size == 9


async def test_a_few_requests_verify_nothing(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    await bench.poll()
    server.counters = {"slo_total": 9, "slo_good": {"ttft": 9, "tpot": 9, "both": 9}}
    for _ in range(3):
        await bench.poll(VERIFIED_SECONDS)
    assert server.board.fallback.max_batch_size == 4


async def test_a_learned_fallback_outlives_the_operator_and_declared_ones_are_not_learned(
    server: FakeServer, bench: Bench,
) -> None:
    bench.resource = resource(knobs={"maxBatchSize": {"initial": 6}})
    await bench.poll()
    assert server.board.fallback.max_batch_size == 6
    server.board.fallback = server.board.fallback.merged({"max_queue_depth": 9})  # as if learned
    bench.fresh()
    bench.epoch += 1
    await bench.poll()
    assert (server.board.fallback.max_batch_size, server.board.fallback.max_queue_depth) == (6, 9)
    bench.resource = resource(knobs={"maxBatchSize": {"initial": 7}})
    await bench.poll()
    assert (server.board.fallback.max_batch_size, server.board.fallback.max_queue_depth) == (7, 9)


async def test_in_auto_the_fallback_keeps_to_the_users_bounds(server: FakeServer, bench: Bench) -> None:
    bench.resource = resource(knobs={"maxBatchSize": {"max": 2}})
    await bench.poll()
    assert server.board.fallback.max_batch_size == 2


async def test_without_objectives_the_lease_is_given_back(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    bench.resource = resource(slo=None)
    await bench.poll()
    assert server.puts[-1]["lease_seconds"] == 0
    assert server.board.target.max_batch_size == 4
    assert bench.news.rounds[-1].spec.mode == "Advise"


async def test_a_pod_that_is_not_ready_is_remembered_renewed_and_not_moved(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    ready, polls = bench.endpoints, len(bench.news.rounds[-1].pods["chat-0"].polls)
    bench.endpoints = [replace(e, ready=False) for e in ready]
    bench.law.moves = [{"max_batch_size": 8.0}]
    await bench.poll(70.0)
    assert server.board.target.max_batch_size == 9
    assert bench.news.rounds[-1].failed == {"chat-0": "the pod is not ready"}
    assert server.puts[-1] == server.puts[0]  # the lease was renewed
    assert len(bench.news.rounds[-1].pods["chat-0"].polls) == polls + 1
    assert bench.news.reports[-1].ready == 0


async def test_a_move_that_a_pod_refused_is_nowhere_called_a_move(server: FakeServer, bench: Bench) -> None:
    def count(result: str) -> float:
        return REGISTRY.get_sample_value("weir_tuner_moves_total", {"knob": "max_batch_size", "result": result}) or 0.0

    refused, set_ = count("refused"), count("set")
    bench.law.moves = [{"max_batch_size": 500.0}]
    await bench.poll()
    [entry] = bench.news.reports[-1].status["history"]
    assert entry["outcome"] == "NotSet"
    assert "422" in entry["reason"]
    assert (count("refused") - refused, count("set") - set_) == (1, 0)
    assert bench.news.reports[-1].outcome is Outcome.NOT_SET


async def test_drift_is_not_said_of_another_mode_or_process(server: FakeServer, bench: Bench) -> None:
    bench.law.moves = [{"max_batch_size": 9.0}]
    await bench.poll()
    server.board.target = server.board.target.merged({"max_batch_size": 5})
    bench.resource = resource(mode="Advise")
    await bench.poll(40.0)
    assert bench.news.reports[-1].drift
    await bench.poll(40.0)
    assert not bench.news.reports[-1].drift


def gauges() -> set[str]:
    return {s.labels["pod"] for m in REGISTRY.collect() if m.name == "weir_tuner_knob" for s in m.samples}


@pytest.mark.parametrize("end", ["the lead", "the resource", "the pod", "its voice"])
async def test_gauges_go_with_what_they_were_of(server: FakeServer, bench: Bench, end: str) -> None:
    async def silence(request: web.Request) -> Any:
        return web.Response(status=500)

    bench.endpoints = [server.endpoint(f"pod-{end}")]
    await bench.poll()
    assert f"pod-{end}" in gauges()
    if end == "the lead":
        bench.epoch = None
    elif end == "the resource":
        bench.loop._subjects = list
    elif end == "the pod":
        bench.endpoints = []
    else:
        server.behave = silence
    await bench.poll()
    assert f"pod-{end}" not in gauges()


async def test_leading_anew_or_a_resource_made_anew_starts_from_the_status(bench: Bench) -> None:
    async def polls() -> int:
        await bench.poll()
        return len(bench.news.rounds[-1].pods["chat-0"].polls)

    assert [await polls(), await polls()] == [1, 2]
    bench.epoch += 1  # another may have led in between, unseen by any poll
    assert await polls() == 1
    bench.resource = bench.resource.model_copy(update={"metadata": bench.resource.metadata.model_copy(update={"uid": "v"})})
    assert await polls() == 1


async def test_many_pods_that_hang_do_not_silence_one_that_answers(
    server: FakeServer, bench: Bench, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape, "CONCURRENT", 2)
    monkeypatch.setattr(scrape, "TIMEOUT_SECONDS", 0.5)

    async def hang(request: web.Request) -> None:
        await asyncio.sleep(60)

    async with FakeServer() as black, ControlClient() as client:
        black.behave = hang
        hanging = [client.state(black.endpoint(f"x-{i}")) for i in range(6)]
        *silent, answer = await asyncio.gather(*hanging, client.state(server.endpoint()), return_exceptions=True)
    assert all(isinstance(e, Silent) for e in silent)
    assert answer.instance == server.board.instance


async def test_hundreds_of_pods_that_hang_hold_nobody_elses_poll_back(
    server: FakeServer, bench: Bench, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a network policy that drops what is sent, or on a node that is gone. Each has an address of its own."""
    monkeypatch.setattr(scrape, "TIMEOUT_SECONDS", 60.0)
    held, asked = asyncio.Event(), set[str]()
    names = {f"127.9.{i // 250}.{1 + i % 250}" for i in range(300)}

    async def hang(request: web.Request) -> None:
        asked.add(request.host.split(":")[0])
        await held.wait()

    async with FakeServer("0.0.0.0") as black, ControlClient() as client:
        black.behave = hang
        hanging = tuple(Endpoint(name, url_for(name, black.port), black.token) for name in sorted(names))
        subjects = [Subject("ns/black", bench.resource, hanging), Subject("ns/chat", bench.resource, (server.endpoint(),))]
        bench.client = client
        bench.fresh()
        bench.loop._subjects = lambda: subjects
        polling = asyncio.create_task(bench.loop.once())
        await until(lambda: bench.news.rounds)
        await until(lambda: asked == names)
        [first] = bench.news.rounds
        assert first.pods.keys() == {"chat-0"} and first.pods["chat-0"].polls[-1].window
        held.set()
        await polling
    assert bench.news.rounds[-1].pods.keys() == names


async def _status(status: int) -> web.Response:
    return web.json_response({"error": "x"}, status=status)


def _only_windows(answer: Callable[[], Any]) -> Any:
    async def behave(request: web.Request) -> Any:
        return await answer() if request.path == "/control/window" else None

    return behave


async def _empty() -> web.Response:
    return web.json_response({})


async def _redirect() -> web.Response:
    raise web.HTTPFound("http://169.254.169.254/")


async def _huge() -> web.Response:
    return web.Response(body=b"[" + b" " * 1_000_000 + b"]", content_type="application/json")


async def _words() -> web.Response:
    return web.Response(text="ok")


@pytest.mark.parametrize("answer", [lambda: _status(500), _empty, _redirect, _huge, _words], ids=lambda f: f.__name__)
async def test_no_usable_window_is_silence_and_never_zero(server: FakeServer, bench: Bench, answer: Any) -> None:
    server.behave = _only_windows(answer)
    await bench.poll()
    view = bench.news.rounds[-1].pods["chat-0"]
    assert view.polls[-1].window is None
    assert bench.news.reports[-1].answering == 0
    assert bench.news.reports[-1].silent["chat-0"]
    assert bench.news.reports[-1].good_percent is None


async def test_a_pod_that_hangs_does_not_hold_up_another(server: FakeServer, bench: Bench) -> None:
    async def hang(request: web.Request) -> None:
        await asyncio.sleep(60)

    async with FakeServer() as other:
        other.behave = hang
        bench.endpoints.append(other.endpoint("chat-1"))
        async with asyncio.timeout(10):
            await bench.poll()
    pods = bench.news.rounds[-1].pods
    assert pods["chat-0"].polls[-1].window is not None
    assert pods["chat-1"].polls[-1].window is None
    assert bench.news.reports[-1].silent == {"chat-1": "no answer in 2 s"}


async def test_an_answer_without_end_is_not_read_to_its_end(server: FakeServer, bench: Bench) -> None:
    sent = 0

    async def endless(request: web.Request) -> Any:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while sent < 2**30:
            await answer.write(b" " * 65536)
            sent += 65536
        return answer

    server.behave = endless
    await bench.poll()
    assert bench.news.rounds[-1].pods["chat-0"].polls[-1].window is None
    assert 0 < sent < 2**27, "a small part of the gigabyte"


async def test_polls_of_many_deployments_are_spread_and_each_keeps_its_distance() -> None:
    from weir_operator.loops.tuner import _phase

    phases = [_phase(str(uuid.uuid4())) for _ in range(1000)]
    assert all(0 <= p <= 1 for p in phases) and _phase("a") == _phase("a")
    for low in range(10):
        assert 50 < sum(low / 10 <= p < (low + 1) / 10 for p in phases) < 150


def _of_another_contract(server: FakeServer) -> Any:
    async def behave(request: web.Request) -> Any:
        if request.path != "/control/state":
            return None
        return web.json_response({**server.state().to_wire(), "contract": {"major": 2, "minor": 0}})

    return behave


async def test_another_contract_is_left_alone(server: FakeServer, bench: Bench) -> None:
    server.behave, bench.law.moves = _of_another_contract(server), [{"max_batch_size": 9.0}]
    await bench.poll()
    assert server.puts == []
    assert bench.news.reports[-1].other_contract == ("chat-0",)


async def test_reports_come_on_change_and_not_too_often(server: FakeServer, bench: Bench) -> None:
    for _ in range(24):
        await bench.poll()
    assert len(bench.news.reports) == 1  # nothing changed in two minutes
    bench.law.moves = [{"max_batch_size": 9.0}, {"max_batch_size": 8.0}]
    for _ in range(7):
        await bench.poll()
    assert len(bench.news.reports) <= 3
    outcomes = [h["outcome"] for h in bench.news.reports[-1].status["history"]]
    assert outcomes.count("Moved") == 2


async def test_what_a_report_says_of_its_pods_is_worth_a_write_whatever_it_is(server: FakeServer, bench: Bench) -> None:
    """A pod that turns unready, or speaks another contract, changes nothing else that is said."""
    for _ in range(2):
        await bench.poll(40.0)
    assert [(r.ready, r.answering) for r in bench.news.reports] == [(1, 1)]
    bench.endpoints = [replace(e, ready=False) for e in bench.endpoints]
    await bench.poll(40.0)
    assert (bench.news.reports[-1].ready, bench.news.reports[-1].answering) == (0, 0)
    server.behave = _of_another_contract(server)
    server.restart()
    await bench.poll(40.0)
    assert bench.news.reports[-1].other_contract == ("chat-0",)
    for _ in range(3):
        await bench.poll(40.0)  # its knobs are old news by then
    written = len(bench.news.reports)
    for _ in range(5):
        await bench.poll(40.0)
    assert len(bench.news.reports) == written, "and nothing is written for what does not change"


async def test_history_is_bounded_and_does_not_repeat_itself(bench: Bench) -> None:
    for i in range(60):
        bench.law.moves = [{"max_batch_size": float(1 + i % 9)}]
        await bench.poll()
        await bench.poll()
    history = bench.news.reports[-1].status["history"]
    assert len(history) == 20
    for newer, older in itertools.pairwise(history):
        assert (newer["outcome"], older["outcome"]) != ("Holding", "Holding")


async def test_ipv6_addresses_are_bracketed() -> None:
    assert url_for("fd00::7", 8081) == "http://[fd00::7]:8081"
    async with FakeServer("::1") as server, ControlClient() as client:
        assert (await client.window(server.endpoint())).running == 0


async def test_proxies_of_the_environment_are_not_asked(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with ControlClient() as client:
        assert (await client.state(server.endpoint())).instance == server.board.instance


async def test_a_wrong_token_is_said_in_words(server: FakeServer) -> None:
    async with ControlClient() as client:
        with pytest.raises(Silent, match="401"):
            await client.state(Endpoint("chat-0", server.endpoint().url, "wrong"))
