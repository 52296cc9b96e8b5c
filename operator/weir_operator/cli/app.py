"""`weir-operator`: run in a cluster, run the same manifest on this machine, print a plan, replay a decision log, simulate."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from weir_operator.api import names
from weir_operator.api.scalars import NAME_PATTERN
from weir_operator.loops.tuner import TunerSettings
from weir_operator.tuner.replicas import LEAST_TICK

app = typer.Typer(
    name="weir-operator", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=True,
    help=(
        "Run LLM servers and keep their batch size, KV budget, watermark and queue depth right for their traffic.\n\n"
        "[b]run[/b] does it in a cluster, [b]local[/b] on this machine: same manifest, same law, same status."
    ),
)

Tick = Annotated[float, typer.Option("--tick-seconds", envvar="WEIR_TICK_SECONDS", min=0.2, help="Time between decisions.")]
Poll = Annotated[float, typer.Option(
    "--poll-seconds", envvar="WEIR_POLL_SECONDS", min=0.1, help="Time between readings of a pod.",
)]
Lease = Annotated[float, typer.Option(
    "--lease-seconds", envvar="WEIR_LEASE_SECONDS", min=1.0,
    help="How long a pod keeps tuned knobs when the operator is gone; then it returns to its fallback.",
)]

ReplicaTick = Annotated[float, typer.Option(
    "--replica-tick-seconds", envvar="WEIR_REPLICA_TICK_SECONDS", min=0.2,
    help="Time between two looks at the number of pods; four ticks, if that is longer.",
)]
Log = Annotated[Path | None, typer.Option(
    "--decision-log", envvar="WEIR_DECISION_LOG",
    help="Append every reading and decision to this file as JSON lines, for `weir-operator replay`; - is standard output. "
    "At 256 MiB the file becomes FILE.1.",
)]


def fail(sentence: str, status: int = 2) -> NoReturn:
    """One line for the user, no traceback."""
    typer.echo(f"weir-operator: {sentence}", err=True)
    raise typer.Exit(status)


def settings_of(tick: float, poll: float, lease: float, replicas: float = LEAST_TICK) -> TunerSettings:
    """Checks what the options together must satisfy. Raises typer.Exit with one line."""
    if poll > tick:
        fail(f"--poll-seconds {poll:g} must not exceed --tick-seconds {tick:g}")
    if lease < 2 * poll:
        fail(f"--lease-seconds {lease:g} must be at least twice --poll-seconds {poll:g}: leases are renewed at polls")
    return TunerSettings(tick=tick, poll=poll, lease=lease, replicas=replicas)


@app.command()
def run(
    namespace: Annotated[list[str] | None, typer.Option(
        "--namespace", "-n", envvar="WEIR_NAMESPACE", help="Serve only this namespace; repeatable. Default: all of them.",
    )] = None,
    lease_name: Annotated[str, typer.Option(
        "--lease-name", envvar="WEIR_LEASE_NAME",
        help="The Lease by which replicas share out the work: one for each operator in a namespace.",
    )] = names.LEASE_NAME,
    server_image: Annotated[str, typer.Option(
        "--server-image", envvar="WEIR_SERVER_IMAGE", help="Image of the servers where a resource names none.",
    )] = "localhost/weir-server:dev",
    health_port: Annotated[int, typer.Option(
        "--health-port", envvar="WEIR_HEALTH_PORT", min=0, max=65535, help="Serves /healthz, /readyz and /metrics.",
    )] = 8082,
    log_format: Annotated[Literal["text", "json"], typer.Option(
        "--log-format", envvar="WEIR_LOG_FORMAT", help="Log lines for people, or one JSON object a line.",
    )] = "text",
    decision_log: Log = None, tick_seconds: Tick = 30.0, poll_seconds: Poll = 5.0, lease_seconds: Lease = 180.0,
    replica_tick_seconds: ReplicaTick = LEAST_TICK,
) -> None:
    """Run in a cluster: watch InferenceDeployments, keep their objects as declared, tune their pods.

    Credentials come from the pod's service account, else from the kubeconfig. Several replicas may run: one leads by a Lease.
    """
    from weir_operator.cli.run import run_operator

    settings = settings_of(tick_seconds, poll_seconds, lease_seconds, replica_tick_seconds)
    if not re.fullmatch(NAME_PATTERN, lease_name):
        fail(f"--lease-name {lease_name!r}: must be of a-z, 0-9, '-' and '.', and begin and end with a letter or a digit")
    namespaces = tuple(namespace or ())
    raise typer.Exit(run_operator(namespaces, lease_name, server_image, health_port, settings, log_format, decision_log, fail))


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(help="A manifest with one InferenceDeployment; - reads standard input.")],
    server_image: Annotated[str, typer.Option("--server-image", help="Image where the manifest names none.")] = "weir-server",
) -> None:
    """Print the objects that the operator would apply for a manifest. Needs no cluster and changes nothing."""
    import yaml

    from weir_operator.cli.manifest import load
    from weir_operator.plan.manifests import Defaults, children

    resource = load(file, fail)
    manifests = children(resource, Defaults(image=server_image, token="<made by the operator>"))
    typer.echo(yaml.safe_dump_all(manifests, sort_keys=False), nl=False)


@app.command()
def local(
    ctx: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="The manifests that a cluster would get; - is standard input.")],
    mode: Annotated[str | None, typer.Option("--mode", help="Auto, Advise or Disabled, not the manifests'.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address of the servers.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(
        "--port", min=0, max=65535, help="Port of the first server, the next ones follow; 0 = free ones.",
    )] = 8080,
    status_file: Annotated[Path | None, typer.Option("--status-file", help="Keep the status in this file, as JSON.")] = None,
    log_dir: Annotated[Path | None, typer.Option(
        "--log-dir", help="Keep the servers' output here. Default: a folder that goes with the process.",
    )] = None,
    systemd: Annotated[bool, typer.Option("--systemd", help="Print a systemd unit that runs this command, and end.")] = False,
    decision_log: Log = None, tick_seconds: Tick = 30.0, poll_seconds: Poll = 5.0, lease_seconds: Lease = 180.0,
) -> None:
    """Run manifests on this machine: their servers as processes, tuned as in a cluster. Ctrl-C ends all of them.

    While it runs, `kubectl infd VERB --local` shows and steers it as it would a cluster.
    """
    from weir_operator.cli.local.run import LocalOptions, run_local
    from weir_operator.cli.manifest import load_all

    settings = settings_of(tick_seconds, poll_seconds, lease_seconds)
    resources = load_all(files, fail, mode)
    if systemd:
        from weir_operator.cli.local.systemd import unit

        if Path("-") in files:
            fail("--systemd needs manifests in files: a unit has no standard input")
        typer.echo(unit([f.resolve() for f in files], _given(ctx, {"files", "systemd", "log_dir"})), nl=False)
        return
    options = LocalOptions(host, port, status_file, decision_log, log_dir, settings)
    raise typer.Exit(run_local(resources, options, fail))


def _given(ctx: typer.Context, without: set[str]) -> list[str]:
    """The options that were given, in full, so that another process may be given them; paths absolute."""
    words = []
    for option in ctx.command.params:
        value, source = ctx.params.get(option.name or ""), ctx.get_parameter_source(option.name or "")
        if option.name not in without and source is not None and source.name != "DEFAULT":
            words.append(f"{option.opts[0]}={value.resolve() if isinstance(value, Path) and str(value) != '-' else value}")
    return words


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="A file written with --decision-log, or an excerpt of one.")],
    with_law: Annotated[str | None, typer.Option(
        "--with-law", metavar="MODULE:FUNCTION", help="Decide by this function in place of the law, and show where it differs.",
    )] = None,
) -> None:
    """Run the saved readings through the law once more and compare: the same decisions, or where they differ.

    Exit status: 0 all the same, 1 some differ, 2 the file is no decision log.
    """
    from weir_operator.cli.replay import replay_log

    raise typer.Exit(replay_log(log, with_law, fail))


def _simulate() -> Callable[..., None]:
    try:
        from weir_operator.simulate.command import simulate
    except ModuleNotFoundError as e:  # it runs the server's pure rooms
        missing = e.name

        def unavailable() -> None:
            """Simulate the tuner over a model of a server. Not installed."""
            fail(f"simulate needs {missing}: pip install 'weir[server]'")

        return unavailable
    return simulate


def _drop_service_links() -> None:
    """For a Service called `weir-health` Kubernetes sets WEIR_HEALTH_PORT=tcp://…: such a value is no setting of ours."""
    for name, value in list(os.environ.items()):
        if name.startswith("WEIR_") and value.startswith(("tcp://", "udp://", "sctp://")):
            del os.environ[name]


def main() -> None:
    """Console script. The simulator's rooms are loaded only where it is asked for, or listed."""
    _drop_service_links()
    if not {"run", "local", "plan", "replay"} & set(sys.argv[1:2]):
        app.command(name="simulate")(_simulate())
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
