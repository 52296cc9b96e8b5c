"""What clients get wrong: always a JSON error that names the parameter, never a 500, and the next request is served."""

from __future__ import annotations

import json
import socket
import threading
from urllib.parse import urlsplit

import psutil
import pytest
import requests
from serving import NAME, Server, Stream, wait_for

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Say hi"}]
BIG = 9223372036854775808


def refused(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"].startswith("application/json")
    error = answer.json()["error"]
    assert error["message"] and "Traceback" not in answer.text and "Error(" not in error["message"]
    return error


@pytest.fixture(autouse=True)
def still_serves(server: Server):
    yield
    assert server.post(COMPLETION, {"prompt": "The", "max_tokens": 1}).status_code == 200


COMPLETIONS_400 = {
    "seed": [BIG, 2**64, 1.5, "7", True],
    "logit_bias": [{"49152": 1}, {"-1": 1}, {"abc": 1}, {"99999999999999999999": 1}, {"5": 101}, {"5": "x"}, []],
    "prompt": [[49152], [-1], [[504], [1, 70000]], [], [[]], [504.5], "", 7, [504, "x"], [True], "x " * 9000, [5] * 8192],
    "max_tokens": [0, -1, BIG, "4"],
    "timeout": [0, -1, "soon", True],
    "prompt_logprobs": [21, -1, True],
    "temperature": [-0.1, "hot"],
    "top_p": [0, 1.1],
    "top_k": [-2],
    "min_p": [2],
    "n": [0, 1000, 2000],
    "stop": [[""], ["x"] * 17, 5],
    "min_tokens": [9],
    "logprobs": [21, -1],
    "presence_penalty": [3],
    "stream": ["yes"],
    "echo": ["yes"],
    "best_of": [4],
    "suffix": ["x"],
    "priority": ["urgent", 1.5, True, BIG],
}


CASES = [(param, value) for param, values in COMPLETIONS_400.items() for value in values]


@pytest.mark.parametrize(("param", "value"), CASES, ids=lambda v: str(v)[:30])
def test_a_completion_that_is_refused_names_the_parameter(server: Server, param: str, value: object):
    """Integers beyond what the engine can hold (vllm-project/vllm#4529, #57018, #16529, sgl-project/sglang#7670), and kin."""
    error = refused(server.post(COMPLETION, {"prompt": "The", "max_tokens": 4, param: value}))
    assert param in error["message"] and param in error["param"]


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


CHAT_400 = [
    ("messages", {"messages": []}), ("messages", {"messages": "hi"}), ("messages", {"messages": None}),
    ("messages", {"messages": [7]}),
    ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].content", {"messages": user(5)}),
    ("messages[0].content[0]", {"messages": user([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])}),
    ("messages[0].content[0]", {"messages": user(["x"])}),
    ("messages[0].content[0].text", {"messages": user([{"type": "text"}])}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("logprobs", {"logprobs": 5}), ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("max_completion_tokens", {"max_completion_tokens": 0}), ("max_tokens", {"max_tokens": 0}), ("echo", {"echo": True}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("stream_options", {"stream_options": {"include_usage": "x"}}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "change"), CHAT_400, ids=lambda v: str(v)[:30])
def test_a_chat_that_is_refused_names_the_parameter(server: Server, param: str, change: dict):
    error = refused(server.post(CHAT, {"messages": HI, "max_tokens": 4, **change}))
    assert param in error["message"] and param in error["param"]


def test_null_is_absent(server: Server):
    """ggml-org/llama.cpp#25515. Many clients send unset options as null."""
    names = [
        "temperature", "top_p", "top_k", "n", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options",
        "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "user", "tools", "tool_choice",
        "response_format", "metadata", "priority",
    ]  # fmt: skip
    base = {"messages": HI, "seed": 3}

    def answer(**more):
        got = server.post(CHAT, {**base, "max_completion_tokens": 6, **more})
        assert got.status_code == 200, got.text
        return got.json()["choices"][0]["message"]["content"]

    expected = answer()
    assert answer(**{n: None for n in names if n != "max_completion_tokens"}) == expected
    for name in names:
        if name not in ("max_completion_tokens", "max_tokens"):
            assert answer(**{name: None}) == expected, name
    assert server.post(CHAT, {**base, "max_tokens": 2, "stream": True, "stream_options": None}).status_code == 200


def test_a_turn_without_content_stays(server: Server):
    """cubist38/mlx-openai-server#205: assistant turns that only call tools have null content, or none."""
    call = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": '{"a":7,"b":6}'}}
    counts = set()
    for content in ({"content": None}, {}, {"content": []}, {"content": ""}):
        messages = [
            {"role": "user", "content": "What is 7 times 6?"}, {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c1", "content": "42"}, {"role": "user", "content": "So?"},
        ]  # fmt: skip
        answer = server.post(CHAT, {"messages": messages, "max_tokens": 2, "temperature": 0})
        assert answer.status_code == 200, answer.text
        counts.add(answer.json()["usage"]["prompt_tokens"])
    assert len(counts) == 1


def test_parts_and_developer_are_the_same_prompt_as_plain_ones(server: Server):
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi"}]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Say hi"}]},
    ]
    one, two = (server.post(CHAT, {"messages": m, "max_tokens": 6, "temperature": 0}).json() for m in (plain, parts))
    assert one["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]
    assert one["choices"][0]["message"] == two["choices"][0]["message"]


def test_half_a_surrogate_pair(server: Server):
    """raullenchai/Rapid-MLX#730: refused before any stream starts; a whole pair is fine."""
    json_type = {"Content-Type": "application/json"}
    for path, body in (
        (CHAT, r'{"messages":[{"role":"user","content":"half \ud83d"}],"max_tokens":1}'),
        (COMPLETION, r'{"prompt":"\udcf0 x","max_tokens":4}'),
        (COMPLETION, r'{"prompt":"\udcf0 x","max_tokens":4,"stream":true}'),
        (COMPLETION, r'{"prompt":"x","max_tokens":4,"stop":["\ud800"]}'),
        ("/tokenize", r'{"prompt":"\ud83d"}'),
        (COMPLETION, r'{"prompt":"x","model":"\ud83d"}'),
    ):
        refused(server.post(path, data=body, headers=json_type))
    assert server.post(COMPLETION, data=r'{"prompt":"\ud83d\ude00","max_tokens":1}', headers=json_type).status_code == 200


def test_bodies_that_are_no_requests(server: Server):
    """aio-libs/aiohttp#4474 and its kin: never the framework's plain text."""
    refused(server.post(COMPLETION, data=json.dumps({"prompt": "x"}), headers={"Content-Type": "text/plain"}), 415)
    for broken in (b'{"prompt": "x"', b"", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}'):
        refused(server.post(COMPLETION, data=broken, headers={"Content-Type": "application/json"}))
    refused(requests.get(server.url + COMPLETION), 405)
    refused(requests.get(server.url + "/nothing/here"), 404)
    refused(server.post(COMPLETION, {"prompt": "x", "model": "other"}), 404)


def test_large_bodies_are_read_and_long_prompts_are_refused_with_both_numbers(server: Server):
    padded = ('{"prompt":"The",' + " " * 1_500_000 + '"max_tokens":1}').encode()
    assert server.post(COMPLETION, data=padded, headers={"Content-Type": "application/json"}).status_code == 200
    error = refused(server.post(COMPLETION, {"prompt": "word " * 240_000}))
    assert error["code"] == "context_length" and "8192" in error["message"]
    error = refused(server.post(CHAT, {"messages": [{"role": "user", "content": "word " * 5_500}] * 40}))
    assert error["code"] == "context_length" and "8192" in error["message"]


def test_a_body_above_the_limit_is_a_json_413_before_it_is_read(server: Server):
    """Sent slowly and never whole: the answer comes from the length alone, and the parent does not grow by it."""
    host = urlsplit(server.url)
    with socket.create_connection((host.hostname, host.port)) as sock:
        head = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 300000000", "", ""
        sock.sendall("\r\n".join(head).encode())
        sock.settimeout(20)

        def feed():
            try:
                for _ in range(300):
                    sock.sendall(b" " * 1_000_000)
            except OSError:
                pass

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        answer = b""
        while b"\r\n\r\n" not in answer or b"}}" not in answer:
            answer += sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].count("16777216") == 1


def test_one_pathological_prompt_leaves_the_others_alone(server: Server):
    """openai/tiktoken#195: superlinear texts go to a thread, or are refused by their size alone."""
    stream = Stream(server, max_tokens=60)
    wait_for(lambda: stream.events)
    polls, done = 0, threading.Event()

    def poll():
        nonlocal polls
        while not done.is_set():
            server.get("/health")
            polls += 1

    poller = threading.Thread(target=poll)
    poller.start()
    texts = ["a" * 900_000, "_" * 600_000, "漢" * 200_000, "a" * 600_000]

    def send(text: str):
        refused(server.post(COMPLETION, {"prompt": text, "max_tokens": 1}))

    senders = [threading.Thread(target=send, args=(t,)) for t in texts]
    for s in senders:
        s.start()
    for s in senders:
        s.join(60)
        assert not s.is_alive()
    refused(server.post("/tokenize", {"prompt": "_" * 900_000}))
    done.set()
    poller.join()
    stream.join()
    assert stream.events[-1] == "[DONE]"
    print(f"{polls} answers of /health while five texts were read")
    assert polls > 4 * len(texts), "health must not wait for a tokenizer"


def test_five_thousand_prompts_cost_next_to_nothing(server: Server):
    """Seconds of the parent's processor, since those do not depend on how busy the machine is."""
    parent = psutil.Process(server.process.pid)

    def used() -> float:
        times = parent.cpu_times()
        return times.user + times.system

    before = used()
    refused(server.post(COMPLETION, {"prompt": ["a"] * 5000}))
    refused(server.post(CHAT, {"messages": [{"role": "user"}] * 500_000}))
    refused(server.post(COMPLETION, {"prompt": [5] * 1_000_000}))
    assert used() - before < 2


def test_two_requests_with_one_client_id(server: Server):
    """vllm-project/vllm#10583: a client's id is a label; it never mixes two requests."""
    alone = [Stream(server, prompt=p, max_tokens=12).join().events[:-1] for p in ("A river", "A mill")]

    def texts(events):
        return "".join(json.loads(e)["choices"][0]["text"] for e in events)

    def post(prompt: str, out: list):
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "request_id": "same"}
        out.append(server.post(COMPLETION, body, headers={"X-Request-Id": "same"}))

    got: tuple[list, list] = ([], [])
    threads = [threading.Thread(target=post, args=(p, o)) for p, o in zip(("A river", "A mill"), got, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [o[0].json()["choices"][0]["text"] for o in got] == [texts(a) for a in alone]
    assert got[0][0].headers["X-Request-Id"] == "same"
    odd = server.post(COMPLETION, {"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "x" * 7000})
    assert odd.status_code == 200 and len(odd.headers["X-Request-Id"]) < 64
    assert requests.delete(server.url + "/v1/requests/same").status_code == 404


def test_unknown_roles_and_fields_of_others_do_no_harm(server: Server):
    extra = {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "priority": 0}
    assert server.post(CHAT, {"model": NAME, "messages": HI, "max_tokens": 1, **extra}).status_code == 200
