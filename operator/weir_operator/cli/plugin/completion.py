"""Completion: by kubectl's convention for plugins, and of names from the place that the words so far name.

kubectl runs `kubectl_complete-infd` with the words after `infd`; the answer is a line for each candidate, with its help after
a tab, and a last line `:4` (no file names), as cobra has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shlex
from collections.abc import Sequence

import typer

NO_FILES = 4
SECONDS = 3.0


def resource_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of InferenceDeployments. Whatever goes wrong is no candidate: a TAB must not print a trace."""
    from weir_operator.api import names
    from weir_operator.cli.plugin.api import Where, reach
    from weir_operator.io.kube import ApiError, Unreachable

    where = Where(ctx.params.get("namespace"), ctx.params.get("context"), bool(ctx.params.get("local")))

    async def listed() -> list[str]:
        async with asyncio.timeout(SECONDS):
            apis = await reach(where)
            try:
                return [raw["metadata"]["name"] for api in apis for raw in await api.list(names.KIND, where.in_namespace)]
            finally:
                for api in apis:
                    await api.close()

    with contextlib.suppress(ApiError, Unreachable, TimeoutError, OSError):
        return [name for name in asyncio.run(listed()) if name.startswith(incomplete)]
    return []


def print_completions(words: Sequence[str]) -> None:
    """Candidates for the last of the words, which may be empty: typer's own answer in the format that it has for fish."""
    from weir_operator.cli.plugin.commands import app

    line = shlex.join(["kubectl-infd", *words[:-1]]) + " " + (words[-1] if words else "")
    os.environ.update({
        "_KUBECTL_INFD_COMPLETE": "complete_fish", "_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    })
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(said):
        app(prog_name="kubectl-infd")
    print("\n".join([*filter(None, said.getvalue().splitlines()), f":{NO_FILES}"]))
