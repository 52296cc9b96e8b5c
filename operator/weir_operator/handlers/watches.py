"""kopf's part: watches, reconnects, back-off. It decides when; every event becomes a cached object and a key in the queue.

No handler here sets a finalizer, posts an Event or keeps progress on an object: only low-level event handlers are used.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from weir_operator.api import names
from weir_operator.io.kube import resource_of
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.store import CHILD_KINDS, Store, key_of, owner_key

SILENT_SECONDS = 70.0
"""The API server sends a bookmark every minute: a watch that says nothing for longer is dead, and is begun anew."""
_CHILDREN = {kind: resource_of(kind) for kind in ("Pod", *CHILD_KINDS)}


def _settings(namespaces: Sequence[str]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = bool(namespaces)  # without cluster rights neither namespaces nor CRDs can be watched
    settings.watching.server_timeout, settings.watching.client_timeout, settings.watching.connect_timeout = 300, 310, 30
    settings.watching.inactivity_timeout = SILENT_SECONDS
    settings.networking.error_backoffs = [delay * random.uniform(0.8, 1.2) for delay in (1, 1, 2, 3, 5, 8, 13, 21)]
    settings.process.ultimate_exiting_timeout = 15
    settings.persistence.finalizer = f"{names.GROUP}/kopf-finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{names.GROUP}")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"kopf.{names.GROUP}")
    for group, version, plural in _CHILDREN.values():
        settings.watching.label_selectors[(group, version, plural)] = names.MANAGED_SELECTOR
    return settings


def _registry(store: Store, queue: WorkQueue, login: Any) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(login)

    def watcher(kind: str) -> Callable[..., Any]:
        async def seen(event: Any, **_: Any) -> None:
            obj = event["object"]
            store.told(kind, obj, event["type"] == "DELETED")
            meta = obj["metadata"]
            key = key_of(meta["namespace"], meta["name"]) if kind == names.KIND else owner_key(obj)
            if key:
                queue.add(key)

        return seen

    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, id="resource", registry=registry)(watcher(names.KIND))
    managed: Any = {names.MANAGED_LABEL: "true"}
    for kind, (group, version, plural) in _CHILDREN.items():
        kopf.on.event(group, version, plural, id=kind.lower(), labels=managed, registry=registry)(watcher(kind))
    return registry


def _login(connection: Configuration) -> Callable[..., Any]:
    """kopf takes its credentials from the same configuration as our own client, and reads a renewed token at each login."""

    async def login(**_: Any) -> kopf.ConnectionInfo:
        bearer = await connection.get_api_key_with_prefix("BearerToken")
        scheme, _space, token = (bearer or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=connection.host, ca_path=connection.ssl_ca_cert, insecure=not connection.verify_ssl,
            username=connection.username or None, password=connection.password or None,
            scheme=scheme or None, token=token or None, certificate_path=connection.cert_file,
            private_key_path=connection.key_file, proxy_url=connection.proxy, trust_env=False,
        )

    return login


async def watch(
    connection: Configuration, store: Store, queue: WorkQueue, namespaces: Sequence[str],
    stop: asyncio.Event, started: Callable[[], None],
) -> None:
    """Feed the store and the queue until `stop` is set. `started` is called once kopf has taken the process' signals for
    itself, so that the caller can take them back."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    ready = asyncio.Event()

    async def announce() -> None:
        await ready.wait()
        await asyncio.sleep(1)  # kopf takes the signals one turn of the event loop after it says that it is ready
        started()

    announcing = asyncio.create_task(announce())
    await kopf.operator(
        registry=_registry(store, queue, _login(connection)),
        settings=_settings(namespaces),
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        standalone=True,
        # of its peering, which is off: unset, kopf asks for the user's name, and a container's user may have none
        identity="weir-operator",  # type: ignore[arg-type]
        ready_flag=ready,
        stop_flag=stop,
    )
    announcing.cancel()
