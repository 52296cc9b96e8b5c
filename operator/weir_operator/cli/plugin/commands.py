"""The verbs of `kubectl infd`.

Exit status: 0 done, 1 the cluster (or local mode) says no, 2 the command line is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console, Group, RenderableType

from weir_operator.cli.plugin.api import Api, Where
from weir_operator.cli.plugin.completion import resource_names

app = typer.Typer(
    name="kubectl-infd", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "See what InferenceDeployments do and why, and steer their tuning by hand.\n\n"
        "Uses your kubeconfig, as kubectl does; with [b]--local[/b] it asks `weir-operator local` on this machine."
    ),
)
tuning = typer.Typer(no_args_is_help=True, help="Take the knobs back by hand, let them go again, choose the mode.")
app.add_typer(tuning, name="tuning")

Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's.")]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Local = Annotated[bool, typer.Option("--local", help="Ask weir-operator local on this machine, not a cluster.")]
Output = Annotated[str, typer.Option("--output", "-o", help="text, json or yaml.")]
Name = Annotated[str, typer.Argument(help="The InferenceDeployment.", autocompletion=resource_names)]

MODES = ("Auto", "Advise", "Disabled")
console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
"""Colours on a terminal alone, and never where NO_COLOR says so; what is piped is not cut to a width."""


def fail(sentence: str, status: int = 2) -> NoReturn:
    typer.echo(f"kubectl-infd: {sentence}", err=True)
    raise typer.Exit(status)


def call(where: Where, work: Callable[[list[Api]], Awaitable[Any]]) -> Any:
    """Run `work` with whom to ask; what goes wrong is one line."""
    from weir_operator.cli.plugin.api import reach
    from weir_operator.cli.plugin.edits import NothingToDo
    from weir_operator.io.kube import ApiError, Unreachable

    async def main() -> Any:
        apis = list(await reach(where))
        try:
            return await work(apis)
        finally:
            for api in apis:
                await api.close()

    try:
        return asyncio.run(main())
    except (Unreachable, NothingToDo) as e:
        fail(str(e), 1)
    except ApiError as e:
        fail(e.message, 1)


def with_one(where: Where, name: str, work: Callable[[Api, dict[str, Any]], Awaitable[Any]]) -> Any:
    """Run `work` with the resource and who has it."""
    from weir_operator.cli.plugin.api import find

    async def main(apis: list[Api]) -> Any:
        return await work(*await find(apis, where, name))

    return call(where, main)


def printed(output: str, value: Any, text: Callable[[], RenderableType]) -> None:
    if output == "json":
        typer.echo(json.dumps(value, indent=2))
    elif output == "yaml":
        typer.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), nl=False)
    else:
        console.print(text())


def checked(output: str) -> str:
    """Before anything is asked or changed."""
    if output not in ("text", "json", "yaml"):
        fail(f"-o must be text, json or yaml, not {output!r}")
    return output


# ---------------------------------------------------------------- looking

@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="One of them; default: all.", autocompletion=resource_names)] = None,
    namespace: Namespace = None, context: Context = None, local: Local = False, output: Output = "text",
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of every namespace.")] = False,
) -> None:
    """Show resources as trees: their conditions, their objects with health, their pods with knobs."""
    from weir_operator.api import names
    from weir_operator.cli.plugin.api import find
    from weir_operator.cli.plugin.tree import children, tree

    where = Where(namespace, context, local)
    checked(output)

    async def work(apis: list[Api]) -> list[Any]:
        if name is not None:
            found = [await find(apis, where, name)]
        else:
            place = None if everywhere else where.in_namespace
            found = [(api, raw) for api in apis for raw in await api.list(names.KIND, place)]
        return [(raw, await children(api, raw)) for api, raw in found]

    found = call(where, work)
    shown = [{"resource": raw, "children": [child.to_json() for child in kids]} for raw, kids in found]
    printed(output, shown[0] if name is not None else shown,
            lambda: Group(*(tree(raw, kids) for raw, kids in found)) if found else "no InferenceDeployment here")


@app.command()
def explain(
    name: Name, namespace: Namespace = None, context: Context = None, local: Local = False, output: Output = "text",
) -> None:
    """Say what limits each pod now, what the tuner did last and why, what it predicts, and what would change its mind.

    The operator itself is asked, through the API server's proxy to its pods. Where that is not allowed, what its last status
    says is shown, with one line that says so.
    """
    from weir_operator.cli.plugin import texts
    from weir_operator.io.kube import ApiError, Unreachable

    checked(output)

    async def work(api: Api, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
        try:
            return raw, await api.explained(raw), ""
        except (ApiError, Unreachable) as e:
            return raw, None, str(getattr(e, "message", e))

    raw, said, why = with_one(Where(namespace, context, local), name, work)

    def text() -> RenderableType:
        head = "\n".join(texts.heading(raw))
        if said is None:
            return f"{head}\n{texts.from_status(raw)}\nAs of the last status: the operator cannot be asked ({why})."
        count = [texts.count_text(said["replicas"], said["now"])] if "replicas" in said else []
        return Group(head, *count, *(texts.explained(pod, said["now"], said["tickSeconds"]) for pod in said["pods"]))

    printed(output, said if said is not None else {"status": texts.tuning_of(raw), "notAsked": why}, text)


@app.command()
def history(
    name: Name, namespace: Namespace = None, context: Context = None, local: Local = False, output: Output = "text",
) -> None:
    """Show the last decisions, newest first."""
    from weir_operator.cli.plugin.texts import history_text, tuning_of

    checked(output)

    async def work(_: Api, raw: dict[str, Any]) -> dict[str, Any]:
        return raw

    raw = with_one(Where(namespace, context, local), name, work)
    printed(output, tuning_of(raw).get("history", []), lambda: history_text(raw))


@app.command()
def advise(
    name: Name, namespace: Namespace = None, context: Context = None, local: Local = False, output: Output = "text",
) -> None:
    """Say which batch and queue depth are predicted to serve best, as start values for the manifest. Changes nothing."""
    from weir_operator.cli.plugin.texts import advice

    checked(output)

    async def work(api: Api, raw: dict[str, Any]) -> dict[str, Any]:
        return await api.explained(raw)

    said = with_one(Where(namespace, context, local), name, work)
    sentences, manifest = advice(said["pods"])

    def text() -> str:
        tail = f"\n\n{yaml.safe_dump(manifest, sort_keys=False).rstrip()}" if manifest else ""
        return (sentences or "no pod was read yet") + tail

    printed(output, {"advice": sentences.splitlines(), "manifest": manifest}, text)


@app.command()
def top(
    name: Name, namespace: Namespace = None, context: Context = None, local: Local = False, output: Output = "text",
    seconds: Annotated[float, typer.Option("--seconds", "-s", min=0.5, max=60, help="Time between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One table, as where the output is no terminal.")] = False,
) -> None:
    """Show the pods' figures live: rows running and waiting, KV, refusals, latencies, knobs. Ctrl-C ends it.

    From the pods' /metrics, through the API server's proxy. Latencies: median and 95th percentile of what ended in between.
    """
    from rich.live import Live

    from weir_operator.api import names
    from weir_operator.cli.plugin.top import Reading, Watched, table

    checked(output)

    async def work(api: Api, raw: dict[str, Any]) -> Any:
        where = raw["metadata"]["namespace"]
        watched = Watched(api, where, name)
        rows = await watched.read()
        if once or output != "text" or not console.is_terminal:
            await asyncio.sleep(seconds)
            return await watched.read(), raw
        with Live(table(rows, raw), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(seconds)
                fresh = await api.get(names.KIND, where, name) or raw
                live.update(table(await watched.read(), fresh), refresh=True)

    rows, raw = with_one(Where(namespace, context, local), name, work)
    shown = {pod: seen.to_json() if isinstance(seen, Reading) else {"error": seen} for pod, seen in rows.items()}
    printed(output, shown, lambda: table(rows, raw))


@app.command()
def logs(
    name: Name, namespace: Namespace = None, context: Context = None, local: Local = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Last lines of each pod.")] = 50,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Of the containers before these.")] = False,
) -> None:
    """Show what the servers write, each line with its pod."""
    from weir_operator.cli.plugin import work as doing
    from weir_operator.cli.plugin.kubectl import become

    where = Where(namespace, context, local)
    words = with_one(where, name, lambda api, raw: doing.log_command(api, where, name, follow, tail, previous))
    become(words)


@app.command()
def bench(
    name: Name, namespace: Namespace = None, context: Context = None, local: Local = False, output: Output = "text",
    rate: Annotated[float, typer.Option("--rate", "-r", min=0.01, max=1000, help="Requests a second, come what may.")] = 1.0,
    seconds: Annotated[float, typer.Option("--seconds", "-s", min=1, max=600, help="How long requests are sent.")] = 20.0,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, max=100_000, help="About so many in a prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=100_000, help="Most in an answer.")] = 32,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="WEIR_API_KEY", help="If the servers ask for one.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals and prompts.")] = 0,
) -> None:
    """Send a short open-loop load to the ready pods, through port-forward, and report what came of it.

    Goodput counts the requests that met both objectives of spec.slo; a refusal or a failure meets none. This is real load on
    real pods: they refuse others while it lasts if it is more than they bear.
    """
    from weir_operator.cli.plugin import work as doing
    from weir_operator.cli.plugin.bench import Load

    checked(output)
    where, load = Where(namespace, context, local), Load(rate, seconds, prompt_tokens, max_tokens, seed)
    report = with_one(where, name, lambda api, raw: doing.measured(api, where, raw, load, api_key, sys.stderr))
    printed(output, report, lambda: doing.report_text(report))


@app.command()
def size(
    name: Name, namespace: Namespace = None, context: Context = None, local: Local = False, output: Output = "text",
) -> None:
    """Do the server's memory arithmetic without serving: `weir-server size` in the pods' image, with their mounts and limits.

    In a cluster a pod of its own runs once and is deleted; it needs a node with room for what the pods ask for.
    """
    from weir_operator.cli.plugin import work as doing

    checked(output)
    where = Where(namespace, context, local)
    text = with_one(where, name, lambda api, raw: doing.sized(api, where, raw, output != "text"))
    if output == "text":
        typer.echo(text, nl=False)
    else:
        printed(output, json.loads(text), str)


# ---------------------------------------------------------------- changing

def _edit(where: Where, name: str, output_of: Callable[[dict[str, Any]], Any]) -> None:
    """Make the edit that `output_of` finds for the resource, and say it."""
    from weir_operator.cli.plugin.edits import make

    async def work(api: Api, raw: dict[str, Any]) -> str:
        edit = output_of(raw)
        await make(api, raw["metadata"]["namespace"], name, edit)
        return str(edit.says)

    says = with_one(where, name, work)
    typer.echo(f"inferencedeployments/{name} {says}")


def _field(says: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    from weir_operator.cli.plugin.edits import Edit

    return lambda _: Edit({"tuning": fields}, {}, says)


@app.command()
def pause(name: Name, namespace: Namespace = None, context: Context = None, local: Local = False) -> None:
    """Hold the present knobs: sets spec.tuning.paused."""
    _edit(Where(namespace, context, local), name, _field("paused", paused=True))


@app.command()
def resume(name: Name, namespace: Namespace = None, context: Context = None, local: Local = False) -> None:
    """Let the tuner move again: clears spec.tuning.paused."""
    _edit(Where(namespace, context, local), name, _field("resumed", paused=False))


@tuning.command(name="mode")
def set_mode(
    name: Name, mode: Annotated[str, typer.Argument(help="Auto, Advise or Disabled.", autocompletion=lambda: list(MODES))],
    namespace: Namespace = None, context: Context = None, local: Local = False,
) -> None:
    """Choose whether the tuner moves knobs (Auto), says what it would do (Advise), or does nothing (Disabled)."""
    if mode not in MODES:
        fail(f"the mode is Auto, Advise or Disabled, not {mode!r}")
    _edit(Where(namespace, context, local), name, _field(f"set to {mode}", mode=mode))


@tuning.command(name="rollback")
def tuning_rollback(name: Name, namespace: Namespace = None, context: Context = None, local: Local = False) -> None:
    """Put the knobs back to what they were before the last move, and pin them there: min = initial = max in the spec."""
    from weir_operator.cli.plugin.edits import to_rollback

    _edit(Where(namespace, context, local), name, to_rollback)


@tuning.command()
def release(name: Name, namespace: Namespace = None, context: Context = None, local: Local = False) -> None:
    """Undo a rollback's pins: the bounds that were declared before are back."""
    from weir_operator.cli.plugin.edits import to_release

    _edit(Where(namespace, context, local), name, to_release)


@app.command()
def rollback(
    name: Name, namespace: Namespace = None, context: Context = None,
    revision: Annotated[int | None, typer.Option("--revision", help="Of the Deployment. Default: the one before.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Replace the spec; otherwise it is only printed.")] = False,
) -> None:
    """Print the spec that the pods before these were made from; with --write put it back.

    The number of pods and autoscaling stay as they are. Where manifests are applied from a repository, change them there: the
    next apply would undo this.
    """
    from weir_operator.cli.plugin.edits import MANAGER, chosen, restored, revisions
    from weir_operator.io.apply import Writer

    async def work(api: Api, raw: dict[str, Any]) -> Any:
        found = chosen(await revisions(api, raw["metadata"]["namespace"], name), revision)
        spec = restored(raw, found)
        if write:
            await Writer(api).replace_spec(raw, spec, MANAGER)
        return found, spec

    found, spec = with_one(Where(namespace, context), name, work)
    typer.echo(yaml.safe_dump({"spec": spec}, sort_keys=False), nl=False)
    done = "is in force again" if write else "; --write puts it back"
    typer.echo(f"kubectl-infd: revision {found.number} of {found.created} {done}".replace(" ;", ";"), err=True)
