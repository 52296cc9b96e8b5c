"""The client of the pods' control API: state and window in, knobs out."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from weir_server.contract import CONTRACT_MAJOR, ControlState, KnobsRequest, Window

TIMEOUT_SECONDS = 2.0
MAX_ANSWER_BYTES = 256 * 1024
"""A window is 8 KB at most; a pod that answers with more is not read to its end."""
CONCURRENT = 512
"""Requests at once. One that hangs holds its turn for TIMEOUT_SECONDS: up to so many that hang cost the others nothing, and as
many more hold every poll back by that time. Reason for no more: all of them may answer at once, which takes half a second of
this process and must end in the time that each has; and a process may often open 1024 files and no more."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server's control port. `name` is the pod's, or the process's on this machine.

    A server that is not `ready` is read and keeps its lease all the same; it is only not counted, and not moved.
    """

    name: str
    url: str  # http://host:port, IPv6 addresses in brackets
    token: str
    ready: bool = True


class Silent(Exception):
    """No usable answer; the text says why in a few words."""


class OtherContract(Exception):
    """The server speaks another major version of the contract."""


class Refused(Exception):
    """The server understood and refused: its status and its sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def pod_token(key: bytes, uid: str) -> str:
    """The bearer token of one resource's pods: HMAC(key, resource uid)."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()


def url_for(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ControlClient:
    """Polls with a bound on concurrency, without proxies, redirects or endless answers. Use as an async context manager."""

    async def __aenter__(self) -> ControlClient:
        self._turns = asyncio.Semaphore(CONCURRENT)  # not the connector's limit: waiting for that one counts against the time
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), trust_env=False,
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=2),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def state(self, endpoint: Endpoint) -> ControlState:
        """GET /control/state. Raises Silent or OtherContract."""
        return _state(await self._call("GET", endpoint, "/control/state"))

    async def window(self, endpoint: Endpoint) -> Window:
        """GET /control/window. Raises Silent, also for a window that lacks anything: absent is not zero."""
        answer = await self._call("GET", endpoint, "/control/window")
        try:
            return Window.from_wire(answer)
        except (KeyError, TypeError, ValueError) as e:
            raise Silent(f"its window cannot be read: {type(e).__name__} {e}") from None

    async def put_knobs(self, endpoint: Endpoint, request: KnobsRequest) -> ControlState:
        """PUT /control/knobs. Raises Refused, Silent or OtherContract."""
        return _state(await self._call("PUT", endpoint, "/control/knobs", request.to_wire()))

    async def _call(self, method: str, endpoint: Endpoint, where: str, body: Any = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        try:
            async with self._turns, self._session.request(
                method, endpoint.url + where, json=body, headers=headers, allow_redirects=False,
            ) as answer:
                text = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(text) <= MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES)):
                    text += more
        except TimeoutError:
            raise Silent(f"no answer in {TIMEOUT_SECONDS:.0f} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise Silent(f"cannot be reached: {e or type(e).__name__}"[:200]) from None
        if len(text) > MAX_ANSWER_BYTES:
            raise Silent(f"its answer is over {MAX_ANSWER_BYTES} bytes")
        if answer.status != 200:
            sentence = text.decode(errors="replace").strip()[:300]
            if method == "PUT" and answer.status in (400, 409, 422, 503):
                raise Refused(answer.status, sentence)
            raise Silent(f"answers {answer.status}: {sentence}"[:200])
        try:
            found = orjson.loads(text)
        except ValueError:
            raise Silent("its answer is no JSON") from None
        if not isinstance(found, dict):
            raise Silent("its answer is no JSON object")
        return found


def _state(answer: dict[str, Any]) -> ControlState:
    major = answer["contract"].get("major") if isinstance(answer.get("contract"), dict) else None
    if major is not None and major != CONTRACT_MAJOR:
        raise OtherContract(f"contract {major}, this operator speaks {CONTRACT_MAJOR}")
    try:
        return ControlState.from_wire(answer)
    except (KeyError, TypeError, ValueError) as e:
        raise Silent(f"its state cannot be read: {type(e).__name__} {e}") from None
