"""After SIGTERM and before the drain: everything is served, and every answer is its connection's last."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import requests
from serving import Server, wait_for


def test_clients_that_keep_connections_are_led_away_without_a_refusal(start):
    own: Server = start("--null-model", "--leave-seconds", "300").wait_until_serving()
    statuses: list[int] = []
    led_away = threading.Event()

    def steady() -> None:
        """One connection, kept as long as the server keeps it; then it would go to another pod."""
        with requests.Session() as session:
            while not led_away.is_set():
                answer = session.post(own.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
                statuses.append(answer.status_code)
                if answer.headers.get("Connection") == "close":
                    return

    clients = [threading.Thread(target=steady) for _ in range(4)]
    for client in clients:
        client.start()
    wait_for(lambda: len(statuses) > 20)
    own.process.send_signal(signal.SIGTERM)
    wait_for(lambda: requests.get(own.url + "/ready").status_code == 503)
    for client in clients:
        client.join(30)
        assert not client.is_alive(), "its connection was closed with an answer"
    assert set(statuses) == {200}
    stream = own.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True})
    assert stream.status_code == 200, "whoever has not heard yet is served"
    assert stream.headers["Connection"] == "close"
    led_away.set()


def test_after_it_the_drain_begins_and_the_end_is_a_good_one(start):
    own: Server = start("--null-model", "--leave-seconds", "1").wait_until_serving()
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(60) == 0
    assert own.output().index("leaving: requests are taken for another 1 s") < own.output().index("draining: ")


def test_while_somebody_has_not_heard_it_goes_on_taking_requests_for_half_of_the_time_to_drain(start):
    """A node's proxy that is behind: a new connection for each request, long after the time to leave."""
    own: Server = start("--null-model", "--leave-seconds", "1", "--drain-timeout", "12").wait_until_serving()
    own.process.send_signal(signal.SIGTERM)
    began, served = time.monotonic(), 0
    with contextlib.suppress(requests.ConnectionError):  # with nothing left to serve it ends at once
        while own.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200:
            served += 1
            time.sleep(0.1)
    assert served > 20 and 6 < time.monotonic() - began < 15, "a while longer, and not for ever"
    assert own.process.wait(30) == 0


def test_a_second_signal_does_not_wait_for_anybody(start):
    own: Server = start("--null-model", "--leave-seconds", "300").wait_until_serving()
    own.process.send_signal(signal.SIGTERM)
    wait_for(lambda: requests.get(own.url + "/ready").status_code == 503)
    assert own.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    own.process.send_signal(signal.SIGTERM)
    own.process.wait(30)
