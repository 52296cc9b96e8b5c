"""The load generator against a real HTTP server that behaves in every way a server can: each request has one honest outcome."""

import asyncio
import json

import pytest
from aiohttp import web

from weir_bench.arrivals import Arrival, Mix, schedule
from weir_bench.load import Client, closed_loop, open_loop


@pytest.fixture
async def server():
    """Answers by the prompt's length: 1 stream, 2 refusal, 3 break in mid-stream, 4 silence, 5 an error event."""
    seen, over = [], asyncio.Event()

    async def completions(request):
        body = await request.json()
        seen.append(body)
        kind = len(body["prompt"])
        if kind == 2:
            return web.json_response({"error": {"message": "Server is busy. Retry later.", "type": "overloaded"}}, status=503,
                                     headers={"Retry-After": "3"})
        if kind == 4:
            await over.wait()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)

        async def event(data):
            await answer.write(f"data: {json.dumps(data) if isinstance(data, dict) else data}\n\n".encode())

        await answer.write(b": still waiting\n\n")
        for i in range(body["max_tokens"]):
            finish = "length" if i == body["max_tokens"] - 1 else None
            if kind == 3 and i == 2:
                request.transport.close()
                return answer
            if kind == 5 and i == 2:
                await event({"error": {"message": "inference backend error"}})
                break
            await event({"choices": [{"index": 0, "text": " a", "finish_reason": finish}]})
            await asyncio.sleep(0.002)
        else:
            await event({"choices": [], "usage": {"prompt_tokens": kind, "completion_tokens": body["max_tokens"]}})
            await event("[DONE]")
        await answer.write_eof()
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    over.set()
    await runner.cleanup()


async def test_every_kind_of_end_is_told_apart(server):
    url, seen = server
    arrivals = [Arrival(0.01 * kind, kind, 6) for kind in (1, 2, 3, 4, 5)]
    heard = []
    async with Client(url, "m", timeout=1.0, keep_gaps=True) as client:
        report = await open_loop(client, arrivals, on_outcome=heard.append)
    whole, refused, broke, silent, failed = report.outcomes
    assert (whole.status, whole.tokens, whole.finish, whole.error) == (200, 6, "length", None)
    assert whole.ttft > 0 and whole.tpot > 0 and len(whole.gaps) == 5
    assert whole.tpot == pytest.approx(sum(whole.gaps) / 5)
    assert (refused.status, refused.retry_after, refused.ttft) == (503, 3.0, None) and "overloaded" in refused.error
    assert broke.status == 200 and broke.error is not None
    assert silent.status == 0 and "1 s" in silent.error
    assert failed.status == 200 and "inference backend error" in failed.error
    assert [o.broken for o in report.outcomes] == [False, False, True, False, True]
    assert len(heard) == 5
    assert seen[0]["model"] == "m" and seen[0]["ignore_eos"] is True


async def test_what_outlasts_the_drain_is_cancelled_and_still_counted(server):
    url, _ = server
    async with Client(url) as client:
        report = await open_loop(client, [Arrival(0.0, 4, 6), Arrival(0.0, 1, 2)], drain=0.5)
    assert [o.error for o in report.outcomes] == ["the run ended first", None]


async def test_prompts_have_exact_lengths_and_share_no_prefix(server):
    url, seen = server
    async with Client(url, seed=5) as client:
        await open_loop(client, schedule(200, 0.2, Mix(prompt=40, output=2), seed=1))
    prompts = [tuple(body["prompt"]) for body in seen]
    assert sorted(map(len, prompts)) == sorted(a.prompt for a in schedule(200, 0.2, Mix(prompt=40, output=2), seed=1))
    assert len({p[:4] for p in prompts}) == len(prompts)


async def test_nobody_listening_is_an_outcome_not_a_crash(unused_tcp_port):
    async with Client(f"http://127.0.0.1:{unused_tcp_port}") as client:
        report = await open_loop(client, [Arrival(0.0, 1, 1)])
    assert report.outcomes[0].status == 0 and "Connect" in report.outcomes[0].error


async def test_closed_loop_shares_the_work_among_its_clients(server):
    url, seen = server
    async with Client(url) as client:
        report = await closed_loop(client, 3, [Arrival(0, 1, 3)] * 10)
    assert len(seen) == len(report.outcomes) == 10 and all(o.tokens == 3 for o in report.outcomes)
    assert report.lag_max >= report.lag_p99 >= report.lag_p50 >= 0 and report.cpu >= 0
