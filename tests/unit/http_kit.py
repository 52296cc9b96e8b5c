"""The HTTP side in this process over a real engine child that runs the null model; real sockets, faults put in by hand.

`Kit.stop_engine` sends SIGSTOP: what was queued then stays queued for as long as a test needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from weir_server.contract import Slo
from weir_server.http import lifecycle
from weir_server.http.bind import bind, url_of
from weir_server.http.engine_client import EngineClient
from weir_server.http.service import Model, Options, Service
from weir_server.link.messages import Boot
from weir_server.text.defaults import GenerationDefaults
from weir_server.text.template import ChatTemplate
from weir_server.text.tokenizer import Tokenizer, _byte_level

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE = 20.0
BOOT: dict[str, Any] = {
    "model": "null", "threads": 1, "null_model": True, "num_blocks": 1000, "context_per_slot": 1024,
    "kv_cache_budget_min": 4096,
}  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """One id for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core, [_byte_level(c) for c in alphabet], frozenset())


class Told:
    """In place of the process's signals."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()


class Kit:
    def __init__(self, service: Service, session: aiohttp.ClientSession, url: str, control: str) -> None:
        self.service, self.session, self.url, self.control = service, session, url, control
        self.told = Told()
        self.life = asyncio.ensure_future(lifecycle._run(service, self.told))  # type: ignore[arg-type]
        self._seq = 0

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any, Any]:
        """(status, JSON, headers)."""
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    def begin(self, body: dict[str, Any], path: str = COMPLETION, **headers: str) -> asyncio.Task[tuple[int, Any, Any]]:
        return asyncio.create_task(self.post(path, body, **headers))

    async def put(self, **body: Any) -> tuple[int, Any]:
        self._seq += 1
        ours = {"instance": self.service.board.instance, "epoch": 1, "seq": self._seq, "lease_seconds": 60, "knobs": {}}
        async with self.session.put(self.control + "/control/knobs", json={**ours, **body}) as answer:
            return answer.status, await answer.json()

    def stop_engine(self) -> None:
        self.service.engine._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.service.engine._process.send_signal(signal.SIGCONT)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - what changes it has no event
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(boot: dict[str, Any] | None = None, template: str = "x", **options: Any) -> AsyncIterator[Kit]:
    engine = EngineClient(Boot(**{**BOOT, **(boot or {})}))
    clients, controls = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    try:
        model = Model("null", byte_tokenizer(), ChatTemplate(template), GenerationDefaults(()))
        async with asyncio.timeout(60):
            service = Service(model, await engine.ready(), engine, Options(slo=Slo(2.0, 0.1), **options))
        async with lifecycle._listening(service, clients, controls), aiohttp.ClientSession() as session:
            kit = Kit(service, session, url_of(clients, "127.0.0.1"), url_of(controls, "127.0.0.1"))
            yield kit
            kit.go_on()
            kit.life.cancel()
            await asyncio.gather(kit.life, return_exceptions=True)
    finally:
        await engine.stop()
        for sock in (*clients, *controls):
            sock.close()
