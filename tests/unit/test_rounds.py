"""The operator's answer to "why": the last round of a deployment explained, over the health port, and forgotten in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import orjson
from test_decision_log import rounds
from test_tuner_loop import resource

from weir_operator.io.processes import free_port
from weir_operator.loops.health import serve
from weir_operator.loops.rounds import KEEP_SECONDS, Rounds
from weir_operator.loops.steering import Subject


async def test_the_last_round_is_explained_over_the_health_port() -> None:
    kept = Rounds()
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


async def test_what_is_no_longer_polled_is_forgotten_and_so_are_pods_that_went() -> None:
    kept, heard = Rounds(), []

    def keep(of: str, round_: Any) -> None:
        heard.append(round_)
        kept.heard(Subject(of, resource(), ()), round_)

    await rounds(("ns/a",), 8, keep)
    last = heard[-1]
    kept.heard(Subject("ns/b", resource(), ()), replace(last, now=last.now + KEEP_SECONDS - 1))
    assert kept.explained("ns/a") is not None
    kept.heard(Subject("ns/b", resource(), ()), replace(last, now=last.now + KEEP_SECONDS + 1, pods={}))
    assert kept.explained("ns/a") is None
    assert (kept.explained("ns/b") or {})["pods"] == []
