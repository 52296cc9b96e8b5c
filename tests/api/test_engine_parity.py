"""`run -p` and `chat` say what the server says, byte for byte: `make engine-parity MODEL=…` for a model of one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from serving import MODEL, Server, Stream, wait_for

SOURCE = os.environ.get("WEIR_PARITY_MODEL", MODEL)
PROMPTS = ["What is the capital of France?", "Write a short story about a mill at a weir.", "Zähle bis fünf: "]
TOKENS = 48
SMALL = ("--ctx-size", "2048", "--temperature", "0", "--max-tokens", str(TOKENS))
WAIT = 240


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "weir_server", *arguments]
    return subprocess.run(command, input=None if text is None else text.encode(), capture_output=True, timeout=WAIT)


@pytest.fixture(scope="module")
def answers(needs_model: None) -> Iterator[dict[tuple[str, ...], str]]:
    """What a server with its usual flags says to each conversation, alone or beside others, cached or not."""
    server = Server("--ctx-size", "8192", model=SOURCE)
    try:
        server.wait_until_serving()

        def ask(*turns: str, **more: object) -> str:
            messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
            body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, **more}
            return server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]

        out = {(p,): ask(p, cache_prompt=False) for p in PROMPTS}
        if server.state()["model"].get("row_independent", True):
            beside = [Stream(server, max_tokens=200) for _ in range(2)]
            wait_for(lambda: all(s.events for s in beside))
            assert {(p,): ask(p) for p in PROMPTS} == out, "neighbours or a cached prompt changed the server's own answers"
            for s in beside:
                s.join()
        first = (PROMPTS[0], out[PROMPTS[0],], PROMPTS[1])
        out[first] = ask(*first)
        yield out
    finally:
        server.end()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_run_says_what_the_server_says(answers: dict[tuple[str, ...], str], prompt: str):
    ended = run("run", SOURCE, "-p", prompt, *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == answers[prompt,].encode()


def test_a_prompt_from_stdin_is_the_same_prompt(answers: dict[tuple[str, ...], str]):
    assert run("run", SOURCE, *SMALL, text=PROMPTS[0]).stdout == answers[PROMPTS[0],].encode()


def test_chat_goes_on_where_it_was_and_begins_anew(answers: dict[tuple[str, ...], str]):
    """Two turns of one conversation, then a new one whose first answer does not depend on the old."""
    ended = run("chat", SOURCE, *SMALL, text="\n".join([PROMPTS[0], PROMPTS[1], "/new", PROMPTS[0], ""]))
    assert ended.returncode == 0, ended.stderr
    one = answers[PROMPTS[0],]
    two = answers[PROMPTS[0], one, PROMPTS[1]]
    assert ended.stdout.decode() == f"{one}\n{two}\n{one}\n"


def test_what_the_server_would_refuse_is_a_sentence():
    long = "word " * 3000
    ended = run("run", SOURCE, "-p", long, *SMALL)
    assert ended.returncode == 2 and b"This model's context is 2048 tokens" in ended.stderr and not ended.stdout
    assert b"Traceback" not in ended.stderr
    ended = run("chat", SOURCE, *SMALL, text=f"{long}\n")
    assert ended.returncode == 0 and b"/new begins a new conversation" in ended.stderr, "and the talk goes on"


@pytest.mark.parametrize("command", ["run", "chat"])
def test_ctrl_c_is_clean(command: str):
    """In the middle of an answer: `run` ends with 130, `chat` asks the next question; no traceback, no process left."""
    arguments = [sys.executable, "-m", "weir_server", command, SOURCE, "--ctx-size", "2048", "--temperature", "0"]
    talk = subprocess.Popen(
        [*arguments, *(["-p", PROMPTS[1]] if command == "run" else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert talk.stdin is not None and talk.stdout is not None and talk.stderr is not None
    if command == "chat":
        talk.stdin.write(f"{PROMPTS[1]}\n".encode())
        talk.stdin.flush()
    assert talk.stdout.read(1)
    talk.send_signal(signal.SIGINT)
    rest, err = talk.communicate(f"{PROMPTS[0]}\n".encode() if command == "chat" else None, timeout=WAIT)
    assert b"Traceback" not in err and b"Exception" not in err
    if command == "run":
        assert talk.returncode == 130
    else:
        assert talk.returncode == 0 and len(rest.splitlines()) >= 2, "the second question was answered"
