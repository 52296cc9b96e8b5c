"""Sockets to listen on. They are bound before the model loads (a port in use is known at once) and listen only after.

SO_REUSEADDR lets a server start again while connections of the last one still linger, and lets two servers bind one port as
long as neither listens. So a port is bound without it where that can be, and gets it before it listens, for its connections.
"""

from __future__ import annotations

import errno
import socket

from weir_server.link.errors import UserError

LOOPBACK = "localhost"


def bind(host: str | None, port: int) -> list[socket.socket]:
    """Bound, not yet listening. `host` None: every address, IPv4 and IPv6; "localhost": both loopbacks. Port 0: any free one.

    Where IPv6 is switched off, IPv4 alone serves, and the other way round. Raises UserError.
    """
    if host is None:
        return [_any(port)]
    sockets: list[socket.socket] = []
    for family, address in _addresses(host):
        wanted = (address, sockets[0].getsockname()[1] if sockets else port)
        try:
            sockets.append(_bound(family, wanted, only_v6=True))
        except OSError:
            continue  # an address that this machine lacks
    if not sockets:
        raise UserError(f"Cannot listen on {host!r}: this machine has no such address.")
    return sockets


def _addresses(host: str) -> list[tuple[int, str]]:
    if host == LOOPBACK:  # by name it is IPv4 alone on many machines
        return [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise UserError(f"Cannot listen on {host!r}: {e.strerror}.") from None
    return [(family, str(address[0])) for family, _, _, _, address in infos]


def _any(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return _bound(socket.AF_INET6, ("::", port), only_v6=False)
        except OSError:
            pass  # IPv6 is compiled in and switched off
    return _bound(socket.AF_INET, ("0.0.0.0", port), only_v6=False)


def _bound(family: int, address: tuple[str, int], only_v6: bool) -> socket.socket:
    """Raises UserError if the port is taken or forbidden, OSError if this kind of address can't be had here."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_v6))
        try:
            sock.bind(address)
        except OSError:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as e:
        sock.close()
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            raise _refused(e.errno, *address) from None
        raise
    return sock


def listen(sock: socket.socket, backlog: int) -> None:
    """Raises UserError where another one listens by now."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(backlog)
    except OSError as e:
        host, port = sock.getsockname()[:2]
        raise _refused(e.errno, host, port) from None


def _refused(code: int | None, host: str, port: int) -> UserError:
    why = "is in use" if code == errno.EADDRINUSE else "is not ours to open"
    return UserError(f"Port {port} {why} on {host}; choose another one (0 picks a free one).")


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def url_of(sockets: list[socket.socket], host: str | None) -> str:
    """Where a client on this machine reaches them."""
    return url("127.0.0.1" if host in (None, "0.0.0.0") else str(host), sockets[0].getsockname()[1])
