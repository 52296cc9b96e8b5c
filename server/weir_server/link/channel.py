"""Frames between the parent and the engine child: 4 bytes of big-endian length, then one message in msgpack.

`Channel` is the child's blocking side. The parent's side is `AsyncChannel`, over asyncio streams. Both ends are of one
socketpair, so a closed peer is seen at once; that, and a frame that can't be right, is `ChannelClosed`.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from typing import Self, TypeVar

import msgspec

from weir_server.link.messages import ToChild, ToParent

HEADER = 4
MAX_FRAME = 256 * 1024 * 1024
"""No message of ours comes near this; a larger length means that the stream is out of step."""

_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class ChannelClosed(Exception):
    """The other side is gone (or no longer speaks our frames)."""


def frame(message: object) -> bytes:
    """`message` as one frame."""
    body = bytearray(HEADER)
    _encoder.encode_into(message, body, HEADER)
    body[:HEADER] = (len(body) - HEADER).to_bytes(HEADER, "big")
    return bytes(body)


def _length(header: bytes | bytearray) -> int:
    n = int.from_bytes(header[:HEADER], "big")
    if n > MAX_FRAME:
        raise ChannelClosed(f"frame of {n} bytes")
    return n


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes | bytearray) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as e:
        raise ChannelClosed(f"a frame that is no message of ours: {e}") from e


class Channel:
    """The child's side: `recv` gives all messages at hand, `send` blocks until the parent's buffer took the frame."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(True)
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(ToChild)

    def fileno(self) -> int:
        return self._sock.fileno()

    def recv(self, timeout: float | None) -> list[ToChild]:
        """All whole messages at hand. 0: don't wait; None: wait for one; else wait so many seconds at most for one.

        Raises ChannelClosed when the parent is gone and nothing is left to read.
        """
        messages: list[ToChild] = []
        while True:
            readable, _, _ = select.select([self._sock], [], [], 0 if messages else timeout)
            if not readable:
                return messages
            try:
                data = self._sock.recv(1 << 20)
            except ConnectionError:  # it went without having read all that we sent
                data = b""
            if not data:
                if messages:
                    return messages
                raise ChannelClosed("the parent closed the channel")
            self._buffer += data
            messages += self._take()

    def _take(self) -> list[ToChild]:
        """Decode and drop the whole frames at the front of the buffer."""
        out: list[ToChild] = []
        at = 0
        while len(self._buffer) - at >= HEADER:
            end = at + HEADER + _length(self._buffer[at : at + HEADER])
            if len(self._buffer) < end:
                break
            out.append(_decoded(self._decoder, self._buffer[at + HEADER : end]))
            at = end
        del self._buffer[:at]
        return out

    def send(self, message: ToParent) -> None:
        """Raises ChannelClosed when the parent is gone."""
        try:
            self._sock.sendall(frame(message))
        except OSError as e:
            raise ChannelClosed(str(e)) from e


class AsyncChannel:
    """The parent's side: iterate over it for the child's messages; `send` never waits."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(ToParent)

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 20))

    def send(self, message: ToChild) -> None:
        """Queue one message; dropped without a word if the child is gone, whose end the reader reports."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def __aiter__(self) -> AsyncIterator[ToParent]:
        """Messages until the child closes its side. Raises ChannelClosed for what can be no message."""
        try:
            while True:
                body = await self._reader.readexactly(_length(await self._reader.readexactly(HEADER)))
                yield _decoded(self._decoder, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()
