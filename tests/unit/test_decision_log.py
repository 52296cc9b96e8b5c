"""The decision log and its replay: the same readings give the same decisions, and a changed one is found (O5)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from fake_server import FakeServer
from test_tuner_loop import News, resource
from typer.testing import CliRunner

from weir_operator.cli.app import app
from weir_operator.cli.decision_log import DecisionLog
from weir_operator.io.scrape import ControlClient
from weir_operator.loops.steering import Subject
from weir_operator.loops.tuner import TunerLoop, TunerSettings
from weir_server.contract import Histogram


def traffic(i: int) -> dict[str, Any]:
    """An overloaded pod after `i` polls of 5 s: three rows a second offered, one served, four running, 32 waiting."""
    t, ttft, tpot = 5.0 * i, Histogram(), Histogram()
    for k in range(5 * i):
        ttft.observe(10.0 + k % 3)
        tpot.observe(0.05 + 0.001 * (k % 7))
    steps, rows = 100.0 * i, 400.0 * i
    sums = {"steps": steps, "step_seconds": t, "decode_rows": rows, "context_tokens": 100 * rows, "prefill_tokens": 640.0 * i}
    return {
        "monotonic": 1000.0 + t, "running": 4, "waiting": 32, "oldest_wait": 11.0, "bound": "slots", "decoding_seconds": t,
        "running_seconds": 4 * t, "waiting_seconds": 32 * t,
        "head_wait_seconds": {"slots": t, "kv": 0.0, "prefill": 0.0, "drain": 0.0},
        "step": sums, "queued": 5 * i + 36, "admitted": 5 * i + 4, "refused": {"queue_full": {"slots": 10 * i}},
        "finished": {"stop": 0, "length": 5 * i, "cancelled": 0, "error": 0, "handed_back": 0},
        "generated_tokens": 320 * i, "prompt_tokens": 640 * i,
        "slo_total": 5 * i, "slo_good": {"ttft": 0, "tpot": i, "both": 0},
        "histograms": {
            "ttft": ttft, "prefill_seconds": tpot, "queue_time": ttft, "tpot": tpot, "decode_interval": tpot,
        },
        "settled": {"ttft": ttft, "tpot": tpot, "decode_interval": tpot},
    }


@pytest.fixture
async def log(tmp_path: Path) -> Any:
    file, news = tmp_path / "log.jsonl", News()
    written = DecisionLog(file)
    async with FakeServer() as server, ControlClient() as client:
        now = [1000.0]
        subject = Subject("local/chat", resource(), (server.endpoint(),))
        loop = TunerLoop(client, lambda: [subject], lambda: 1, news, TunerSettings(30, 5, 180), clock=lambda: now[0])
        for i in range(30):
            server.counters = traffic(i)
            await loop.once()
            written.write(news.rounds[-1])
            now[0] += 5
    written.close()
    assert sum(len(r.decision.records) for r in news.rounds) >= 3
    assert any(r.decision.moves for r in news.rounds), [rec.reason for r in news.rounds for rec in r.decision.records]
    return file


def replay(file: Path) -> Any:
    return CliRunner().invoke(app, ["replay", str(file)])


def test_a_replay_decides_the_same(log: Path) -> None:
    result = replay(log)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("30 decisions")


async def test_a_log_that_begins_with_silence_can_be_replayed(tmp_path: Path) -> None:
    file, news = tmp_path / "log.jsonl", News()
    written = DecisionLog(file)
    async with FakeServer() as server, ControlClient() as client:
        silent = replace(server.endpoint(), token="another")
        for endpoint in (silent, silent, server.endpoint()):
            loop = TunerLoop(client, lambda e=endpoint: [Subject("l/c", resource(), (e,))], lambda: 1, news, TunerSettings())
            await loop.once()
            written.write(news.rounds[-1])
    written.close()
    result = replay(file)
    assert result.exit_code == 0, result.output


def test_a_decision_that_was_tampered_with_is_found(log: Path) -> None:
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    records = [r for line in lines if "now" in line for r in line["records"]]
    records[-1]["reason"] = "because"
    log.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    result = replay(log)
    assert result.exit_code == 1
    assert "differs" in result.output


@pytest.mark.parametrize("content", [b"not json\n", b'{"now": 1}\n', b'{"pod": "a"}\n'])
def test_another_file_is_one_line_and_status_2(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x"
    file.write_bytes(content)
    result = replay(file)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
