"""The least that an operator has to write for resources to be Ready, by a client that does nothing else: a floor for `scale`.

The children are rendered beforehand; no watch but that of the Deployments, no read, no poll. What is left is what the API
server and its controllers take on this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from weir_operator.api import names
from weir_operator.api.conditions import Condition
from weir_operator.io.apply import Writer, utc_now
from weir_operator.io.kube import Kube
from weir_operator.loops.queue import WORKERS
from weir_operator.plan.manifests import Defaults, Manifest, children
from weir_operator.plan.plan import parse

Object = Mapping[str, Any]


async def bare(kube: Kube, namespace: str, deployments: Mapping[str, Object], seconds: float = 300) -> tuple[float, int]:
    """Seconds until every resource of the namespace is Ready, and requests. `deployments`: as a watch shows them, by name."""
    defaults = Defaults("localhost/weir-server:dev", "token", namespace)
    todo = [(raw, children(parse(raw), defaults)) for raw in await kube.list(names.KIND, namespace)]
    latest: dict[str, Object] = {}
    requests, writer, began = 0, Writer(kube), time.monotonic()

    async def said(raw: Object, ready: bool) -> None:
        nonlocal requests
        condition = Condition("Ready", ready, "Serving" if ready else "Starting").to_json(1, utc_now())
        latest[raw["metadata"]["name"]] = await writer.patch_status(raw, {"conditions": [condition]})
        requests += 1

    async def make(work: Iterator[tuple[Object, list[Manifest]]]) -> None:
        nonlocal requests
        for raw, manifests in work:
            await said(raw, False)
            for manifest in manifests:
                await writer.apply(manifest, None)
                requests += 1

    async def tell() -> None:
        waiting = {raw["metadata"]["name"] for raw, _ in todo}
        while waiting:
            ready = [n for n in waiting if deployments.get(n, {}).get("status", {}).get("readyReplicas")]
            for name in ready:
                await said(latest[name], True)
                waiting.discard(name)
            await asyncio.sleep(0.05)

    async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
        work = iter(todo)
        for _ in range(WORKERS):
            group.create_task(make(work))
        group.create_task(tell())
    return time.monotonic() - began, requests
