"""Load over HTTP: open loop (requests leave when the schedule says, whatever the server does) or closed (n clients in turn).

Every request ends in one `Outcome`, also when it is refused, times out or breaks. The generator watches itself: a run in
which its own event loop lagged is not to be believed, so lag and CPU are part of the report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from weir_bench.arrivals import Arrival, prompt_ids
from weir_bench.goodput import quantile
from weir_bench.process import Child

NICE = 10
LAG_INTERVAL = 0.01
TAIL_BYTES = 4096
"""Enough of a stream's end to hold its last event with a finish reason, the usage event and [DONE]."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds; `offered`, `sent` and `ended` since the start of the run.

    status: HTTP status, or 0 where no answer came (`error` says why). ttft counts from when the request was *due*, so that
    a late generator flatters nobody. tpot: mean time between tokens after the first; None where fewer than two came.
    """

    offered: float
    prompt: int
    output: int
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    ttft: float | None = None
    tpot: float | None = None
    tokens: int = 0
    finish: str | None = None
    retry_after: float | None = None
    error: str | None = None
    given_up: bool = False  # by us, for lack of time
    gaps: list[float] = field(default_factory=list)  # between events, where asked for

    @property
    def broken(self) -> bool:
        """Neither answered nor refused as a server should."""
        return not self.given_up and (self.status not in (200, 503) or (self.status == 200 and self.error is not None))


@dataclass(slots=True)
class Report:
    """A run: outcomes in order of offer; loop lag (s) and CPU (share of one core) of the generator itself."""

    outcomes: list[Outcome]
    seconds: float
    lag_p50: float
    lag_p99: float
    lag_max: float
    cpu: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Client:
    """Sends completions to one server. Use as an async context manager."""

    def __init__(self, url: str, model: str | None = None, *, seed: int = 0, timeout: float = 120.0, keep_gaps: bool = False,
                 extra: dict[str, Any] | None = None) -> None:
        self.url, self.model, self.timeout, self.keep_gaps = url.rstrip("/"), model, timeout, keep_gaps
        self.extra = extra or {}
        self.rng = random.Random(seed)
        self.start = time.monotonic()

    async def __aenter__(self) -> Client:
        # no limit on connections: an open-loop generator must never queue on its own side; each request on a new one, since
        # some servers close idle ones just when the next request is written
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self.start = time.monotonic()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    def now(self) -> float:
        return time.monotonic() - self.start

    async def send(self, arrival: Arrival, offered: float) -> Outcome:
        """One streamed completion of exactly `arrival.output` tokens over a prompt of exactly `arrival.prompt`."""
        body = {
            "prompt": prompt_ids(arrival.prompt, self.rng), "max_tokens": arrival.output, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, **self.extra,
        }
        if self.model is not None:
            body["model"] = self.model
        outcome = Outcome(offered, arrival.prompt, arrival.output, sent=self.now())
        try:
            async with asyncio.timeout(self.timeout):
                async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
                    outcome.status = answer.status
                    if answer.status == 200:
                        await self._stream(answer, outcome)
                    else:
                        outcome.retry_after = _number(answer.headers.get("Retry-After"))
                        outcome.error = (await answer.text())[:200]
        except TimeoutError:
            outcome.error, outcome.given_up = f"no end within {self.timeout:g} s", True
        except aiohttp.ClientError as e:
            outcome.error = f"{type(e).__name__}: {e}"
        except asyncio.CancelledError:
            outcome.error, outcome.given_up = "the run ended first", True
        outcome.ended = self.now()
        return outcome

    async def _stream(self, answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
        """Reads events without parsing each: only the tail is, for its usage and finish reason."""
        first = last = None
        tail = b""
        async for chunk in answer.content.iter_any():
            tail = (tail + chunk)[-TAIL_BYTES:]
            events = chunk.count(b'"choices":[{') + chunk.count(b'"choices": [{')
            if not events:
                continue  # keep-alive comments, usage, [DONE]
            now = self.now()
            if first is None:
                first = last = now
                outcome.ttft = now - outcome.offered
                events -= 1
            if self.keep_gaps and events:
                outcome.gaps += [now - (last or now), *[0.0] * (events - 1)]  # what came together came at once
            last = now
        for event in _events(tail):
            if "error" in event:
                outcome.error = str(event["error"])[:200]
            for choice in event.get("choices") or []:
                outcome.finish = choice.get("finish_reason") or outcome.finish
            if usage := event.get("usage"):
                outcome.tokens = usage["completion_tokens"]
        if outcome.finish is None and outcome.error is None:
            outcome.error = "the stream ended without a finish reason"
        if first is not None and last is not None and outcome.tokens > 1:
            outcome.tpot = (last - first) / (outcome.tokens - 1)


async def open_loop(client: Client, arrivals: list[Arrival], *, drain: float = 60.0,
                    on_outcome: Callable[[Outcome], None] | None = None) -> Report:
    """Offers `arrivals` when they are due, then waits at most `drain` seconds for the last to end and cancels what is left."""
    tasks: list[asyncio.Task[Outcome]] = []
    async with Watch() as watch:
        client.start = time.monotonic()
        try:
            for arrival in arrivals:
                await asyncio.sleep(max(0.0, arrival.at - client.now()))
                tasks.append(asyncio.create_task(_sent(client, arrival, on_outcome)))
            if tasks:
                await asyncio.wait(tasks, timeout=drain)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = [o for o in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(o, Outcome)]
    return watch.report(outcomes)


async def _sent(client: Client, arrival: Arrival, on_outcome: Callable[[Outcome], None] | None) -> Outcome:
    outcome = await client.send(arrival, arrival.at)
    if on_outcome is not None:
        on_outcome(outcome)
    return outcome


async def closed_loop(client: Client, clients: int, arrivals: list[Arrival]) -> Report:
    """`clients` workers share `arrivals` (their times are ignored): each sends its next when its last has ended."""
    queue: Iterator[Arrival] = iter(arrivals)
    outcomes: list[Outcome] = []

    async def worker() -> None:
        for arrival in queue:
            outcomes.append(await client.send(arrival, client.now()))

    async with Watch() as watch:
        client.start = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(clients)))
    return watch.report(sorted(outcomes, key=lambda o: o.offered))


class Watch:
    """Measures its own event loop's lag and the process's CPU while the context is open."""

    async def __aenter__(self) -> Watch:
        self.lags: list[float] = []
        self.began, self.cpu = time.monotonic(), _cpu_seconds()
        self.task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.seconds = time.monotonic() - self.began
        self.share = (_cpu_seconds() - self.cpu) / max(self.seconds, 1e-9)

    async def _sample(self) -> None:
        while True:
            due = time.monotonic() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            self.lags.append(max(0.0, time.monotonic() - due))

    def report(self, outcomes: list[Outcome]) -> Report:
        lags = self.lags or [0.0]
        return Report(outcomes, self.seconds, quantile(lags, 0.5), quantile(lags, 0.99), max(lags), self.share)


def _events(tail: bytes) -> Iterator[dict[str, Any]]:
    for line in tail.split(b"\n"):
        if line.startswith(b"data:") and b"[DONE]" not in line:
            with suppress(ValueError):  # the first line of the tail may be half an event
                event = json.loads(line[5:])
                if isinstance(event, dict):
                    yield event


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def offered(
    url: str, arrivals: Path, *, model: str | None = None, seed: int = 0, drain: float = 60.0, keep_gaps: bool = False,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Open loop from a niced process of its own: the server goes first, and the lag reported is not this process's.

    `arrivals`: a file of the JSON that `arrivals.to_json` gives. Raises RuntimeError if the generator ends without a report.
    """
    command = [sys.executable, "-m", "weir_bench.load", url, arrivals, f"--seed={seed}", f"--drain={drain}"]
    command += [f"--model={model}"] if model else []
    command += ["--gaps"] if keep_gaps else []
    outcomes: list[Outcome] = []
    async with Child(command, nice=NICE, paths=(Path(__file__).parent.parent,)) as generator:
        async for line in generator.lines():
            message = json.loads(line)
            if "report" in message:
                return Report(sorted(outcomes, key=lambda o: o.offered), **message["report"])
            outcomes.append(Outcome(**message["outcome"]))
            on_outcome(outcomes[-1])
    raise RuntimeError("the load generator ended without a report")


async def _run(args: argparse.Namespace) -> None:
    def tell(outcome: Outcome) -> None:
        print(json.dumps({"outcome": asdict(outcome)}), flush=True)

    arrivals = [Arrival(**a) for a in json.loads(args.arrivals.read_text())]
    async with Client(args.url, args.model, seed=args.seed, keep_gaps=args.gaps) as client:
        report = (await open_loop(client, arrivals, drain=args.drain, on_outcome=tell)).to_json()
    del report["outcomes"]
    print(json.dumps({"report": report}), flush=True)


def main() -> None:
    """Open loop from a file of arrivals: outcomes as they come, then the report, as JSON lines on standard output."""
    parser = argparse.ArgumentParser(prog="python -m weir_bench.load", description=main.__doc__)
    parser.add_argument("url")
    parser.add_argument("arrivals", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drain", type=float, default=60.0, help="seconds to wait after the last arrival")
    parser.add_argument("--gaps", action="store_true", help="keep the times between tokens")
    with suppress(KeyboardInterrupt):
        asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
