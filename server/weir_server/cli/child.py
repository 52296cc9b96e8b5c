"""Entry point of the engine child: `python -m weir_server.cli.child FD`, FD being one end of a socketpair.

The child dies with its parent: the kernel sends it SIGKILL when the parent goes (PDEATHSIG), and where that can't be set
the closed channel ends its loop. What is the user's mistake reaches the parent as `Fatal(user_error=True)`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import traceback

from weir_server.link.channel import Channel, ChannelClosed
from weir_server.link.errors import UserError
from weir_server.link.messages import Boot, Fatal, Quit

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask for SIGKILL at the parent's death (if it died before we asked, the channel says so before anything is loaded)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> int:
    die_with_parent()
    for s in (signal.SIGINT, signal.SIGTERM):  # the parent decides when the engine ends
        signal.signal(s, signal.SIG_IGN)
    level = os.environ.get("WEIR_LOG_LEVEL", "info").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return run_over(Channel(socket.socket(fileno=int(argv[1]))))


def run_over(channel: Channel) -> int:
    """The engine's whole life at our end of a channel; the exit status."""
    try:
        return _serve(channel)
    except ChannelClosed:
        return 0


def _serve(channel: Channel) -> int:
    boot, *rest = channel.recv(None)
    if not isinstance(boot, Boot):
        channel.send(Fatal(f"the first message was {type(boot).__name__}, not Boot"))
        return 1
    rest += channel.recv(0)  # raises where the parent died before we asked to die with it
    if any(isinstance(message, Quit) for message in rest):  # until we are ready it says nothing else
        return 0
    from weir_server.engine.child import run  # imports torch: not before the parent's death is taken care of

    try:
        run(boot, channel)
    except ChannelClosed:
        raise
    except UserError as e:
        channel.send(Fatal(str(e), user_error=True))
        return 2
    except Exception as e:
        traceback.print_exc()
        channel.send(Fatal(f"the engine failed: {type(e).__name__}: {e}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
