"""The verbs that run something: logs, bench, size. In a cluster kubectl carries them, on this machine they go straight."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, TextIO

from weir_operator.api import names
from weir_operator.api.quantity import parse_duration
from weir_operator.cli.local.deployment import LOG_ANNOTATION
from weir_operator.cli.plugin import kubectl
from weir_operator.cli.plugin.api import Api, Where, port_of
from weir_operator.cli.plugin.bench import Load, play
from weir_operator.cli.plugin.edits import NothingToDo
from weir_operator.cli.plugin.texts import duration
from weir_operator.cli.plugin.top import pods_of
from weir_operator.io.scrape import url_for
from weir_operator.plan.pods import containers_of
from weir_operator.plan.trouble import is_ready

MOST_FORWARDED = 8
SERVE_ONLY = (
    "--api-key", "--api-key-file", "--body-limit", "--boot-file", "--control-host", "--control-port", "--control-token-file",
    "--drain-timeout", "--host", "--leave-seconds", "--log-level", "--no-metrics", "--port", "--served-model-name",
    "--slo-tpot", "--slo-ttft", "--state-dir",
)
"""Flags of `serve` that say nothing of its size, and that `size` does not take; a test holds the list to the server's own."""


# ---------------------------------------------------------------- logs

async def log_command(api: Api, where: Where, name: str, follow: bool, tail: int, previous: bool) -> list[str]:
    """The program that shows them."""
    if not where.local:
        selector = f"--selector={names.OWNER_LABEL}={name}"
        flags = [*(["--follow"] if follow else []), *(["--previous"] if previous else [])]
        shape = [f"--container={names.CONTAINER}", "--prefix", f"--tail={tail}", "--max-log-requests=50"]
        return kubectl.command(where, "logs", selector, *shape, *flags)
    if previous:
        raise NothingToDo("local mode has one log for all of a server's processes: leave --previous out")
    pods = await api.list("Pod", "default", f"{names.OWNER_LABEL}={name}")
    files = [pod["metadata"]["annotations"][LOG_ANNOTATION] for pod in pods]
    program = shutil.which("tail")
    if program is None or not files:
        raise NothingToDo("tail is not on the PATH" if files else f"{name} has no server")
    return [program, f"--lines={tail}", *(["-F"] if follow else []), *files]


# ---------------------------------------------------------------- bench

async def measured(
    api: Api, where: Where, raw: Mapping[str, Any], load: Load, key: str | None, progress: TextIO,
) -> dict[str, Any]:
    """The report of one load. Raises NothingToDo, Unreachable, ApiError."""
    meta, status = raw["metadata"], raw.get("status") or {}
    pods = [pod for pod in await pods_of(api, meta["namespace"], meta["name"]) if is_ready(pod)][:MOST_FORWARDED]
    if not pods:
        raise NothingToDo(f"no pod of {meta['name']} is ready")
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for pod in pods:
            port = port_of(pod, "http")
            forward = kubectl.forwarded(where, pod["metadata"]["name"], port)
            urls.append(url_for(pod["status"]["podIP"], port) if where.local else await stack.enter_async_context(forward))
        print(f"{load.rate:g} requests/s to {len(urls)} pods for {load.seconds:g} s …", file=progress, flush=True)
        slo = raw["spec"].get("slo") or {}
        goals = tuple(parse_duration(slo[k]) if slo.get(k) else None for k in ("ttft", "tpot"))
        report = await play(urls, str(status.get("model", meta["name"])), load, (goals[0], goals[1]), key)
    return report.to_json()


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {why}" for why, n in found.items()) or "none"


def report_text(report: Mapping[str, Any]) -> str:
    goal = report["objectives"]
    named = [f"{k} ≤ {duration(v)}" for k, v in goal.items() if v is not None]
    lines = [
        f"offered   {report['offered']} requests, {report['offeredPerSecond']:g}/s",
        f"served    {report['served']}, {report['tokensPerSecond']:g} tokens/s",
        f"goodput   {report['goodputPerSecond']:g}/s in time ({' and '.join(named) or 'no objectives: all that were served'})",
        f"refused   {_counted(report['refused'])}",
        f"failed    {_counted(report['failed'])}",
    ]
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("lateness", "sent late")):
        values = " ".join(f"{q} {duration(v)}" for q, v in report[name].items())
        lines.append(f"{label:<9} {values}")
    return "\n".join(lines)


# ---------------------------------------------------------------- size

async def sized(api: Api, where: Where, raw: Mapping[str, Any], as_json: bool) -> str:
    """What `weir-server size` prints. Raises NothingToDo with its own sentence where it refuses, Unreachable. However it ends,
    the pod that did it is deleted."""
    from weir_operator.plan.args import server_args
    from weir_operator.plan.plan import SpecError, parse

    asked = ["--output=json"] if as_json else []
    if where.local:
        try:
            args = server_args(parse({k: raw[k] for k in ("apiVersion", "kind", "metadata", "spec")}).spec)
        except SpecError as e:
            raise NothingToDo(str(e)) from None
        words = [sys.executable, "-m", "weir_server", *_sizing(args), *asked]
    else:
        meta = raw["metadata"]
        deployments = await api.list("Deployment", meta["namespace"], f"{names.OWNER_LABEL}={meta['name']}")
        if not deployments:
            raise NothingToDo("there is no Deployment yet to take the pods' template from")
        pod = f"{meta['name']}-size-{secrets.token_hex(3)}"
        words = kubectl.command(where, *once(pod, deployments[0]["spec"]["template"], asked))
    try:
        status, out, err = await kubectl.run(words)
    finally:
        if not where.local:  # kubectl deletes it too, unless it was ended before it could
            await kubectl.run(kubectl.command(where, "delete", "pod", pod, "--ignore-not-found", "--wait=false"))
    said = (out + err).strip()
    if "No such command" in said:
        raise NothingToDo("the server in this image has no command `size` yet: its start-up log prints the same arithmetic")
    if status:
        lines = [line for line in said.splitlines() if not line.startswith("pod ")]
        raise NothingToDo(lines[-1] if lines else f"it ended with status {status}")
    if as_json:
        try:
            json.loads(out)
        except ValueError:
            raise NothingToDo(f"the server prints no JSON: {said[:200]}") from None
    return out


def _sizing(args: Sequence[str]) -> list[str]:
    """`serve MODEL …` as `size MODEL …`."""
    return ["size", *(arg for arg in args[1:] if arg.split("=", 1)[0] not in SERVE_ONLY)]


def once(pod: str, template: Mapping[str, Any], asked: Sequence[str]) -> list[str]:
    """kubectl's words for a pod that runs `size` with the template's image, mounts and limits, and is deleted after it: after
    what starts before the server. Without the template's labels: no Service must find it, and no operator."""
    spec = dict(template["spec"])
    server = next(c for c in containers_of(spec) if c["name"] == names.CONTAINER)
    before = takewhile(lambda c: c["name"] != names.CONTAINER, spec.get("initContainers") or ())
    serving = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports", "restartPolicy")
    container = {k: v for k, v in server.items() if k not in serving}
    container["args"] = [*_sizing(server["args"]), *asked]
    spec |= {"initContainers": list(before), "containers": [container], "restartPolicy": "Never"}
    overrides = {"apiVersion": "v1", "spec": spec}
    return [
        "run", pod, f"--image={server['image']}", "--restart=Never", "--rm", "--attach",
        "--quiet", "--pod-running-timeout=5m", f"--overrides={json.dumps(overrides)}",
    ]
