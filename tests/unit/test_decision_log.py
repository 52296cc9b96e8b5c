"""The decision log and its replay: the same readings give the same decisions, and a changed one is found (O5)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from fake_server import FakeServer
from test_tuner_loop import News, resource
from typer.testing import CliRunner

from weir_operator.cli import decision_log
from weir_operator.cli.app import app
from weir_operator.cli.decision_log import DecisionLog
from weir_operator.io.scrape import ControlClient
from weir_operator.loops.steering import Subject
from weir_operator.loops.tuner import TunerLoop, TunerSettings
from weir_operator.tuner.law import decide
from weir_operator.tuner.types import Decision, TunerSpec, TunerState
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


async def rounds(of: tuple[str, ...], polls: int, write: Any) -> News:
    """`polls` rounds of overloaded deployments, each given to `write` with its name."""
    news = News()
    async with FakeServer() as server, ControlClient() as client:
        now = [1000.0]
        subjects = [Subject(name, resource(), (server.endpoint(),)) for name in of]
        loop = TunerLoop(client, lambda: subjects, lambda: 1, news, TunerSettings(30, 5, 180), clock=lambda: now[0])
        for i in range(polls):
            server.counters = traffic(i)
            await loop.once()
            for name, round_ in zip(of, news.rounds[-len(of):], strict=True):
                write(name, round_)
            now[0] += 5
    return news


@pytest.fixture
async def log(tmp_path: Path) -> Any:
    written = DecisionLog(file := tmp_path / "log.jsonl")
    news = await rounds(("local/chat",), 30, written.write)
    written.close()
    assert sum(len(r.decision.records) for r in news.rounds) >= 3
    assert any(r.decision.moves for r in news.rounds), [rec.reason for r in news.rounds for rec in r.decision.records]
    return file


def replay(file: Path, *args: str) -> Any:
    return CliRunner().invoke(app, ["replay", str(file), *args])


def cautious(state: TunerState, pods: Any, spec: TunerSpec, now: float) -> Decision:
    """A law that never lets the batch grow."""
    bounds = {**spec.bounds, "max_batch_size": (None, 4)}
    return decide(state, pods, replace(spec, bounds=bounds), now)


def test_another_law_is_shown_where_it_differs(log: Path) -> None:
    result = replay(log, "--with-law", f"{__name__}:cautious")
    assert result.exit_code == 1
    assert "then: Moved (set-point), max_batch_size 4 → " in result.output
    new = next(line for line in result.output.splitlines() if line.strip().startswith("new:"))
    assert "max_batch_size" not in new
    assert "of 30 decisions differ" in result.output
    assert replay(log, "--with-law", "weir_operator.tuner.law:decide").exit_code == 0
    for wrong in ("nothing", "no.such:law", "weir_operator.tuner.law:nothing", "weir_operator.tuner.law:REVERSAL_TICKS"):
        result = replay(log, "--with-law", wrong)
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output


async def test_deployments_share_a_log_and_an_excerpt_of_it_amid_other_output_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision_log, "BEGIN_EVERY", 40.0)
    written = DecisionLog(file := tmp_path / "log.jsonl")
    await rounds(("a/one", "b/two"), 30, written.write)
    written.close()
    assert replay(file).output.startswith("60 decisions")
    lines = file.read_bytes().splitlines(keepends=True)
    noise = [b"2026-01-01 INFO weir: leading\n", b'{"level": "INFO", "of": 3}\n', b"[]\n"]
    excerpt = tmp_path / "excerpt"
    excerpt.write_bytes(b"".join([lines[40][9:], *lines[41:60], *noise, *lines[60:-1], lines[-1][:50]]))
    result = replay(excerpt)
    assert result.exit_code == 0, result.output
    assert 30 < int(result.output.split()[0]) < 60


async def test_a_full_file_makes_room_and_each_of_both_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decision_log, "MOST_BYTES", 300_000)
    written = DecisionLog(file := tmp_path / "log.jsonl")
    await rounds(("a/one",), 140, written.write)
    written.close()
    before = file.with_name("log.jsonl.1")
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", "log.jsonl.1"]
    assert 300_000 < before.stat().st_size < 450_000, file.stat().st_size
    assert [replay(f).exit_code for f in (before, file)] == [0, 0], replay(file).output


async def test_a_change_of_leader_begins_anew_with_what_the_status_held(tmp_path: Path) -> None:
    """The second loop knows nothing of the first one's memory: its decisions are replayed from its own start."""
    written = DecisionLog(file := tmp_path / "log.jsonl")
    for _ in range(2):
        await rounds(("a/one",), 20, written.write)
    written.close()
    begins = [line for line in map(orjson.loads, file.read_bytes().splitlines()) if "begin" in line]
    assert [line["again"] for line in begins] == [False, False]
    assert replay(file).output.startswith("40 decisions")


async def test_a_disk_that_is_full_costs_a_gap_and_no_tick(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = DecisionLog(file := tmp_path / "log.jsonl")
    calls = 0

    def write(of: str, round_: Any) -> None:
        nonlocal calls
        calls += 1
        whole, written._file = written._file, Full() if 8 <= calls < 12 else written._file
        written.write(of, round_)
        written._file = whole

    await rounds(("a/one",), 30, write)
    written.close()
    assert caplog.text.count("has a gap") == 1
    assert replay(file).output.startswith("26 decisions")


class Full:
    def write(self, text: bytes) -> int:
        return len(text)

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


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
            written.write("l/c", news.rounds[-1])
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


OTHERS = [b"not json\n", b'{"of": "a", "begin": 1, "again": false}\n', b'{"of": "a", "pod": "a"}\n', b""]


@pytest.mark.parametrize("content", OTHERS)
def test_another_file_is_one_line_and_status_2(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x"
    file.write_bytes(content)
    result = replay(file)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
