"""The child's loop over a real socketpair, with the null model: what the parent sees."""

from __future__ import annotations

import socket
import threading
import time

import msgspec
import pytest

from weir_server.cli.child import run_over
from weir_server.contract import Knobs
from weir_server.engine import child
from weir_server.engine.core import Engine
from weir_server.exec.null import NullModel, NullRunner, null_token
from weir_server.link.channel import Channel, ChannelClosed, frame
from weir_server.link.errors import UserError
from weir_server.link.messages import (
    Boot,
    Cancel,
    Drain,
    Finished,
    Quit,
    Ready,
    Report,
    Sampling,
    SetKnobs,
    Submit,
    ToChild,
    Tokens,
    ToParent,
)

BOOT = Boot(model="null", threads=1, null_model=True, num_blocks=1000, context_per_slot=1024)
PATIENCE = 20.0


def test_an_engine_whose_parent_is_gone_loads_nothing(monkeypatch: pytest.MonkeyPatch):
    """It may die between our start and our asking to die with it."""
    loaded: list[Boot] = []
    monkeypatch.setattr(child, "run", lambda boot, channel: loaded.append(boot))
    ours, theirs = socket.socketpair()
    ours.sendall(frame(BOOT))
    with theirs:
        ours.close()
        assert run_over(Channel(theirs)) == 0
    assert not loaded


class Parent(Channel):
    """The child in a thread, and this end of its socket. Iterating waits for reports, at most PATIENCE each."""

    def __init__(self, boot: Boot = BOOT) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self._decoder = msgspec.msgpack.Decoder(ToParent)
        self.end: BaseException | None = None
        self.thread = threading.Thread(target=self._child, args=(boot, theirs), daemon=True)
        self.thread.start()
        self.inbox: list[object] = []
        ready = self.next()
        assert isinstance(ready, Ready)
        self.ready = ready

    def _child(self, boot: Boot, sock: socket.socket) -> None:
        try:
            child.run(boot, Channel(sock))
        except BaseException as e:
            self.end = e
        sock.close()

    def next(self) -> object:
        if not self.inbox:
            self.inbox += self.recv(PATIENCE)
            assert self.inbox, f"nothing came in {PATIENCE} s: {self.end}"
        return self.inbox.pop(0)

    def until(self, done: object) -> Report:
        """The first report for which `done(events so far, report)` holds."""
        events: list[object] = []
        while True:
            report = self.next()
            assert isinstance(report, Report)
            events += report.events
            if done(events, report):  # type: ignore[operator]
                return report

    def close(self) -> None:
        self._sock.close()


def submit(id: int, max_tokens: int = 5, prompt: int = 10) -> Submit:
    return Submit(id, [id * 50 + i for i in range(prompt)], Sampling(max_tokens=max_tokens, seed=id), time.monotonic())


def finished(n: int):  # type: ignore[no-untyped-def]
    return lambda events, _: sum(isinstance(e, Finished) for e in events) == n


@pytest.fixture
def parent():  # type: ignore[no-untyped-def]
    p = Parent()
    yield p
    p.close()
    p.thread.join(PATIENCE)
    assert not p.thread.is_alive(), "the child outlived its channel"


def test_ready_tells_the_envelope_the_plant_and_the_arithmetic(parent: Parent) -> None:
    ready = parent.ready
    assert ready.context_per_slot == ready.max_servable == 1024 and ready.usable_blocks == 1000
    assert ready.envelope.max_batch_size == (1, 64) and ready.boot.max_batch_size == 4
    assert ready.plant is not None and ready.plant.a >= 0 and len(ready.plant_steps) == 4
    assert any("pool: 1000 chunks" in line for line in ready.sizing)


def test_requests_stream_and_end(parent: Parent) -> None:
    said: list[int] = []

    def done(events: list[object], _: Report) -> bool:
        said[:] = [t for e in events if isinstance(e, Tokens) for t in e.ids]
        return any(isinstance(e, Finished) for e in events)

    parent.send(submit(1))
    report = parent.until(done)
    assert said == [null_token(1, 0, 10 + i) for i in range(5)]
    assert report.stats.running == 0 and report.stats.memory_used > 1 << 20


def test_cancelling_everything_reports_zero_gauges_without_another_request(parent: Parent) -> None:
    for id in range(1, 8):
        parent.send(submit(id, max_tokens=1000))
    parent.until(lambda events, report: report.stats.running == 4)
    for id in range(1, 8):
        parent.send(Cancel(id))
    report = parent.until(finished(7))
    assert (report.stats.running, report.stats.waiting, report.stats.kv_used_bytes) == (0, 0, 0)


def test_a_knob_moved_while_idle_is_reported(parent: Parent) -> None:
    target = Knobs(9, 200 * parent.ready.geometry.chunk_bytes + 5, 0.2, 7)
    parent.send(SetKnobs(target))
    report = parent.until(lambda events, report: report.effective.max_batch_size == 9)
    assert report.effective == target.merged({"kv_cache_budget": 200 * parent.ready.geometry.chunk_bytes})


def test_idle_is_silent(parent: Parent) -> None:
    """After a last reading of the memory the child waits for ever: no report comes for as long as we look."""
    parent.send(submit(1))
    parent.until(finished(1))
    end = time.monotonic() + 2.5
    late = []
    while time.monotonic() < end:
        late += parent.recv(max(0.0, end - time.monotonic()))
    assert len(late) <= 1


def test_a_drain_ends_at_its_deadline_though_nothing_more_is_said(parent: Parent) -> None:
    for id in range(1, 7):
        parent.send(submit(id, max_tokens=1000, prompt=20))
    parent.send(Drain(time.monotonic()))
    parent.until(finished(6))


def test_messages_out_of_place_and_quit(parent: Parent) -> None:
    parent.send(BOOT)
    parent.send(Cancel(12))
    parent.send(submit(1))
    parent.until(finished(1))
    parent.send(Quit())
    parent.thread.join(PATIENCE)
    assert not parent.thread.is_alive() and parent.end is None


def test_quit_in_one_breath_with_work_is_not_lost(parent: Parent) -> None:
    """The step that the request causes reads the channel again, and finds nothing more."""
    parent._sock.sendall(frame(submit(1, max_tokens=1000)) + frame(Quit()))
    parent.thread.join(PATIENCE)
    assert not parent.thread.is_alive() and parent.end is None


def test_a_closed_channel_ends_the_child_in_the_middle_of_its_work() -> None:
    parent = Parent()
    parent.send(submit(1, max_tokens=1000))
    parent.close()
    parent.thread.join(PATIENCE)
    assert not parent.thread.is_alive() and isinstance(parent.end, ChannelClosed)


def test_the_loop_never_waits_while_it_has_work() -> None:
    class Script:
        """Hands out two requests and then Quit once all is done; notes how long each call was ready to wait."""

        def __init__(self) -> None:
            self.waits: list[tuple[bool, float | None]] = []
            self.left: list[ToChild] = [submit(1), submit(2)]

        def recv(self, timeout: float | None) -> list[ToChild]:
            self.waits.append((engine.busy, timeout))
            messages, self.left = self.left, []
            return messages if engine.busy or messages else [Quit()]

        def send(self, message: ToParent) -> None:
            pass

    plan = child.plan_boot(BOOT, NullModel(16), 0)
    engine, script = Engine(NullRunner(NullModel(16).geometry(16)), plan.config, plan.knobs), Script()
    child.loop(engine, script)
    assert {timeout for busy, timeout in script.waits if busy} == {0}
    assert script.waits[0] == (False, 0.0) and not engine.busy


def test_a_budget_that_cannot_be_met_is_the_users_mistake() -> None:
    _, theirs = socket.socketpair()
    with pytest.raises(UserError, match="one full context of 1024 tokens"):
        child.run(msgspec.structs.replace(BOOT, kv_cache_budget="1000"), Channel(theirs))


def test_a_model_that_cannot_batch_is_clamped_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weir_server.exec.null.NullRunner.supports_batching", False)
    parent = Parent()
    assert parent.ready.boot.max_batch_size == 1 and parent.ready.envelope.max_batch_size == (1, 1)
    assert "does not support batched decode; clamping max_batch_size" in caplog.text
    parent.close()
    parent.thread.join(PATIENCE)
