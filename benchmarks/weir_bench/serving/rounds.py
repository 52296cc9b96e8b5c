"""One cell: a load on one server, what came of it, and whether it batched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp

from weir_bench import results
from weir_bench.arrivals import Arrival
from weir_bench.goodput import quantile
from weir_bench.load import Client, Outcome, Report, closed_loop, open_loop
from weir_bench.servers import Running, ServerError
from weir_bench.serving import peers
from weir_bench.serving.peers import Contender, Setting
from weir_bench.serving.record import OUTPUT, PROMPT, Cell, Server

LEAST_SHARE = 0.2
"""Of its clients, that a server must advance with one forward pass on average, to be said to batch. Prompts that are
prefilled beside the decodes keep the mean well below 1."""
IDLE_SECONDS = 1.0


class NotBatchingError(ServerError):
    """Its counters say that it served its clients one after the other."""


@dataclass(frozen=True, slots=True)
class Up:
    """A contender that runs."""

    contender: Contender
    running: Running
    server: Server

    @property
    def name(self) -> str:
        return self.contender.name

    def client(self, seed: int, keep_gaps: bool = True) -> Client:
        return Client(self.running.url, seed=seed, timeout=300, keep_gaps=keep_gaps, extra=dict(self.contender.extra))


@asynccontextmanager
async def all_up(contenders: Sequence[Contender], setting: Setting) -> AsyncIterator[dict[str, Up]]:
    """All of them, started in turn, each with kernels for this processor, warm and quiet. Raises ServerError."""
    shape, machine = peers.shape_of(setting.path), results.machine()["isa"]
    async with AsyncExitStack() as stack:
        up = {}
        for contender in contenders:
            try:
                running = await stack.enter_async_context(contender.start(setting))
            except ServerError as e:
                raise ServerError(f"{contender.name}: {e}") from None
            isa = await contender.isa(running)
            if isa is not None:
                peers.refuse_other_kernels(contender.name, isa, machine)
            version = await asyncio.to_thread(contender.version, setting)
            server = contender.server(running, shape, isa or [], version, 0.0)
            up[contender.name] = Up(contender, running, server)
            await load(up[contender.name], -1, setting.slots, setting.slots, prompt=32, output=8)  # memory, clocks, connections
        yield {name: await _quiet(u, shape) for name, u in up.items()}


async def _quiet(u: Up, shape: peers.Shape) -> Up:
    """With the share of a core that it uses while nobody asks it anything: its rivals are measured beside it."""
    before = u.running.cpu_seconds()
    await asyncio.sleep(IDLE_SECONDS)
    idle = (u.running.cpu_seconds() - before) / IDLE_SECONDS
    return Up(u.contender, u.running, u.contender.server(u.running, shape, u.server.isa, u.server.version, round(idle, 3)))


async def load(u: Up, round: int, clients: int, requests: int, *, prompt: int = PROMPT, output: int = OUTPUT) -> Cell:
    """`requests` of one size, `clients` at a time, closed loop."""
    before, cpu = await counters(u), u.running.cpu_seconds()
    async with u.client(seed=1000 * (round + 1) + clients) as client:  # the same prompts for every contender
        report = await closed_loop(client, clients, [Arrival(0, prompt, output)] * requests)
    await whole(u, report)
    after = await counters(u)
    rows = (after.tokens - before.tokens) / max(1.0, after.forwards - before.forwards)
    if after.tokens - before.tokens < 0.9 * requests * output:
        raise ServerError(f"{u.name}: its counters show {after.tokens - before.tokens:g} of {requests * output} tokens")
    if output > 1:
        must_batch(u.name, clients, rows)
    return cell(u, report, round, clients, prompt, output, rows, u.running.cpu_seconds() - cpu)


def must_batch(name: str, clients: int, rows: float) -> None:
    """Raises NotBatchingError where forward passes advanced too few of the clients on average."""
    if clients > 1 and rows < max(1.25, LEAST_SHARE * clients):
        raise NotBatchingError(f"{name} does not batch: {rows:.2f} tokens for each forward pass with {clients} clients")


async def counters(u: Up) -> peers.Counters:
    try:
        found: peers.Counters = await u.contender.counters(u.running)
    except ServerError as e:
        raise ServerError(f"{u.name}: {e}") from None
    except aiohttp.ClientError as e:
        raise ServerError(f"{u.name} {await _end(u)}: {e}") from None
    return found


async def whole(u: Up, report: Report) -> None:
    """Raises ServerError where a request failed or was short."""
    if bad := [o for o in report.outcomes if o.status != 200 or o.error or o.tokens != o.output]:
        why = bad[0].error or f"{bad[0].tokens} of {bad[0].output} tokens"
        counts = f"{len(bad)} of {len(report.outcomes)} requests failed"
        raise ServerError(f"{u.name} {await _end(u)}: {counts}, the first with: {why}")


async def _end(u: Up) -> str:
    """Whether it is still there; its connections break a moment before its end is known."""
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await u.running.child.process.wait()
    ended = u.running.child.ended
    return "serves badly" if ended is None else f"died (status {ended}; {u.running.child.last_words(1)})"


def cell(u: Up, report: Report, round: int, clients: int, prompt: int, output: int, rows: float, cpu: float) -> Cell:
    outcomes = report.outcomes
    ttft = [o.ttft for o in outcomes if o.ttft is not None]
    gaps, tokens = all_gaps(outcomes) if output > 1 else [], sum(o.tokens for o in outcomes)
    return Cell(
        u.name, round, clients, len(outcomes), prompt, output, report.seconds, tokens / report.seconds,
        quantile(ttft, 0.5) or 0.0, quantile(ttft, 0.95) or 0.0, quantile(gaps, 0.5), quantile(gaps, 0.95),
        quantile([o.tpot for o in outcomes if o.tpot is not None], 0.5), rows, (len(gaps) + len(ttft)) / max(1, tokens),
        report.lag_p99, report.cpu, cpu / report.seconds,
    )  # fmt: skip


def all_gaps(outcomes: Sequence[Outcome]) -> list[float]:
    return [gap for o in outcomes for gap in o.gaps]


@asynccontextmanager
async def hammer(url: str, path: str = "/metrics") -> AsyncIterator[dict[str, int]]:
    """One more client that asks for `path` again as soon as it has been answered. Yields how often, so far."""
    count = {"answers": 0}

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(url + path) as answer:
                    await answer.read()
                count["answers"] += 1

    task = asyncio.create_task(ask())
    try:
        yield count
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def waves(u: Up, clients: int, number: int, seed: int) -> Report:
    """`clients` requests at the same moment, `number` times, each wave once the one before has ended."""
    outcomes, lags, cpu, began = [], [], [], time.monotonic()
    async with u.client(seed) as client:
        for _ in range(number):
            report = await closed_loop(client, clients, [Arrival(0, PROMPT, OUTPUT)] * clients)
            await whole(u, report)
            outcomes += report.outcomes
            lags.append(report.lag_p99)
            cpu.append(report.cpu)
    return Report(outcomes, time.monotonic() - began, 0.0, max(lags), max(lags), max(cpu))


async def saturation(u: Up, arrivals: Sequence[Arrival], clients: int) -> float:
    """Requests of such lengths a second, with `clients` at a time and none of them ever idle."""
    async with u.client(seed=7, keep_gaps=False) as client:
        report = await closed_loop(client, clients, list(arrivals))
    await whole(u, report)
    return len(arrivals) / report.seconds


async def offer(u: Up, arrivals: Sequence[Arrival], seed: int, drain: float = 60.0) -> Report:
    """Open loop: what is refused or misses its objectives is part of the result."""
    async with u.client(seed) as client:
        return await open_loop(client, list(arrivals), drain=drain)


def by_name(up: Mapping[str, Up]) -> list[Server]:
    return [u.server for u in up.values()]
