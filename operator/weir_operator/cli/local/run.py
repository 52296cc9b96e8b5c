"""`weir-operator local`: manifests as processes on this machine, under the same tuner loop, with the same status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, Group
from rich.live import Live

from weir_operator.api.types import InferenceDeployment
from weir_operator.cli.decision_log import DecisionLog
from weir_operator.cli.display import line, reading, screen
from weir_operator.cli.local.api import LocalApi, socket_folder
from weir_operator.cli.local.deployment import LocalDeployment, servers_of
from weir_operator.cli.local.models import fetch_models, models_folder, refuse_absent
from weir_operator.io.processes import ServerProcess, WrongInput, port_taken
from weir_operator.io.scrape import ControlClient
from weir_operator.loops.rounds import Rounds
from weir_operator.loops.steering import Subject
from weir_operator.loops.tuner import Round, TunerLoop, TunerSettings
from weir_operator.plan.observed import TuningReport
from weir_operator.tuner.types import Record


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What the command line says besides the manifests. `port`: of the first server, the others follow; 0 = free ones."""

    host: str
    port: int
    status_file: Path | None
    decision_log: Path | None
    log_dir: Path | None
    tuner: TunerSettings


def run_local(resources: Sequence[InferenceDeployment], options: LocalOptions, fail: Callable[[str], NoReturn]) -> int:
    """Until SIGINT or SIGTERM. Returns the exit status."""
    refuse_absent(resources, fail)
    _check_ports(options.host, options.port, sum(map(servers_of, resources)), fail)
    folder = Path(tempfile.mkdtemp(prefix="weir-local-"))
    try:
        fetch_models(resources, models_folder())
        return asyncio.run(_Local(resources, options, folder).run())
    except WrongInput as e:
        fail(str(e))
    except OSError as e:
        fail(f"{e.filename}: {e.strerror}" if e.filename else str(e))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_ports(host: str, port: int, servers: int, fail: Callable[[str], NoReturn]) -> None:
    for one in range(port, port + servers) if port else (0,):
        try:
            taken = port_taken(host, one)
        except (OSError, OverflowError) as e:
            fail(f"cannot listen on {host}, port {one}: {getattr(e, 'strerror', None) or e}")
        if taken:
            fail(f"port {one} is in use on {host}; choose another with --port, or --port 0 for a free one")


class _Local:
    """All deployments of one process: source of subjects and sink of the tuner loop, status file and display."""

    def __init__(self, resources: Sequence[InferenceDeployment], options: LocalOptions, folder: Path) -> None:
        self._settings, self._status_file = replace(options.tuner, report=options.tuner.tick), options.status_file
        self._log = DecisionLog(options.decision_log) if options.decision_log else None
        logs = options.log_dir or folder
        logs.mkdir(parents=True, exist_ok=True)
        token, port = secrets.token_hex(32), options.port
        self.deployments: dict[str, LocalDeployment] = {}
        for resource in resources:
            made = LocalDeployment(resource, options.host, port, folder, logs, token)
            self.deployments[made.name] = made
            port += len(made.servers) if port else 0
        self._rounds = Rounds()
        self._records: dict[str, Record] = {}
        self._screens: dict[str, Any] = {}
        self._console = Console()
        self._live: Live | None = None

    @property
    def _servers(self) -> list[ServerProcess]:
        return [server for deployment in self.deployments.values() for server in deployment.servers]

    # ------------------------------------------------------------------ what the tuner loop asks for

    def subjects(self) -> list[Subject]:
        return [deployment.subject() for deployment in self.deployments.values()]

    def publish(self, subject: Subject, news: TuningReport) -> None:
        self.deployments[subject.resource.metadata.name].publish(news)
        self._write_status()

    def polled(self, subject: Subject, round_: Round) -> None:
        self._rounds.heard(subject, round_)
        if self._log:
            self._log.write(subject.key, round_)
        self._records.update({r.pod: r for r in round_.records})
        seen = {name: reading(view, self._settings.tick) for name, view in round_.pods.items()}
        if self._live:
            self._draw(subject, round_, seen)
        elif round_.records:
            for name, r in seen.items():
                print(line(name, r, round_.spec, self._records.get(name)), flush=True)

    def forgotten(self, key: str) -> None:
        self._rounds.forgotten(key)

    # ------------------------------------------------------------------ status and display

    def _draw(self, subject: Subject, round_: Round, seen: Any) -> None:
        deployment = self.deployments[subject.resource.metadata.name]
        pods = {name: (r, self._records.get(name)) for name, r in seen.items()}
        history = deployment.status.get("tuning", {}).get("history", ())
        self._screens[deployment.name] = screen(f"{deployment.name} · {deployment.where}", pods, round_.spec, history)
        if self._live:
            self._live.update(Group(*self._screens.values()))

    def _write_status(self) -> None:
        """One resource as it is, several as a List, as kubectl prints them; the file is replaced as a whole."""
        if self._status_file is None:
            return
        objects = [deployment.with_processes() for deployment in self.deployments.values()]
        content = objects[0] if len(objects) == 1 else {"apiVersion": "v1", "kind": "List", "items": objects}
        fresh = self._status_file.with_name(self._status_file.name + f".{os.getpid()}")
        fresh.touch(mode=0o600)  # it holds the control token
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(self._status_file)

    def _changed(self, deployment: LocalDeployment) -> None:
        deployment.refresh()
        self._write_status()
        if not self._live:
            ready = sum(s.ready for s in deployment.servers)
            print(f"{deployment.name}: {ready} of {len(deployment.servers)} servers ready · {deployment.where}", flush=True)

    def _patched(self, _: LocalDeployment) -> None:
        self._write_status()

    # ------------------------------------------------------------------ life

    async def run(self) -> int:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop.set)
        epoch = int(time.time()) * 2**16
        self._write_status()
        async with contextlib.AsyncExitStack() as stack:
            if self._console.is_terminal:
                self._live = stack.enter_context(Live(console=self._console, refresh_per_second=2))
            await stack.enter_async_context(LocalApi(self.deployments, self._rounds.explained, self._patched, socket_folder()))
            client = await stack.enter_async_context(ControlClient())
            tuner = TunerLoop(client, self.subjects, lambda: epoch, self, self._settings)
            tasks = [
                asyncio.create_task(server.run(lambda d=deployment: self._changed(d), deployment.grace))  # type: ignore[misc]
                for deployment in self.deployments.values() for server in deployment.servers
            ]
            tasks.append(asyncio.create_task(tuner.run()))
            stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for sign in (signal.SIGTERM, signal.SIGINT):  # once more means at once
                loop.add_signal_handler(sign, self._kill)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done - {stopped}:
                task.result()
        if self._log:
            self._log.close()
        return 0

    def _kill(self) -> None:
        for server in self._servers:
            if server.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)
