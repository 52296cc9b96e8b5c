"""kopf's part: watches, reconnects, back-off. It decides when; every event becomes a cached object and a key in the queue.

No handler here sets a finalizer, posts an Event or keeps progress on an object: only low-level event handlers are used.

kopf runs in a thread with an event loop of its own: it takes the process' signals where it can, it cancels every task of its
loop when it ends, and it ends for good at a 404, as when the definition goes. Here it is begun again instead, as soon as the
API server serves the definition. (Its own scan of definitions looks once per event, and misses one that is announced before it
is served.) Its end may never come: kopf cancels each of its tasks once and then waits, and a stream that is between two watches
takes that for the end of its own waiting and goes on. So its end has a deadline, after which what is left is cancelled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import aiohttp
import kopf
import uvloop
from kubernetes.aio.client import Configuration

from weir_operator.api import names
from weir_operator.io.kube import REQUEST_SECONDS, ApiError, Unreachable, resource_of
from weir_operator.loops.queue import WorkQueue
from weir_operator.loops.resync import Resync
from weir_operator.loops.store import ALL_OF, CHILD_KINDS, Store, key_of, owner_key

SILENT_SECONDS = 70.0
"""The API server sends a bookmark every minute: a watch that says nothing for longer is dead, and is begun anew."""
AGAIN_SECONDS = 2.0
"""Between the end of the watches, or of one that cannot go on, or a look for a definition that is not there, and the next
beginning."""
END_SECONDS, TURNS, TURN_SECONDS = 9.0, 3, 1.0
"""From a stop, or from the end of one of kopf's parts, to its own end: it gives 5 seconds to what it calls hung. Then how
often, and for how long, what is left is cancelled."""
log = logging.getLogger(__name__)
_CHILDREN = {kind: resource_of(kind) for kind in ("Pod", *CHILD_KINDS)}
_PLURALS = {names.PLURAL, *(plural for _group, _version, plural in _CHILDREN.values())}


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing here asks kopf what changed, and its copy of each object of each event was a fourteenth of a start's work."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.server_timeout, settings.watching.client_timeout, settings.watching.connect_timeout = 300, 310, 30
    settings.watching.inactivity_timeout = SILENT_SECONDS
    settings.watching.reconnect_backoff = AGAIN_SECONDS  # before another list, not before each watch
    settings.networking.request_timeout = REQUEST_SECONDS  # of a list: no watch begins before it
    settings.networking.error_backoffs = [delay * random.uniform(0.8, 1.2) for delay in (1, 1, 2, 3, 5, 8, 13, 21)]
    settings.process.ultimate_exiting_timeout = None  # the process is ours; it would be killed with every task in it
    settings.persistence.finalizer = f"{names.GROUP}/kopf-finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{names.GROUP}")
    settings.persistence.diffbase_storage = _NoDiffs()
    for kind, resource in _CHILDREN.items():
        if kind not in ALL_OF:
            settings.watching.label_selectors[resource] = names.MANAGED_SELECTOR
    return settings


def _registry(store: Store, queue: WorkQueue, connection: Configuration, missed: Callable[[], None]) -> kopf.OperatorRegistry:
    """Handlers that hand each event over to the event loop that this is called in."""
    registry, ours = kopf.OperatorRegistry(), asyncio.get_running_loop()
    kopf.on.login(registry=registry)(_login(connection, lambda: ours.call_soon_threadsafe(missed)))

    def watcher(kind: str) -> Callable[..., Any]:
        def told(obj: Any, deleted: bool) -> None:
            store.told(kind, obj, deleted)
            meta = obj["metadata"]
            key = key_of(meta["namespace"], meta["name"]) if kind == names.KIND else owner_key(obj)
            if key:
                queue.add(key)

        async def seen(event: Any, **_: Any) -> None:
            ours.call_soon_threadsafe(told, event["object"], event["type"] == "DELETED")

        return seen

    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, id="resource", registry=registry)(watcher(names.KIND))
    managed: Any = {names.MANAGED_LABEL: "true"}
    for kind, (group, version, plural) in _CHILDREN.items():
        labels = None if kind in ALL_OF else managed
        kopf.on.event(group, version, plural, id=kind.lower(), labels=labels, registry=registry)(watcher(kind))
    return registry


def _listed_anew(missed: Callable[[], object]) -> aiohttp.TraceConfig:
    """Calls `missed` whenever kopf lists something again. A watch that is too old to go on (410 Gone) begins with a list, by
    itself and without a word, and where nothing is left of a kind no event tells of it."""
    listed: set[str] = set()

    async def answered(_session: aiohttp.ClientSession, _context: object, asked: aiohttp.TraceRequestEndParams) -> None:
        where, query = asked.url.path, asked.url.query
        if asked.response.status != 200 or where.rpartition("/")[2] not in _PLURALS or {"watch", "continue"} & query.keys():
            return
        if where in listed:
            missed()
        listed.add(where)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(answered)
    return trace


def _login(connection: Configuration, missed: Callable[[], object]) -> Callable[..., Any]:
    """kopf takes its credentials from the same configuration as our own client, and reads a renewed token at each login. Its
    connections are ours, so that we see when it lists. It asks again when the API server refuses the credentials: where there
    are no others it is given the same connections, by which it knows those that were refused, and ends."""
    trace = _listed_anew(missed)
    of: kopf.ConnectionInfo | None = None
    given: kopf.AiohttpSession | None = None

    async def login(**_: Any) -> kopf.AiohttpSession:
        nonlocal of, given
        bearer = await connection.get_api_key_with_prefix("BearerToken")
        scheme, _space, token = (bearer or "").rpartition(" ")
        info = kopf.ConnectionInfo(
            server=connection.host, ca_path=connection.ssl_ca_cert, insecure=not connection.verify_ssl,
            username=connection.username or None, password=connection.password or None,
            scheme=scheme or None, token=token or None, certificate_path=connection.cert_file,
            private_key_path=connection.key_file,
        )
        if given is None or info != of:
            of, given = info, kopf.AiohttpSession(server=connection.host, aiohttp_session=aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()), headers=info.as_http_headers(),
                proxy=connection.proxy, trust_env=False, trace_configs=[trace],
            ))
        return given

    return login


async def watch(
    connection: Configuration, served: Callable[[], Awaitable[bool]], store: Store, queue: WorkQueue, resync: Resync,
    stop: asyncio.Event,
) -> None:
    """Feed the store and the queue until `stop` is set. `served` says whether the API server serves our definition; `resync`
    says which namespaces may be watched, and lists anew when a watch begins again: what was deleted meanwhile, only a list
    can tell. A right that is lost in one namespace ends kopf's watches in all of them: they begin again without that one."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    for of_its_end in ("running", "orchestration"):  # we tell of it, in one line
        logging.getLogger(f"kopf._core.reactor.{of_its_end}").setLevel(logging.CRITICAL)
    begun = False
    while not stop.is_set():
        try:
            if await served():
                if begun:
                    resync.soon()
                begun = True
                resync.rescoped.clear()
                registry = _registry(store, queue, connection, resync.soon)
                await _until((stop, resync.rescoped), registry, resync.namespaces)
        except (ApiError, Unreachable) as e:
            log.warning("the watches do not begin yet: %s", e)
        except Exception as e:  # whatever ended kopf: what it should have told shows as lag, and then as bad health
            log.warning("the watches have ended and begin again: %s: %s", type(e).__name__, e, extra={"event": "watches-ended"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), AGAIN_SECONDS * random.uniform(0.8, 1.2))


async def _until(ends: Sequence[asyncio.Event], registry: kopf.OperatorRegistry, namespaces: Sequence[str]) -> None:
    """kopf in a thread, until one of `ends` is set. Raises what kopf ended with, RuntimeError if it did not end by itself."""
    loop, ending = uvloop.new_event_loop(), asyncio.Event()
    running = asyncio.create_task(asyncio.to_thread(_run, loop, registry, namespaces, ending))
    ended = [asyncio.create_task(end.wait()) for end in ends]
    try:
        await asyncio.wait([running, *ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        with contextlib.suppress(RuntimeError):  # closed: it has ended
            loop.call_soon_threadsafe(ending.set)
        for task in ended:
            task.cancel()
    await running


def _run(
    loop: asyncio.AbstractEventLoop, registry: kopf.OperatorRegistry, namespaces: Sequence[str], ending: asyncio.Event,
) -> None:
    """kopf in `loop`, until `ending` is set or one of its parts ends, and then to the end of all, for END_SECONDS + TURNS ·
    TURN_SECONDS at most."""

    async def to_its_end() -> None:
        asked = asyncio.create_task(ending.wait())
        ours = asyncio.all_tasks()
        parts = await kopf.spawn_tasks(
            registry=registry,
            settings=_settings(),
            clusterwide=not namespaces,
            namespaces=list(namespaces),
            standalone=True,
            # of its peering, which is off: unset, kopf asks for the user's name, and a container's user may have none
            identity="weir-operator",  # type: ignore[arg-type]
            stop_flag=ending,
        )
        operator = asyncio.create_task(kopf.run_tasks(parts, ignored=ours))
        await asyncio.wait([*parts, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        await asyncio.wait([operator], timeout=END_SECONDS)
        for _ in range(TURNS):
            if left := asyncio.all_tasks() - ours:
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=TURN_SECONDS)
        if left := asyncio.all_tasks() - ours:
            raise RuntimeError(f"{len(left)} of kopf's tasks do not end, and are left behind")
        if operator.cancelled():
            raise RuntimeError(f"kopf did not end by itself within {END_SECONDS:.0f} s")
        operator.result()

    loop.set_exception_handler(lambda _loop, context: log.debug("left behind by kopf: %s", context["message"]))
    try:
        loop.run_until_complete(to_its_end())
    finally:
        with contextlib.suppress(TimeoutError):  # connections are closed by the streams that hold them
            loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), TURN_SECONDS))
        loop.close()
