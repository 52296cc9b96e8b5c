"""`weir-server`: the command line. A user's mistake is one line on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from weir_server.link.errors import UserError

if TYPE_CHECKING:
    import typer

OURS = ("WEIR_", "LLAMA_ARG_", "MLXCEL_")
"""How the names of variables begin that are settings of ours."""


def drop_service_links() -> None:
    """For a Service called `weir` Kubernetes sets WEIR_PORT=tcp://…: such a value is no setting of ours."""
    for name, value in list(os.environ.items()):
        if name.startswith(OURS) and value.startswith(("tcp://", "udp://", "sctp://")):
            print(f"weir-server: {name}={value} is a service link and no setting; ignored", file=sys.stderr)
            del os.environ[name]


def refuse_what_is_not_there(arguments: list[str]) -> None:
    from weir_server.cli.flags import NOT_YET

    for argument in arguments:
        if (flag := argument.split("=", 1)[0]) in NOT_YET:
            raise UserError(f"{flag} is not available yet.")


def make_app() -> typer.Typer:
    """All commands. What takes long to import is imported in here, where a Ctrl-C is caught."""
    import typer

    from weir_server.cli.fetch import command as fetch
    from weir_server.cli.replay import command as replay
    from weir_server.cli.serve import command as serve
    from weir_server.cli.size import command as size
    from weir_server.cli.talk import chat, run

    app = typer.Typer(add_completion=False, no_args_is_help=True, help="Weir's LLM server.", pretty_exceptions_enable=False)
    app.command("serve")(serve)
    app.command("run")(run)
    app.command("chat")(chat)
    app.command("size")(size)
    app.command("fetch")(fetch)
    app.command("replay")(replay)
    return app


def main() -> None:
    drop_service_links()
    if not sys.stdout.isatty():
        os.environ.setdefault("TERMINAL_WIDTH", "120")  # --help has names longer than the half of 80 columns
    try:
        refuse_what_is_not_there(sys.argv[1:])
        from weir_server.http.engine_client import EngineFailed

        app = make_app()
        try:
            app()
        except EngineFailed as e:
            print(f"weir-server: {e}", file=sys.stderr)
            sys.exit(1)
    except UserError as e:
        print(f"weir-server: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
