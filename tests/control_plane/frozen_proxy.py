"""A TCP proxy whose connections can be frozen: they stay open and say nothing more, as behind a firewall that forgot them."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class FrozenProxy:
    """Forwards to `host:port`. `freeze()` stops every connection that is open then; new ones work."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._generation, self._lock = 0, threading.Lock()

    def __enter__(self) -> FrozenProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def freeze(self) -> None:
        with self._lock:
            self._generation += 1

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink, self._generation), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, generation: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if generation == self._generation:  # else swallowed
                    sink.sendall(data)
            if generation == self._generation:
                sink.shutdown(socket.SHUT_WR)
