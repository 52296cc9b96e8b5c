"""Clients that vanish, read slowly, or come all at once; and books that balance afterwards."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, Stream, wait_for

COMPLETION = "/v1/completions"
BUSY = b'{"error":{"message":"Server is busy. Retry later.","type":"overloaded"}}'


def open_stream(server: Server, **body: object) -> socket.socket:
    """A raw connection with a streaming request sent; nothing read yet."""
    host = urlsplit(server.url)
    sock = socket.create_connection((host.hostname, host.port))
    sock.settimeout(60)
    whole = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True, **body}
    content = json.dumps(whole).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


def books(server: Server) -> tuple[int, int]:
    window = server.window()
    return window["queued"], sum(window["finished"].values())


@pytest.mark.parametrize("events", [0, 1, 2, 5])
def test_a_client_that_goes_away_after_some_events_ends_its_row(server: Server, events: int):
    cancelled = server.window()["finished"]["cancelled"]
    with open_stream(server) as sock:
        seen = b""
        while seen.count(b"data: ") < events:
            seen += sock.recv(4096)
    wait_for(lambda: server.window()["finished"]["cancelled"] == cancelled + 1)
    wait_for(server.idle)


def test_a_client_of_a_whole_answer_that_goes_away_ends_its_row_too(server: Server):
    cancelled = server.window()["finished"]["cancelled"]
    with open_stream(server, stream=False):
        wait_for(lambda: not server.idle())
    wait_for(lambda: server.window()["finished"]["cancelled"] == cancelled + 1)


def test_all_clients_vanish_at_once(server: Server):
    """vllm-project/vllm#29928: gauges go to zero without any new request, and nobody is missing from the books."""
    before = server.window()
    sockets = [open_stream(server, prompt="word " * 600) for _ in range(7)]
    wait_for(lambda: server.window()["running"] == 4 and server.window()["waiting"] == 3)
    for sock in sockets:
        sock.close()
    wait_for(lambda: server.window()["finished"]["cancelled"] == before["finished"]["cancelled"] + 7)
    window = wait_for(lambda: (w := server.window())["running"] == w["waiting"] == w["kv_used_bytes"] == 0 and w)
    assert window["oldest_wait"] == 0 and window["bound"] is None
    queued, finished = books(server)
    assert queued == finished
    series = {s.name: s for f in text_string_to_metric_families(requests.get(server.url + "/metrics").text) for s in f.samples}
    assert series["vllm:kv_cache_usage_perc"].value == 0 and series["weir_requests_running"].value == 0


def test_a_slow_reader_gets_all_and_holds_up_nobody(server: Server):
    slow = open_stream(server, max_tokens=120)
    quick = Stream(server, max_tokens=40).join()
    assert quick.events[-1] == "[DONE]"
    seen = b""
    while b"[DONE]" not in seen:
        seen += slow.recv(97)
    slow.close()
    lines = [line.removeprefix("data: ") for line in seen.decode().splitlines() if line.startswith("data: {")]
    texts = [json.loads(line)["choices"][0] for line in lines]
    assert texts[-1]["finish_reason"] == "length"
    alone = Stream(server, max_tokens=120).join()
    assert "".join(t["text"] for t in texts) == "".join(json.loads(e)["choices"][0]["text"] for e in alone.events[:-1])


def test_above_the_queue_depth_everybody_is_refused_at_once_and_the_streams_go_on(server: Server):
    """The exact body, a Retry-After that is a positive whole number, and no wait for a forward pass."""
    assert server.put(knobs={"max_queue_depth": 2}).status_code == 200
    refused = server.window()["refused"]["queue_full"]
    running = [Stream(server, max_tokens=80) for _ in range(4)]
    wait_for(lambda: server.window()["running"] == 4)
    waiting = [Stream(server, max_tokens=4) for _ in range(2)]
    wait_for(lambda: server.window()["waiting"] == 2)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post(COMPLETION, {"prompt": "x", "max_tokens": 4}), range(60)))
    full = [a for a in answers if a.status_code == 503]
    assert len(full) >= 50, "the queue stayed full while its rows ran"
    assert {a.content for a in full} == {BUSY}
    assert all(1 <= int(a.headers["Retry-After"]) <= 600 for a in full)
    assert sum(server.window()["refused"]["queue_full"].values()) - sum(refused.values()) == len(full)
    for stream in running + waiting:
        assert stream.join().events[-1] == "[DONE]", stream.error


def test_an_idle_server_refuses_no_burst_that_it_has_slots_for(server: Server):
    assert server.put(knobs={"max_queue_depth": 1}).status_code == 200
    streams = [Stream(server, max_tokens=4) for _ in range(4)]
    assert {s.join().status for s in streams} == {200}


def test_a_request_is_taken_whole_or_refused_whole(server: Server):
    answer = server.post(COMPLETION, {"prompt": "x", "max_tokens": 2, "n": 6, "temperature": 1})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 6


def test_nothing_of_a_response_is_sent_before_it_runs(server: Server):
    """A queued stream has no status line yet: it can still be told 503."""
    assert server.put(knobs={"max_batch_size": 1}).status_code == 200
    first = Stream(server, max_tokens=60)
    wait_for(lambda: first.events)
    queued = Stream(server, max_tokens=2)
    wait_for(lambda: server.window()["waiting"] == 1)
    assert queued.status is None and first.events[-1] != "[DONE]"
    assert queued.join().events[-1] == "[DONE]"
    first.join()


def test_a_request_explains_itself_and_can_be_cancelled(server: Server):
    assert server.put(knobs={"max_batch_size": 1}).status_code == 200
    first = Stream(server, max_tokens=400)
    wait_for(lambda: first.events)
    name = json.loads(first.events[0])["id"]
    second = Stream(server, max_tokens=2)
    wait_for(lambda: server.window()["waiting"] == 1)
    told = server.get("/v1/requests/" + name)
    assert told["rows"][0]["state"] == "running" and told["waits_for"] is None
    deleted = requests.delete(server.url + "/v1/requests/" + name)
    assert deleted.json() == {"id": name.partition("-")[2], "cancelled": True}
    first.join()
    assert json.loads(first.events[-2])["error"]["code"] == "cancelled" and first.events[-1] == "[DONE]"
    assert second.join().events[-1] == "[DONE]"
    assert requests.get(server.url + "/v1/requests/" + name).status_code == 404


def test_a_request_is_cancelled_in_every_state(server: Server):
    """While it waits, while its prompt is read, while it answers: each told, nothing held, and afterwards unknown."""
    def cancel(name: str) -> None:
        assert requests.delete(f"{server.url}/v1/requests/{name}").status_code == 200

    assert server.put(knobs={"max_batch_size": 1}).status_code == 200
    decoding = Stream(server, asking={"X-Request-Id": "decoding"}, max_tokens=2000)
    wait_for(lambda: len(decoding.events) > 1)
    waiting = Stream(server, asking={"X-Request-Id": "waiting"}, prompt="word " * 5000)
    wait_for(lambda: server.window()["waiting"] == 1)
    told = server.get("/v1/requests/waiting")
    assert told["waits_for"] == "slots" and told["rows"][0]["rows_ahead"] == 0
    cancel("waiting")
    assert waiting.join().status == 409 and json.loads(waiting.body)["error"]["code"] == "cancelled"
    prefilling = Stream(server, asking={"X-Request-Id": "prefilling"}, prompt="word " * 6000)
    cancel("decoding")
    wait_for(lambda: server.window()["prefilling"] == 1)
    assert server.get("/v1/requests/prefilling")["rows"][0] == {"index": 0, "state": "running", "generated_tokens": 0}
    cancel("prefilling")
    for stream in (decoding.join(), prefilling.join()):
        assert stream.status == 200 and json.loads(stream.events[-2])["error"]["code"] == "cancelled"
    wait_for(lambda: server.window()["kv_used_bytes"] == 0)
    assert requests.delete(f"{server.url}/v1/requests/decoding").status_code == 404


def test_a_stream_whose_time_is_over_is_told_so(server: Server):
    stream = Stream(server, max_tokens=4000, timeout=5).join()
    assert stream.status == 200 and stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["error"]["code"] == "deadline_exceeded"
    wait_for(server.idle)


def test_refusals_do_not_wait_for_the_engine(server: Server):
    """A storm on kept connections while four streams run: every one answered, none behind a step (coarse on purpose)."""
    assert server.put(knobs={"max_queue_depth": 1}).status_code == 200
    running = [Stream(server, max_tokens=150) for _ in range(4)]
    wait_for(lambda: server.window()["running"] == 4)
    waiting = Stream(server, max_tokens=2)
    wait_for(lambda: server.window()["waiting"] == 1)
    took = []
    with requests.Session() as session:
        while len(took) < 300 and not any(s.events and s.events[-1] == "[DONE]" for s in running):
            began = time.monotonic()
            answer = session.post(server.url + COMPLETION, json={"prompt": "x", "max_tokens": 4})
            took.append(time.monotonic() - began)
            assert answer.status_code == 503 and answer.content == BUSY
    assert len(took) > 20
    print(f"{len(took)} refusals, median {sorted(took)[len(took) // 2] * 1e3:.1f} ms, slowest {max(took) * 1e3:.1f} ms")
    for stream in [*running, waiting]:
        assert stream.join().events[-1] == "[DONE]"
