"""`kubectl infd bench`: a short open-loop load, and what came of it.

Arrivals are Poisson and wait for nobody: a slow server gets as many as a fast one, or its latencies would look good. What was
refused or failed counts as not served in time. The load's own lateness is reported: where it is large, so are the times.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REQUEST_SECONDS = 300.0
MOST_IN_FLIGHT = 2000
WORDS = ("river", "weir", "mill", "water", "level", "stone", "gate", "flood", "bank", "bridge", "stream", "fish", "reed")


@dataclass(frozen=True, slots=True)
class Load:
    """`rate`: requests a second over `seconds`; `prompt`: about so many tokens; `output`: at most so many."""

    rate: float
    seconds: float
    prompt: int
    output: int
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds; None where it did not come so far."""

    status: int = 0  # 0: no answer
    error: str = ""
    ttft: float | None = None
    tpot: float | None = None
    tokens: int = 0
    late: float = 0.0  # how long after its time it was sent


@dataclass(frozen=True, slots=True)
class Report:
    load: Load
    slo: tuple[float | None, float | None]  # ttft, tpot
    seconds: float
    outcomes: Sequence[Outcome] = field(default_factory=list)

    @property
    def good(self) -> int:
        ttft, tpot = self.slo
        return sum(
            not o.error and o.ttft is not None and (ttft is None or o.ttft <= ttft)
            and (tpot is None or o.tpot is None or o.tpot <= tpot)
            for o in self.outcomes
        )

    def to_json(self) -> dict[str, Any]:
        done = [o for o in self.outcomes if o.status == 200 and not o.error]
        refused = Counter(o.error or "refused" for o in self.outcomes if o.status == 503)
        failed = Counter(o.error or str(o.status) for o in self.outcomes if o.status != 503 and (o.status != 200 or o.error))
        return {
            "offered": len(self.outcomes), "offeredPerSecond": _short(len(self.outcomes) / self.load.seconds),
            "served": len(done), "good": self.good, "goodputPerSecond": _short(self.good / self.load.seconds),
            "objectives": {"ttft": self.slo[0], "tpot": self.slo[1]},
            "refused": dict(refused), "failed": dict(failed),
            "tokensPerSecond": _short(sum(o.tokens for o in done) / self.seconds),
            "ttft": quantiles([o.ttft for o in done if o.ttft is not None]),
            "tpot": quantiles([o.tpot for o in done if o.tpot is not None]),
            "lateness": quantiles([o.late for o in self.outcomes]), "seconds": _short(self.seconds),
        }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 by the nearest rank; None where nothing was measured."""
    ordered = sorted(values)
    return {
        name: _short(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) if ordered else None
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }


async def play(urls: Sequence[str], model: str, load: Load, slo: tuple[float | None, float | None], key: str | None) -> Report:
    """Send the load to the servers in turn. Cancelled, what is under way is given up."""
    draw, began = random.Random(load.seed), time.monotonic()
    outcomes: list[Outcome] = []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_SECONDS), aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers, trust_env=False, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        due, turn = draw.expovariate(load.rate), 0
        under_way: set[asyncio.Task[None]] = set()
        while due < load.seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            outcome = Outcome(late=max(0.0, time.monotonic() - began - due))
            outcomes.append(outcome)
            if len(under_way) < MOST_IN_FLIGHT:
                body = {
                    "model": model, "prompt": prompt(draw, load.prompt), "max_tokens": load.output, "stream": True,
                    "stream_options": {"include_usage": True},
                }
                task = group.create_task(_request(session, urls[turn % len(urls)], body, outcome))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            else:
                outcome.error = f"not sent: {MOST_IN_FLIGHT} were under way"
            turn += 1
            due += draw.expovariate(load.rate)
    return Report(load, slo, time.monotonic() - began, outcomes)


def prompt(draw: random.Random, tokens: int) -> str:
    """Different each time, or the prefix cache would be measured; a word is about a token."""
    return " ".join(draw.choice(WORDS) for _ in range(max(1, tokens)))


async def _request(session: aiohttp.ClientSession, url: str, body: dict[str, Any], outcome: Outcome) -> None:
    """Follow one stream; whatever happens ends up in `outcome`."""
    began, first, last = time.monotonic(), None, 0.0
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            outcome.status = answer.status
            if answer.status != 200:
                outcome.error = _words(await answer.text())
                return
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if error := event.get("error"):
                    outcome.error = str(error.get("message", error))[:200]
                    return
                if any(choice.get("text") for choice in event.get("choices", ())):
                    last = time.monotonic()
                    first = first or last
                outcome.tokens = (event.get("usage") or {}).get("completion_tokens") or outcome.tokens
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as e:
        outcome.error = str(e) or type(e).__name__
        return
    if first is not None:
        outcome.ttft = first - began
        outcome.tpot = (last - first) / (outcome.tokens - 1) if outcome.tokens > 1 else None


def _words(text: str) -> str:
    """The reason in a refusal's body, or its sentence."""
    try:
        error = json.loads(text)["error"]
        return str(error.get("code") or error.get("message"))[:200]
    except (ValueError, KeyError, TypeError, AttributeError):
        return text.strip()[:200]
