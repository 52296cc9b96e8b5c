"""`weir-server replay`: run saved scheduling decisions through the policy once more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from weir_server.link.errors import UserError
from weir_server.policy.trace import agrees, from_wire


def command(
    file: Annotated[Path, typer.Argument(help="An answer of GET /debug/schedule (control port).", exists=True, dir_okay=False)],
) -> None:
    """Run saved scheduling decisions through the policy once more: the same choices, or the first that differs."""
    try:
        steps = [from_wire(step) for step in orjson.loads(file.read_bytes())["steps"]]
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{file} is not what /debug/schedule answers: {type(e).__name__}: {e}") from None
    for i, step in enumerate(steps):
        if not agrees(step):
            raise UserError(f"step {i} of {len(steps)} (at {step.t:.3f} s) is decided differently by this version")
    typer.echo(f"{len(steps)} steps, all decided the same")
