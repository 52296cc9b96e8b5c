"""`weir-operator run`: the operator in a cluster."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
from collections.abc import Callable
from typing import NoReturn

from weir_operator.handlers.watches import Freshness, watch
from weir_operator.io.kube import ApiError, Kube, Unreachable, configuration
from weir_operator.loops.operator import OperatorSettings, own_namespace, run
from weir_operator.loops.tuner import TunerSettings

log = logging.getLogger(__name__)


def run_operator(
    namespaces: tuple[str, ...], server_image: str, health_port: int, tuner: TunerSettings, fail: Callable[[str], NoReturn],
) -> int:
    """Until SIGTERM or SIGINT. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = OperatorSettings(server_image, namespaces, own_namespace(), health_port, tuner)
    try:
        asyncio.run(_run(settings))
    except Unreachable as e:
        fail(str(e))
    except ApiError as e:
        fail(f"the API server refuses what the operator needs: {e}")
    except OSError as e:
        fail(f"cannot listen on port {health_port}: {e.strerror or e}")
    return 0


async def _run(settings: OperatorSettings) -> None:
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    connection = await configuration()
    async with Kube(connection) as kube:
        watcher = functools.partial(_watch, connection, settings.namespaces)
        await run(settings, kube, watcher, stop)


async def _watch(connection, namespaces, store, queue, stop):  # type: ignore[no-untyped-def]
    await watch(connection, store, queue, Freshness(), namespaces, stop)
