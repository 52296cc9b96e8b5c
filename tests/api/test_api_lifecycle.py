"""Start, drain, death: signals at every moment, either process killed, ports and files that are wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from serving import MODEL, NAME, Server, Stream, alive, held_up, wait_for

SMALL = ("--ctx-size", "4096")


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A start that must fail by itself."""
    command = [sys.executable, "-m", "weir_server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})})


def test_sigterm_serves_what_runs_and_what_is_queued_then_exits_0(start):
    own: Server = start(*SMALL, "--parallel", "2").wait_until_serving()
    child = own.child()
    streams = [Stream(own, max_tokens=40) for _ in range(3)]
    wait_for(lambda: own.window()["running"] == 2 and own.window()["waiting"] == 1)
    own.process.send_signal(signal.SIGTERM)
    wait_for(lambda: requests.get(own.url + "/ready").status_code == 503)
    assert requests.get(own.url + "/ready").json()["reason"] == "draining"
    assert requests.get(own.url + "/health").status_code == 200
    refused = own.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503 and "draining" in refused.json()["error"]["message"] and "Retry-After" in refused.headers
    for stream in streams:
        assert stream.join().status == 200 and stream.events[-1] == "[DONE]"
        assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
    assert own.process.wait(30) == 0
    wait_for(lambda: not alive(child))


def test_at_the_drain_timeout_queued_work_is_handed_back_and_running_work_ends(start):
    own: Server = start(*SMALL, "--parallel", "1", "--ctx-size", "2048", "--drain-timeout", "1").wait_until_serving()
    running = Stream(own, max_tokens=1900)
    wait_for(lambda: running.events)
    queued = Stream(own, max_tokens=4)
    wait_for(lambda: own.window()["waiting"] == 1)
    own.process.send_signal(signal.SIGTERM)
    queued.join()
    assert queued.status == 503 and queued.headers["Retry-After"] == "0"
    assert json.loads(queued.body)["error"]["type"] == "overloaded"
    running.join()
    assert "error" in json.loads(running.events[-2]) and running.events[-1] == "[DONE]"
    assert own.process.wait(30) == 0


def test_a_second_sigterm_ends_at_once(start):
    own: Server = start(*SMALL).wait_until_serving()
    child = own.child()
    stream = Stream(own, max_tokens=1000)
    wait_for(lambda: stream.events)
    own.process.send_signal(signal.SIGTERM)
    wait_for(lambda: requests.get(own.url + "/ready").status_code == 503)
    own.process.send_signal(signal.SIGTERM)
    stream.join()
    assert "error" in json.loads(stream.events[-2]), "a terminal event even so"
    assert own.process.wait(15) == 143
    wait_for(lambda: not alive(child))


def test_a_drain_by_the_control_port_does_not_exit(start):
    own: Server = start(*SMALL).wait_until_serving()
    fence = {"instance": own.state()["instance"], "epoch": 1, "seq": 1}
    assert requests.post(own.control + "/control/drain", json={**fence, "instance": "x"}).status_code == 409
    stream = Stream(own, max_tokens=20)
    wait_for(lambda: stream.events)
    assert requests.post(own.control + "/control/drain", json=fence).json()["draining"] is True
    assert requests.get(own.url + "/ready").status_code == 503
    assert stream.join().events[-1] == "[DONE]"
    assert own.put(knobs={"max_queue_depth": 4}).status_code == 503
    assert own.window()["draining"] is True and own.process.poll() is None


def test_when_the_engine_dies_every_stream_is_told_and_the_server_exits_1(start):
    own: Server = start(*SMALL, "--parallel", "1").wait_until_serving()
    streams = [Stream(own, max_tokens=500)]
    wait_for(lambda: streams[0].events)
    streams.append(Stream(own, max_tokens=5))
    wait_for(lambda: own.window()["waiting"] == 1)
    os.kill(own.child(), signal.SIGKILL)
    running, queued = (s.join() for s in streams)
    assert "signal 9" in json.loads(running.events[-2])["error"]["message"] and running.events[-1] == "[DONE]"
    assert queued.status == 500 and "signal 9" in json.loads(queued.body)["error"]["message"]
    assert own.process.wait(15) == 1
    assert "Traceback" not in own.output()


def test_when_the_parent_is_killed_the_engine_goes_too_and_the_next_start_takes_less_memory(start, tmp_path: Path):
    flags = (*SMALL, "--state-dir", str(tmp_path))
    own: Server = start(*flags).wait_until_serving()
    child, budget, chunk = own.child(), own.state()["boot"]["kv_cache_budget"], own.state()["kv"]["chunk_bytes"]
    wait_for(lambda: list(tmp_path.iterdir()))
    own.process.kill()
    own.process.wait(10)
    wait_for(lambda: not alive(child), 10)
    again: Server = start(*flags).wait_until_serving()
    assert again.state()["boot"]["kv_cache_budget"] == int(budget * 0.85) // chunk * chunk
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(20) == 0
    assert not list(tmp_path.iterdir()), "a clean end leaves no marker"


@pytest.mark.parametrize(("sig", "delay"), [(signal.SIGTERM, 0.3), (signal.SIGTERM, 1.5), (signal.SIGINT, 1.0)])
def test_a_signal_while_loading_ends_it_soon(start, sig: int, delay: float):
    """triton-inference-server/server#2044: no waiting for the model, no port half-way, no process left."""
    own: Server = start()
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline and own.process.poll() is None:
        time.sleep(0.02)
    children = Path(f"/proc/{own.process.pid}/task/{own.process.pid}/children").read_text().split()
    assert seconds_to_end(own, sig) < 2
    assert own.process.returncode in (0, 128 + sig, -sig)
    for child in children:
        wait_for(lambda c=child: not alive(int(c)), 5)
    assert "serving at" not in own.output() and "Traceback" not in own.output()


def seconds_to_end(own: Server, sig: int) -> float:
    """From a signal to the end of the process, less the time in which the machine gave it no processor."""
    pid = own.process.pid
    began = time.monotonic()
    first = last = held_up(pid)
    own.process.send_signal(sig)
    while own.process.poll() is None:
        last = max(last, held_up(pid))
        assert time.monotonic() - began < 60
        time.sleep(0.005)
    return time.monotonic() - began - (last - first)


def test_two_servers_that_start_on_one_port(start):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    servers: list[Server] = [start("--null-model", "--host", "127.0.0.1", "--port", port) for _ in range(2)]
    loser = wait_for(lambda: next((s for s in servers if s.process.poll() is not None), None))
    assert loser.process.returncode == 2 and f"Port {port} is in use" in loser.output() and "Traceback" not in loser.output()
    next(s for s in servers if s is not loser).wait_until_serving()


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("serve", MODEL, "--port", str(port), "--control-port", "0")
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1 and f"Port {port} is in use" in ended.stderr


BROKEN = {"empty": b"", "magic": b"\0\0\0\0rest", "html": b"<html><body>404</body></html>", "cut": None}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_model_file_is_one_line(tmp_path: Path, content: bytes | None):
    """Luce-Org/lucebox#438: what was looked for, what is there; never a signal, never a traceback."""
    from weir_server.model.files import resolve

    path = tmp_path / "model.gguf"
    good = resolve(MODEL)
    path.write_bytes(good.read_bytes()[:50_000_000] if content is None else content)
    ended = run("serve", str(path), "--port", "0", "--control-port", "0")
    assert ended.returncode == 2, ended.stderr
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1 and str(path) in lines[0]
    if content is None:
        assert "50000000" in lines[0] and str(good.stat().st_size) in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["serve", "/no/such/model.gguf", "--scheduler", "lifo"], "--scheduler lifo"),
        (["serve", "/no/such/model.gguf", "--slo-ttft", "0"], "--slo-ttft"),
        (["size", MODEL, "--dtype", "int3"], "--dtype int3"),
        (["size", "/no/such/model.gguf", "--memory-limit", "much"], "--memory-limit"),
        (["serve", MODEL, "--drain-timeout", "inf"], "'--drain-timeout'"),
        (["serve", MODEL, "--threads", "100000"], "'--threads'"),
        (["serve", MODEL, "--max-queue-depth", "1" * 30], "--max-queue-depth"),
        (["run", MODEL, "--temperature", "inf"], "'--temperature'"),
        (["serve", "package://no-such-thing/x.gguf"], "no-such-thing"),
        (["serve", "x", "--draft-kind", "prompt-lookup"], "--draft-kind is not available yet"),
        (["serve", "x", "--quantize=int5"], "--quantize int5: it is auto, int8 or none."),
        (["serve", MODEL, "--scheduler", "lifo"], "--scheduler lifo: it is fifo or prefill_first"),
        (["run", MODEL, "--prompt", os.fsdecode(b"caf\xe9")], "cannot be sent"),
        (["serve", "x", "--no-such-flag"], "--no-such-flag"),
        (["serve", "x", "--port", "99999"], "'--port'"),
        (["serve", "x", "--boot-file", "/no/such.yaml"], "/no/such.yaml"),
        (["serve", MODEL, "--kv-admission-watermark", "0.7"], "0.7"),
        (["serve", MODEL, "--ctx-size", "2000"], "raise it to 2048"),
        (["serve", MODEL, "--control-host", "0.0.0.0"], "needs --control-token-file"),
        (["serve", MODEL, "--api-key", ""], "is empty"),
    ],
    ids=lambda v: v[2] if isinstance(v, list) and len(v) > 2 else None,
)
def test_a_wrong_command_line_is_a_sentence_and_exit_2(arguments: list[str], words: str):
    ended = run(*arguments)
    assert ended.returncode == 2 and words in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["WEIR_API_KEY", "WEIR_API_KEY_FILE"])
def test_an_empty_variable_for_the_keys_is_no_leave_to_do_without(name: str):
    ended = run("serve", MODEL, env={name: ""})
    assert ended.returncode == 2 and "API key" in ended.stderr and "Traceback" not in ended.stderr


def test_service_links_are_no_settings_and_defaults_listen_on_both_families(start):
    """vllm-project/vllm#15613 and restatedev/restate#4533."""
    links = {
        "WEIR_PORT": "tcp://10.96.3.7:8080", "WEIR_SERVICE_HOST": "10.96.3.7", "WEIR_SERVICE_PORT": "8080",
        "WEIR_PORT_8080_TCP": "tcp://10.96.3.7:8080", "WEIR_CONTROL_PORT": "tcp://10.96.3.8:8081", "WEIR_UNHEARD_OF": "1",
        "WEIR_MAX_QUEUE_DEPTH": "6",
    }  # fmt: skip
    own: Server = start(*SMALL, env=links).wait_until_serving()
    assert own.state()["boot"]["max_queue_depth"] == 6, "a real setting is read"
    port, control = own.url.rsplit(":", 1)[1], own.control.rsplit(":", 1)[1]
    hosts = ["127.0.0.1", "[::1]"] if has_ipv6() else ["127.0.0.1"]
    for host in hosts:
        assert requests.get(f"http://{host}:{port}/health").status_code == 200
        assert requests.get(f"http://{host}:{control}/control/state").status_code == 200
    for address in addresses():
        with pytest.raises(requests.ConnectionError):
            requests.get(f"http://{address}:{control}/control/state", timeout=5)


def test_the_boot_file_sets_start_values_and_flags_win(start, tmp_path: Path):
    boot = tmp_path / "boot.yaml"
    initial = {"max_batch_size": 3, "max_queue_depth": 9, "kv_cache_budget": 200_000_000}
    boot.write_text(json.dumps({"slo": {"ttft": 1.5, "tpot": 0.1}, "initial": initial}))
    own: Server = start(*SMALL, "--boot-file", str(boot), "--max-queue-depth", "5", "--slo-tpot", "0.2").wait_until_serving()
    state = wait_for(lambda: (s := own.state())["effective"] == s["boot"] and s)
    assert (state["boot"]["max_batch_size"], state["boot"]["max_queue_depth"]) == (3, 5)
    assert state["boot"]["kv_cache_budget"] == 200_000_000 // state["kv"]["chunk_bytes"] * state["kv"]["chunk_bytes"]
    assert (state["slo"]["ttft"], state["slo"]["tpot"]) == (1.5, 0.2)
    assert state["fallback"] == state["target"] == state["boot"]
    assert f"Model {NAME} decode path: native batched forward\n" in own.output()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def addresses() -> list[str]:
    """This machine's addresses other than loopback."""
    found = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, family=socket.AF_INET)}
    return [a for a in found if not a.startswith("127.")]
