"""A server that plays a rival under measurement: python rival.py PORT MODE FOLDER. It leaves its process id in FOLDER.

MODE: batching (all rows advance with one pass), serial (each row has passes of its own), silent (its /metrics counts nothing),
mortal (ends with the fourth request), short (answers with half the tokens), slow (a token a second), quick (300 of them),
stillborn (ends at once).
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

PASS_SECONDS = {"slow": 1.0, "quick": 0.003}
GATHER = 0.3
"""Seconds that the first of a burst waits for the others, so that they decode together however slow the machine is."""


class Rival:
    def __init__(self, mode):
        self.mode, self.requests, self.tokens, self.passes, self.waiting, self.open = mode, 0, 0, 0, 0, 0
        self.turn = asyncio.Condition()

    async def run(self):
        """A pass; every stream that waits gets a token."""
        first = True
        while True:
            await asyncio.sleep(PASS_SECONDS.get(self.mode, 0.02))
            if first and self.open:
                await asyncio.sleep(GATHER)
            first = not self.open
            async with self.turn:
                self.passes += bool(self.waiting)
                self.waiting = 0
                self.turn.notify_all()

    async def completions(self, request):
        body = await request.json()
        self.requests, self.open = self.requests + 1, self.open + 1
        if self.mode == "mortal" and self.requests > 3:
            print("out of memory, or so", flush=True)
            os._exit(3)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        tokens = body["max_tokens"] // 2 if self.mode == "short" else body["max_tokens"]
        for i in range(tokens):
            async with self.turn:
                self.waiting += 1
                await self.turn.wait()
            self.tokens += 1
            finish = "length" if i + 1 == tokens else None
            data = {"choices": [{"index": 0, "text": "a", "finish_reason": finish}]}
            await answer.write(f"data: {json.dumps(data)}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": tokens}}
        await answer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        self.open -= 1
        return answer

    async def metrics(self, _):
        passes = self.tokens if self.mode == "serial" else self.passes
        counts = f"# HELP rival_tokens x\nrival_tokens {self.tokens}\nrival_passes {passes}\n"
        return web.Response(text="" if self.mode == "silent" else counts)


async def main(port, mode):
    if mode == "stillborn":
        raise SystemExit("the port is taken, say")
    rival, app = Rival(mode), web.Application(client_max_size=1 << 24)

    async def health(_):
        return web.Response(text="ok")

    app.router.add_get("/health", health)
    app.router.add_get("/metrics", rival.metrics)
    app.router.add_post("/v1/completions", rival.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await rival.run()


if __name__ == "__main__":
    Path(sys.argv[3], f"{os.getpid()}.pid").touch()
    asyncio.run(main(*sys.argv[1:3]))
