"""The control port against the real server: knobs that move live, fences, leases, objectives, the window."""

from __future__ import annotations

import json
import os
from pathlib import Path

import requests
from serving import Server, Stream, wait_for

from weir_server.contract import CONTRACT_MAJOR, ControlState, Window
from weir_server.policy.trace import agrees, from_wire


def test_state_and_window_are_whole(server: Server):
    state = ControlState.from_wire(server.state())
    assert state.contract["major"] == CONTRACT_MAJOR and state.target == state.effective == state.boot == state.fallback
    assert state.plant is not None and state.plant.step_seconds(4) > 0
    answer = requests.get(server.control + "/control/window")
    Window.from_wire(answer.json())
    assert len(answer.content) <= 8192


def test_all_four_knobs_move_while_it_serves(server: Server):
    state = server.state()
    chunk = state["kv"]["chunk_bytes"]
    budget = state["envelope"]["kv_cache_budget"][0] + 5 * chunk + 7
    wanted = {"max_batch_size": 2, "kv_cache_budget": budget, "admission_watermark": 0.05, "max_queue_depth": 7}
    settled = server.window()["settled_at"]
    stream = Stream(server, max_tokens=30)
    answer = server.put(knobs=wanted)
    assert answer.status_code == 200
    whole = {**wanted, "kv_cache_budget": budget // chunk * chunk}
    assert answer.json()["target"] == whole
    wait_for(lambda: server.state()["effective"] == whole)
    window = wait_for(lambda: (w := server.window())["settled_at"] > settled and w)
    assert window["settled"]["tpot"]["counts"] == []
    assert server.state()["boot"]["max_batch_size"] == 4
    assert stream.join().events[-1] == "[DONE]"


def test_lowering_the_batch_drains_and_kills_nothing(server: Server):
    streams = [Stream(server, max_tokens=40) for _ in range(4)]
    wait_for(lambda: server.window()["running"] == 4)
    server.put(knobs={"max_batch_size": 1})
    late = Stream(server, max_tokens=4)
    assert server.state()["target"]["max_batch_size"] == 1
    assert server.state()["effective"]["max_batch_size"] == 4
    for stream in [*streams, late]:
        assert stream.join().events[-1] == "[DONE]"
    assert server.window()["preempted"] == 0
    wait_for(lambda: server.state()["effective"]["max_batch_size"] == 1)


def test_fences(server: Server):
    """Another instance, an older epoch, an older seq: 409, and nothing changes. The same write again renews the lease."""
    state = server.state()
    seq = state["fence"]["seq"] + 1
    assert server.put(seq=seq, knobs={"max_queue_depth": 9}, lease_seconds=30).status_code == 200
    assert server.put(seq=seq, knobs={"max_queue_depth": 9}, lease_seconds=300).status_code == 200
    assert server.state()["lease"]["expires_in_seconds"] > 100
    for wrong in ({"instance": "x"}, {"epoch": 0, "seq": seq + 9}, {"seq": seq - 1}):
        answer = server.put(**{"knobs": {"max_queue_depth": 11}, "seq": seq + 1, **wrong})
        assert answer.status_code == 409 and answer.json()["error"]["message"]
    assert server.state()["target"]["max_queue_depth"] == 9


def test_outside_the_envelope_is_a_422_that_says_the_bound(server: Server):
    before = server.state()
    top = before["envelope"]["max_batch_size"][1]
    answer = server.put(knobs={"max_batch_size": top + 1, "max_queue_depth": 5})
    assert answer.status_code == 422
    told = answer.json()
    assert (told["knob"], told["value"], told["bound"]) == ("max_batch_size", top + 1, top)
    assert server.state()["target"] == before["target"], "refused whole"
    for malformed in ({"max_batch_size": "4"}, {"max_batch_size": 2.5}, {"speed": 1}, {"max_queue_depth": True}):
        assert server.put(knobs=malformed).status_code == 400
    assert requests.put(server.control + "/control/knobs", data=b"{").status_code == 400
    assert requests.put(server.control + "/control/knobs", json={"epoch": 1}).status_code == 400


def test_an_expired_lease_returns_to_the_fallback(server: Server):
    fallback = {**server.state()["boot"], "max_queue_depth": 13}
    expired = server.window()["instance"]
    knobs = {"max_queue_depth": 5, "max_batch_size": 2}
    assert server.put(knobs=knobs, fallback=fallback, lease_seconds=1.5).status_code == 200
    assert server.state()["target"]["max_queue_depth"] == 5
    wait_for(lambda: server.state()["target"] == fallback)
    state = server.state()
    assert state["lease"]["expires_in_seconds"] is None and state["instance"] == expired
    assert server.put(lease_seconds=0, knobs={"max_queue_depth": 5}).json()["target"] == fallback, "a lease given back"
    metrics = requests.get(server.control + "/metrics").text
    assert "weir_lease_expirations_total 1.0" in metrics


def test_objectives_stay_and_are_counted_by_generation(server: Server):
    before = server.state()["slo"]
    assert server.put(lease_seconds=0, slo={"ttft": 50.0, "tpot": 20.0}).json()["slo"]["generation"] == before["generation"] + 1
    good = server.window()["slo_good"]["both"]
    Stream(server, max_tokens=4).join()
    assert server.window()["slo_good"]["both"] == good + 1
    assert server.put(lease_seconds=0, slo={"ttft": 1e-6, "tpot": 1e-6}).status_code == 200
    Stream(server, max_tokens=4).join()
    window = server.window()
    assert window["slo_good"]["both"] == good + 1 and window["slo_total"] > good + 1
    generation = str(server.state()["slo"]["generation"])
    assert f'weir_slo_total{{slo="both",slo_generation="{generation}"}} 1.0' in requests.get(server.url + "/metrics").text
    assert server.put(lease_seconds=0, slo={"ttft": before["ttft"], "tpot": before["tpot"]}).status_code == 200
    assert server.put(lease_seconds=0, slo={"ttft": -1}).status_code == 400


def test_capacity_and_the_schedule(server: Server):
    capacity = requests.get(server.control + "/control/capacity").json()
    assert capacity["longest_servable"] == 8192 and capacity["free_blocks"] > 0
    assert requests.post(server.url + "/v1/completions", json={"prompt": "The", "max_tokens": 3}).status_code == 200
    steps = requests.get(server.control + "/debug/schedule").json()["steps"]
    assert steps[-1]["plan"]["take"] == [1] and all(agrees(from_wire(step)) for step in steps)
    assert requests.get(server.url + "/control/state").status_code == 404, "not on the clients' port"


def test_keys_and_tokens(start, tmp_path: Path):
    """jundot/omlx#1719: bytes that are no ASCII are a 401 like any other; a changed token file needs no restart."""
    token = tmp_path / "token"
    token.write_text("first\n")
    own = start("--api-key", "schlüssel", "--control-token-file", str(token), "--ctx-size", "4096").wait_until_serving()
    for path in ("/v1/models", "/slots"):
        for header in (b"Bearer caf\xc3\xa9", b"Bearer \xff\xfe", b"Bearer ", b"Basic eA==", b""):
            answer = requests.get(own.url + path, headers={"Authorization": header} if header else {})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert requests.get(own.url + path, headers={"Authorization": "Bearer schlüssel".encode()}).status_code == 200
    assert requests.get(own.url + "/health").status_code == 200
    assert requests.get(own.control + "/control/state", headers={"Authorization": b"Bearer \xff"}).status_code == 401
    assert requests.get(own.control + "/control/state", headers={"Authorization": "Bearer first"}).status_code == 200
    os.replace(_with(tmp_path / "next", "second"), token)
    assert requests.get(own.control + "/control/state", headers={"Authorization": "Bearer first"}).status_code == 401
    assert requests.get(own.control + "/control/state", headers={"Authorization": "Bearer second"}).status_code == 200
    token.unlink()
    assert requests.get(own.control + "/control/state", headers={"Authorization": "Bearer second"}).status_code == 401
    assert "Traceback" not in own.output()


def test_api_keys_rotate_under_traffic(start, tmp_path: Path):
    """The old key ends for new requests at once; what it began goes on to its end."""
    keys = _with(tmp_path / "keys", "team-a:old\n")
    own = start("--api-key-file", str(keys), "--ctx-size", "4096").wait_until_serving()
    old, new = ({"Authorization": f"Bearer {key}"} for key in ("old", "new"))

    def status(headers: dict[str, str]) -> int:
        body = {"prompt": "The", "max_tokens": 1, "temperature": 0}
        return requests.post(own.url + "/v1/completions", json=body, headers=headers, timeout=60).status_code

    assert (status(old), status(new), status({})) == (200, 401, 401)
    running = [Stream(own, asking=old, max_tokens=400) for _ in range(2)]
    for stream in running:
        wait_for(lambda s=stream: len(s.events) > 2)
    os.replace(_with(tmp_path / "next", "old\nnew\n"), keys)  # both, while clients change over
    assert (status(old), status(new)) == (200, 200)
    os.replace(_with(tmp_path / "next", "new\n"), keys)
    assert (status(old), status(new)) == (401, 200)
    assert all(stream.events[-1] != "[DONE]" for stream in running), "the rotation was to fall into them"
    for stream in running:
        stream.join()
        assert stream.status == 200 and stream.error is None and stream.events[-1] == "[DONE]"
        assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length", "all 400 tokens of it"
    keys.unlink()
    assert (status(new), requests.get(own.url + "/ready").status_code) == (401, 200)
    assert "Traceback" not in own.output()


def _with(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_lone_row_outgrows_a_lowered_budget_and_ends_by_itself(start):
    """Two chunks are 32 tokens: nothing is taken from a row that runs alone, and for everybody else the budget counts."""
    own: Server = start("--ctx-size", "2048", "--parallel", "1", "--kv-cache-budget-min", "1Mi").wait_until_serving()
    chunk = own.state()["kv"]["chunk_bytes"]
    running = Stream(own, max_tokens=120)
    wait_for(lambda: running.events)
    assert own.put(knobs={"kv_cache_budget": 2 * chunk}).status_code == 200
    wait_for(lambda: own.window()["kv_used_bytes"] > 3 * chunk)
    assert own.state()["effective"]["kv_cache_budget"] == 2 * chunk
    running.join()
    assert json.loads(running.events[-2])["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: own.window()["kv_used_bytes"] == 0)
    assert own.window()["preempted"] == 0
    stats = own.get("/v1/cache/stats")
    assert stats["live_blocks"] == 0 and stats["allocated_blocks"] <= 2 and stats["resident_bytes"] <= 2 * chunk
    assert own.post("/v1/completions", {"prompt": "word " * 40, "max_tokens": 2}).status_code == 503


def test_what_the_live_budget_can_no_longer_hold_is_handed_back_and_refused(start):
    """503 `kv_budget`: for queued work when the budget is lowered, and for new work that the envelope could hold."""
    own: Server = start("--ctx-size", "8192", "--parallel", "1", "--kv-cache-budget-min", "32Mi").wait_until_serving()
    chunk = own.state()["kv"]["chunk_bytes"]
    running = Stream(own, max_tokens=100)
    wait_for(lambda: running.events)
    queued = Stream(own, prompt="word " * 2000, max_tokens=4)
    wait_for(lambda: own.window()["waiting"] == 1)
    assert own.put(knobs={"kv_cache_budget": 60 * chunk}).status_code == 200
    queued.join()
    assert queued.status == 503 and queued.body.count(b"request_memory_budget_exceeded: the prompt needs ") == 1
    refused = own.post("/v1/completions", {"prompt": "word " * 2000, "max_tokens": 4})
    assert refused.status_code == 503 and refused.json()["error"]["message"] == "request_memory_budget_exceeded"
    assert int(refused.headers["Retry-After"]) >= 1
    assert own.window()["refused"]["kv_budget"]["kv"] == 1
    assert own.post("/v1/completions", {"prompt": "word", "max_tokens": 2}).status_code == 200
    assert running.join().events[-1] == "[DONE]"
