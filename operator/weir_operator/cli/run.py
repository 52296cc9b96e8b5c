"""`weir-operator run`: the operator in a cluster."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import uvloop

from weir_operator.api import names
from weir_operator.cli.decision_log import DecisionLog
from weir_operator.handlers.watches import watch
from weir_operator.io.apply import KeyUnusable
from weir_operator.io.kube import ApiError, Kube, Unreachable, configuration
from weir_operator.io.logs import setup
from weir_operator.loops.operator import Heard, OperatorSettings, own_namespace, run
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.resync import Resync
from weir_operator.loops.store import Store
from weir_operator.loops.tuner import TunerSettings

log = logging.getLogger(__name__)


def run_operator(
    namespaces: tuple[str, ...], lease_name: str, server_image: str, health_port: int, tuner: TunerSettings, log_format: str,
    decision_log: Path | None, fail: Callable[[str], NoReturn],
) -> int:
    """Until SIGTERM or SIGINT. Returns the exit status."""
    setup(log_format)
    settings = OperatorSettings(server_image, namespaces, own_namespace(), lease_name, health_port, tuner)
    try:
        uvloop.run(_run(settings, _listeners(decision_log)))
        return 0
    except (Unreachable, KeyUnusable) as e:
        sentence = str(e)
    except ApiError as e:
        sentence = f"the API server refuses what the operator needs: {e}"
    except DecisionLogFails as e:
        sentence = f"--decision-log {decision_log}: {e}"
    except OSError as e:
        sentence = f"cannot listen on port {health_port}: {e.strerror or e}"
    if log_format == "text":
        fail(sentence)
    log.critical(sentence, extra={"event": "ended"})  # who reads JSON reads all of it
    return 2


class DecisionLogFails(Exception):
    """The file cannot be opened."""


def _listeners(decision_log: Path | None) -> list[Heard]:
    if decision_log is None:
        return []
    try:
        log_ = DecisionLog(decision_log)
    except OSError as e:
        raise DecisionLogFails(e.strerror) from None
    return [lambda subject, round_: log_.write(subject.key, round_)]


async def _run(settings: OperatorSettings, listeners: Sequence[Heard]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    connection = await configuration()
    async with Kube(connection) as kube:

        async def watcher(store: Store, queue: WorkQueue, resync: Resync, stop: asyncio.Event) -> None:
            await watch(connection, lambda: kube.has(names.KIND), store, queue, resync, stop)

        await run(settings, kube, watcher, stop, listeners)
