"""Engines that are libraries, behind the least of a server: POST /v1/completions with token ids, streamed, and their counters.

    python -m weir_bench.serving.adapters ENGINE MODEL.gguf --port N

Started by weir_bench.serving for the contenders of that name; the HTTP side costs each of them the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

Tell = Callable[[int, bool], None]
"""Of one request, on the event loop: how many tokens came, and whether it has ended."""


class Engine(Protocol):
    """`forwards`: passes so far."""

    forwards: int

    def submit(self, ids: list[int], max_tokens: int, tell: Tell) -> None:
        """On the event loop; end tokens are ignored."""


class Transformers:
    """transformers' continuous batching: what generate_batch runs on, with its tokens as they come."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        import torch
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        torch.set_num_threads(args.threads)
        self.model, self.forwards, self.ids = _llama(path), 0, itertools.count()
        self.model.register_forward_hook(self._count)
        tokens = args.slots * args.slot_tokens
        config = ContinuousBatchingConfig(
            page_size=64, num_blocks=tokens // 64 + 8, max_batch_tokens=512, allow_block_sharing=False, use_cuda_graph=False,
        )  # fmt: skip
        greedy = GenerationConfig(do_sample=False, max_new_tokens=64, eos_token_id=-1, pad_token_id=0)
        self.manager = self.model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
        self.manager.start()

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def submit(self, ids: list[int], max_tokens: int, tell: Tell) -> None:
        name, said = f"r{next(self.ids)}", 0

        def heard(output: Any) -> None:
            nonlocal said
            new, said = len(output.generated_tokens) - said, len(output.generated_tokens)
            tell(new, output.is_finished())

        self.manager.register_result_handler(name, heard)
        self.manager.add_request(ids, request_id=name, max_new_tokens=max_tokens, streaming=True)


def _llama(path: Path) -> Any:
    """LlamaForCausalLM in float32 with the weights that our loader reads from `path`."""
    from weir_bench.reference import llama
    from weir_server.model.loader import load_checkpoint

    checkpoint = load_checkpoint(path, quantize="none")
    return llama(checkpoint.config, checkpoint.weights, "sdpa")


class OpenVino:
    """openvino-genai's ContinuousBatchingPipeline on the .gguf as it is, stepped by a thread of its own."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        import numpy
        import openvino
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.dynamic_split_fuse, scheduler.cache_size = args.slots, True, 1
        scheduler.enable_prefix_caching = False
        self.genai, self.forwards, self.ids = genai, 0, itertools.count()
        self.tensor: Any = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        self.pipe = genai.ContinuousBatchingPipeline(
            str(path), scheduler, "CPU", {"INFERENCE_NUM_THREADS": args.threads}
        )  # fmt: skip
        self.loop, self.live = asyncio.get_running_loop(), dict[int, tuple[Any, Tell]]()
        self.work = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, ids: list[int], max_tokens: int, tell: Tell) -> None:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        with self.work:
            name = next(self.ids)
            self.live[name] = (self.pipe.add_request(name, self.tensor(ids), config), tell)
            self.work.notify()

    def _run(self) -> None:
        while True:
            with self.work:
                self.work.wait_for(lambda: self.live)
            self.pipe.step()
            self.forwards += 1
            for name, (handle, tell) in list(self.live.items()):
                new = sum(len(o.generated_ids) for o in handle.read().values()) if handle.can_read() else 0
                ended = handle.get_status() == self.genai.GenerationStatus.FINISHED and not handle.can_read()
                if ended:
                    with self.work:
                        del self.live[name]
                if new or ended:
                    self.loop.call_soon_threadsafe(tell, new, ended)
            self._let_write()

    def _let_write(self) -> None:
        """A step holds the interpreter's lock, so the next one waits until the events of this one are written: one turn of
        the loop hears the tokens, the next writes them."""
        written = threading.Event()
        self.loop.call_soon_threadsafe(self.loop.call_soon, self.loop.call_soon, written.set)
        written.wait(1.0)


ENGINES: dict[str, Callable[[Path, argparse.Namespace], Engine]] = {"transformers": Transformers, "openvino-genai": OpenVino}


class Service:
    """The HTTP side."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tokens = engine, 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        heard: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        self.engine.submit(body["prompt"], body["max_tokens"], lambda new, ended: heard.put_nowait((new, ended)))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        tokens, ended = 0, False
        while not ended:
            new, ended = await heard.get()
            tokens, self.tokens = tokens + new, self.tokens + new
            if new or ended:
                await self._event(answer, {"choices": [{"index": 0, "text": "", "finish_reason": "length" if ended else None}]})
        await self._event(answer, {"choices": [], "usage": {"completion_tokens": tokens}})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _event(self, answer: web.StreamResponse, data: dict[str, Any]) -> None:
        await answer.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"adapter_tokens_total {self.tokens}\nadapter_forwards_total {self.engine.forwards}\n")

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")


async def serve(args: argparse.Namespace) -> None:
    service = Service(ENGINES[args.engine](args.model, args))
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", service.completions)
    app.router.add_get("/metrics", service.metrics)
    app.router.add_get("/health", service.health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m weir_bench.serving.adapters", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--slot-tokens", type=int, default=256)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
