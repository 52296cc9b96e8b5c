"""One call as events over a real socket, with rows that the test feeds itself: comments, errors, a client that is stuck."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import tokenizers
from aiohttp import web
from tokenizers import models

from weir_server.http import sse
from weir_server.http.live import Call, LiveRow
from weir_server.http.observe import Row
from weir_server.http.shapes import CompletionShape
from weir_server.link.messages import Sampling, Submit
from weir_server.text.detok import RowText
from weir_server.text.tokenizer import Tokenizer

BYTES = Tokenizer(tokenizers.Tokenizer(models.BPE()), [bytes([i]) for i in range(256)], frozenset())
Serve = Callable[[Call], Awaitable[tuple[str, int, "asyncio.Future[BaseException | None]"]]]


def call(rows: int = 1) -> Call:
    c = Call("x", None, 0.0, ())
    submit = Submit(1, [5], Sampling(100), 0.0, n=rows)
    c.rows = [LiveRow(c, submit, i, i, i, 100, Row(0.0, 1), RowText(BYTES), admitted=True) for i in range(rows)]
    return c


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A server whose one route streams the given call; how the handler ended is a future."""
    runners = []

    async def begin(c: Call) -> tuple[str, int, asyncio.Future[BaseException | None]]:
        ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                response = await sse.stream(request, c, CompletionShape("x", "m", BYTES), False)
                ended.set_result(None)
            except Exception as e:
                ended.set_result(e)
                raise
            return response

        app = web.Application()
        app.add_routes([web.get("/", handler)])
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return host, port, ended

    yield begin
    for runner in runners:
        await runner.cleanup()


async def test_silence_is_filled_with_comments_and_all_rows_end_once(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
    c = call(rows=2)
    host, port, ended = await serve(c)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 10)
    for row in c.rows:
        row.put("text")
        row.end("stop")
    c.wake.set()
    rest = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 10)
    assert rest.count(b'"finish_reason":"stop"') == 2 and rest.count(b'"text":"text"') == 2
    assert await asyncio.wait_for(ended, 10) is None
    writer.close()


async def test_an_error_in_one_row_is_an_event_and_the_end(serve: Serve):
    c = call(rows=2)
    host, port, ended = await serve(c)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    c.rows[1].end("error", "inference backend error")
    c.wake.set()
    got = await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 10)
    assert b'data: {"error":{"message":"inference backend error"' in got
    assert await asyncio.wait_for(ended, 10) is None
    writer.close()


async def test_a_client_that_takes_nothing_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """Its rows' text is all that it can cost until then."""
    monkeypatch.setattr(sse, "STALL_SECONDS", 0.2)
    c = call()
    host, port, ended = await serve(c)
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stuck, (host, port))
        await asyncio.get_running_loop().sock_sendall(stuck, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        c.rows[0].put("x" * 30_000_000)  # more than the kernel's buffers hold
        c.wake.set()
        assert isinstance(await asyncio.wait_for(ended, 20), TimeoutError)
