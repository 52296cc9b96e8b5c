"""The operator's answer to "why": the last round of a deployment explained, over the health port, and forgotten in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from fake_server import FakeServer
from test_decision_log import rounds
from test_operator_parts import Bench as Parts
from test_tuner_loop import Bench, Law, resource

from weir_operator.io.processes import free_port
from weir_operator.io.scrape import ControlClient
from weir_operator.loops.health import serve
from weir_operator.loops.operator import ClusterSink
from weir_operator.loops.rounds import KEEP_SECONDS, Rounds
from weir_operator.loops.steering import Subject
from weir_operator.loops.store import Store


async def test_the_last_round_is_explained_over_the_health_port() -> None:
    kept = Rounds(lambda: 1070.0)
    await rounds(("ns/chat",), 14, lambda of, round_: kept.heard(Subject(of, resource(), ()), round_))
    runner = await serve(port := free_port("127.0.0.1"), lambda: None, lambda: None, kept.explained)
    try:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/explain/ns/chat") as answer:
                found = orjson.loads(await answer.read())
            async with session.get(f"{url}/explain/ns/other") as answer:
                assert answer.status == 404
                assert "does not steer ns/other" in await answer.text()
    finally:
        await runner.cleanup()
    [pod] = found["pods"]
    assert (pod["pod"], pod["limit"]["what"], pod["limit"]["waiting"]) == ("chat-0", "slots", 32)
    assert pod["record"]["rule"] and pod["fit"]["steps"] > 0 and pod["traffic"]["offered"] > 0
    assert found["slo"] == {"ttft": 1.0, "tpot": 0.05} and found["mode"] == "Auto"


async def test_what_was_not_polled_for_long_is_not_explained_and_pods_that_went_are_forgotten() -> None:
    now, heard = 1000.0, []
    kept = Rounds(lambda: now)

    def keep(of: str, round_: Any) -> None:
        heard.append(round_)
        kept.heard(Subject(of, resource(), ()), round_)

    await rounds(("ns/a",), 8, keep)
    last = heard[-1]
    now = last.now + KEEP_SECONDS
    assert kept.explained("ns/a") is not None
    now += 1
    assert kept.explained("ns/a") is None, "nobody else needs to be heard for it"
    kept.heard(Subject("ns/a", resource(), ()), replace(last, now=now, pods={}))
    assert (kept.explained("ns/a") or {})["pods"] == []


@pytest.mark.parametrize("end", ["the lead", "the resource"])
async def test_who_no_longer_steers_no_longer_explains(end: str) -> None:
    """An operator that led until a moment ago does not answer for the one that leads."""
    async with FakeServer() as server, ControlClient() as client:
        bench = Bench(client, [server.endpoint()], Law())
        kept = Rounds(lambda: bench.now)
        bench.loop._sink = ClusterSink(Parts().reconciler, Parts().queue, Store(), kept, ())
        await bench.poll()
        assert kept.explained("ns/chat")
        if end == "the lead":
            bench.epoch = None
        else:
            bench.loop._subjects = list
        await bench.poll()
    assert kept.explained("ns/chat") is None


async def test_what_is_forgotten_in_the_midst_of_an_answer_is_answered_whole() -> None:
    """Explanations are made in a thread of their own, beside the loop that forgets."""
    [round_] = (await rounds(("ns/chat",), 1, lambda *_: None)).rounds

    def meanwhile() -> float:
        kept.forgotten("ns/chat")
        return round_.now

    kept = Rounds(meanwhile)
    kept.heard(Subject("ns/chat", resource(), ()), round_)
    assert (kept.explained("ns/chat") or {})["pods"]
    assert kept.explained("ns/chat") is None
