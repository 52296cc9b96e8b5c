"""`kubectl infd`: what the resources do and why, from their status; and pausing the tuner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from weir_operator.api import names
from weir_operator.io.apply import Writer
from weir_operator.io.kube import ApiError, Kube, Unreachable, configuration, path

app = typer.Typer(
    name="kubectl-infd", no_args_is_help=True, pretty_exceptions_enable=False,
    help="See what InferenceDeployments do and why, and pause their tuning. Uses your kubeconfig, as kubectl does.",
)
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's.")]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Output = Annotated[str, typer.Option("--output", "-o", help="text or json.")]
Name = Annotated[str, typer.Argument(help="The InferenceDeployment.")]
_DOT = {"True": "●", "False": "○", "Unknown": "◌"}


def fail(sentence: str, status: int = 2) -> NoReturn:
    typer.echo(f"kubectl-infd: {sentence}", err=True)
    raise typer.Exit(status)


def context_namespace(context: str | None) -> str:
    """The namespace of the kubeconfig's context, as kubectl takes it."""
    from kubernetes.aio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

    for part in str(KUBE_CONFIG_DEFAULT_LOCATION).split(":"):
        file = Path(part).expanduser()
        if file.exists():
            content = yaml.safe_load(file.read_text()) or {}
            wanted = context or content.get("current-context")
            for entry in content.get("contexts") or ():
                if entry["name"] == wanted:
                    return str(entry["context"].get("namespace") or "default")
    return "default"


def call(context: str | None, work: Callable[[Kube], Awaitable[Any]]) -> Any:
    """Run `work` with a connection; what goes wrong is one line."""
    async def main() -> Any:
        async with Kube(await configuration(context)) as kube:
            return await work(kube)

    try:
        return asyncio.run(main())
    except Unreachable as e:
        fail(str(e), 1)
    except ApiError as e:
        fail(e.message, 1)


def fetch(name: str, namespace: str | None, context: str | None) -> dict[str, Any]:
    where = namespace or context_namespace(context)
    found = call(context, lambda kube: kube.get(names.KIND, where, name))
    if found is None:
        fail(f"no InferenceDeployment {name!r} in namespace {where!r}", 1)
    return dict(found)


def printed(output: str, value: Any, text: Callable[[], str]) -> None:
    if output not in ("text", "json"):
        fail(f"-o must be text or json, not {output!r}")
    typer.echo(json.dumps(value, indent=2) if output == "json" else text())


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def knobs_text(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in knobs.items()) or "unknown"


def status_text(raw: Mapping[str, Any]) -> str:
    """The resource, its conditions and its pods as a small tree."""
    status = raw.get("status") or {}
    meta, tuning = raw["metadata"], status.get("tuning") or {}
    lines = [f"{meta['namespace']}/{meta['name']}  {status.get('readyReplicas', 0)}/{raw['spec'].get('replicas', 1)} ready"]
    if status.get("url"):
        lines.append(f"  {status['url']}  model {status.get('model', '')}")
    for c in status.get("conditions", ()):
        lines.append(f"  {_DOT.get(c['status'], '?')} {c['type']}: {c['reason']} – {c['message']}")
    for pod in tuning.get("pods", ()):
        lines.append(f"  └ {pod['name']}: {knobs_text(pod['knobs'])}; {pod.get('outcome', 'no decision yet')}")
    return "\n".join(lines)


def explain_text(raw: Mapping[str, Any]) -> str:
    """Plain sentences: what holds, what the tuner did last and why, what it predicted and saw."""
    status = raw.get("status") or {}
    tuning, slo = status.get("tuning") or {}, raw["spec"].get("slo")
    goal = f"{slo['ttft']} to the first token, {slo['tpot']} a token" if slo else "none: without spec.slo nothing is tuned"
    said = [f"{kind}: {_condition(status, kind).get('message', 'unknown')}" for kind in ("Saturated", "MetricsAvailable")]
    lines = [
        f"Mode: {tuning.get('mode', 'not reported yet')}. Objectives: {goal}.",
        f"Attainment: {tuning.get('slo', 'too few requests to say')}. {' '.join(said)}",
    ]
    latest: dict[str, Mapping[str, Any]] = {}
    for entry in tuning.get("history", ()):
        latest.setdefault(entry["pod"], entry)
    for pod in tuning.get("pods", ()):
        lines.append(f"{pod['name']}: {knobs_text(pod['knobs'])}.")
        if entry := latest.get(pod["name"]):
            lines.append(f"  {entry['outcome']} ({entry['rule']}) at {entry['time']}: {entry['reason']}")
            for part in ("predicted", "observed"):
                if values := entry.get(part):
                    lines.append(f"  {part}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
    return "\n".join(lines)


def history_text(raw: Mapping[str, Any]) -> str:
    lines = []
    for entry in ((raw.get("status") or {}).get("tuning") or {}).get("history", ()):
        changes = ", ".join(f"{knob} {a} → {b}" for knob, (a, b) in entry.get("changes", {}).items())
        lines.append(f"{entry['time']}  {entry['pod']}  {entry['outcome']} ({entry['rule']})  {changes}\n    {entry['reason']}")
    return "\n".join(lines) or "no decision yet"


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="One of them; default: all.")] = None,
    namespace: Namespace = None, context: Context = None, output: Output = "text",
) -> None:
    """Show resources with their conditions, pods and knobs."""
    if name is not None:
        found = [fetch(name, namespace, context)]
    else:
        where = namespace or context_namespace(context)
        found = call(context, lambda kube: kube.list(names.KIND, where))
    printed(output, found, lambda: "\n".join(map(status_text, found)) or "no InferenceDeployment here")


@app.command()
def explain(name: Name, namespace: Namespace = None, context: Context = None, output: Output = "text") -> None:
    """Say what the tuner sees, what it did last, and why."""
    raw = fetch(name, namespace, context)
    printed(output, (raw.get("status") or {}).get("tuning") or {}, lambda: explain_text(raw))


@app.command()
def history(name: Name, namespace: Namespace = None, context: Context = None, output: Output = "text") -> None:
    """Show the last decisions, newest first."""
    raw = fetch(name, namespace, context)
    printed(output, ((raw.get("status") or {}).get("tuning") or {}).get("history", []), lambda: history_text(raw))


def _set_paused(name: str, namespace: str | None, context: str | None, paused: bool) -> None:
    where = namespace or context_namespace(context)
    change = {"tuning": {"paused": paused}}
    call(context, lambda kube: Writer(kube).patch_spec(where, name, change, "kubectl-infd"))
    typer.echo(f"{path(names.KIND, where, name).rsplit('/', 2)[1]}/{name} {'paused' if paused else 'resumed'}")


@app.command()
def pause(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Hold the present knobs: sets spec.tuning.paused."""
    _set_paused(name, namespace, context, True)


@app.command()
def resume(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Let the tuner move again: clears spec.tuning.paused."""
    _set_paused(name, namespace, context, False)


def main() -> None:
    """Console script; kubectl finds it as `kubectl infd`."""
    app()
