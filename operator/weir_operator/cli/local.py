"""`weir-operator local`: the manifest as processes on this machine, under the same tuner loop, with the same status."""

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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rich.console import Console
from rich.live import Live

from weir_operator.api import names
from weir_operator.api.quantity import parse_duration
from weir_operator.api.types import InferenceDeployment
from weir_operator.cli.decision_log import DecisionLog
from weir_operator.cli.display import line, reading, screen
from weir_operator.io.apply import utc_now
from weir_operator.io.processes import ServerProcess, WrongInput, free_port, port_taken
from weir_operator.io.scrape import ControlClient, Endpoint, url_for
from weir_operator.loops.steering import Subject
from weir_operator.loops.tuner import Round, TunerLoop, TunerSettings
from weir_operator.plan.args import boot_file, server_args
from weir_operator.plan.manifests import Defaults
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.plan import plan
from weir_operator.plan.sources import locate
from weir_operator.tuner.types import Record

LOOPBACK = "127.0.0.1"
"""Of the control ports, wherever the servers themselves listen: only this process has to reach them."""
LONGEST_GRACE = 10.0
"""Seconds that running requests get after Ctrl-C; a second Ctrl-C ends at once."""


def run_local(
    resource: InferenceDeployment, host: str, port: int, status_file: Path | None, decision_log: Path | None,
    settings: TunerSettings, fail: Callable[[str], NoReturn],
) -> int:
    """Until SIGINT or SIGTERM. Returns the exit status."""
    if (scheme := locate(resource.spec).scheme) not in ("file", "package"):
        fail(
            f"spec.model.source: a {scheme}:// source needs a cluster; here use file:///PATH or package://DISTRIBUTION/FILE "
            "(weir-server fetch downloads one)"
        )
    for one in range(port, port + resource.spec.replicas) if port else (0,):
        try:
            taken = port_taken(host, one)
        except (OSError, OverflowError) as e:
            fail(f"cannot listen on {host}, port {one}: {getattr(e, 'strerror', None) or e}")
        if taken:
            fail(f"port {one} is in use on {host}; choose another with --port, or --port 0 for a free one")
    folder = Path(tempfile.mkdtemp(prefix="weir-local-"))
    try:
        return asyncio.run(_Local(resource, host, port, folder, status_file, decision_log, settings).run())
    except WrongInput as e:
        fail(str(e))
    except OSError as e:
        fail(f"{e.filename}: {e.strerror}" if e.filename else str(e))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Local:
    """One manifest on this machine: its processes, the tuner loop's source of subjects, and its sink."""

    def __init__(
        self, resource: InferenceDeployment, host: str, port: int, folder: Path, status_file: Path | None,
        decision_log: Path | None, settings: TunerSettings,
    ) -> None:
        self._resource, self._settings, self._status_file = resource, replace(settings, report=settings.tick), status_file
        self._token, self._since = secrets.token_hex(32), utc_now()
        self._log = DecisionLog(decision_log) if decision_log else None
        self._report: TuningReport | None = None
        self._status: dict[str, Any] = {}
        self._records: dict[str, Record] = {}
        self._console = Console()
        self._live: Live | None = None
        token_file, boot = folder / "token", folder / "boot.yaml"
        token_file.write_text(self._token)
        token_file.chmod(0o600)
        boot.write_text(yaml.safe_dump(boot_file(resource.spec)))
        self._servers = [self._server(i, host, port, folder) for i in range(resource.spec.replicas)]

    def _server(self, index: int, host: str, port: int, folder: Path) -> ServerProcess:
        http, control = (port + index if port else free_port(host)), free_port(LOOPBACK)
        args = [
            *server_args(self._resource.spec), f"--host={host}", f"--port={http}", f"--control-host={LOOPBACK}",
            f"--control-port={control}", f"--control-token-file={folder / 'token'}", f"--boot-file={folder / 'boot.yaml'}",
        ]
        name = f"{self._resource.metadata.name}-{index}"
        return ServerProcess(name, args, url_for(host, http), url_for(LOOPBACK, control), folder / f"{name}.log")

    # ------------------------------------------------------------------ what the tuner loop asks for

    def subjects(self) -> list[Subject]:
        endpoints = tuple(Endpoint(s.name, s.control_url, self._token, s.ready) for s in self._servers)
        return [Subject(f"local/{self._resource.metadata.name}", self._resource, endpoints)]

    def publish(self, subject: Subject, news: TuningReport) -> None:
        self._report = news
        self._write_status()

    def polled(self, subject: Subject, round_: Round) -> None:
        if self._log:
            self._log.write(round_)
        ticked = bool(round_.records)
        self._records.update({r.pod: r for r in round_.records})
        seen = {name: reading(view, self._settings.tick) for name, view in round_.pods.items()}
        if self._live:
            history = self._status.get("tuning", {}).get("history", ())
            pods = {name: (r, self._records.get(name)) for name, r in seen.items()}
            self._live.update(screen(f"{subject.resource.metadata.name} · {self._where()}", pods, round_.spec, history))
        elif ticked:
            for name, r in seen.items():
                print(line(name, r, round_.spec, self._records.get(name)), flush=True)

    # ------------------------------------------------------------------ status

    def _where(self) -> str:
        return ", ".join(s.url for s in self._servers) or "no servers"

    def _write_status(self) -> None:
        """The status that a cluster would show, plus where the processes are; the file is replaced as a whole."""
        ready, wanted = sum(s.ready for s in self._servers), len(self._servers)
        deployment = {"status": {"replicas": wanted, "updatedReplicas": wanted, "readyReplicas": ready}}
        resource = self._resource.model_copy(update={"status": self._status})
        seen = Observed(utc_now(), deployment, tuning=self._report)
        self._status = {**plan(resource, seen, Defaults("", "")).status, "url": self._servers[0].url if self._servers else ""}
        if self._status_file is None:
            return
        content = {
            "apiVersion": names.API_VERSION, "kind": names.KIND,
            "metadata": {"name": resource.metadata.name, "creationTimestamp": self._since},
            "spec": resource.spec.model_dump(by_alias=True, exclude_none=True, mode="json"),
            "status": self._status,
            "processes": [self._process(server) for server in self._servers],
        }
        fresh = self._status_file.with_name(self._status_file.name + f".{os.getpid()}")
        fresh.touch(mode=0o600)  # it holds the control token
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(self._status_file)

    def _process(self, server: ServerProcess) -> dict[str, Any]:
        return {
            "name": server.name, "pid": server.pid, "ready": server.ready, "restarts": server.restarts, "url": server.url,
            "controlUrl": server.control_url, "token": self._token, "log": str(server.log),
        }

    def _changed(self) -> None:
        self._write_status()
        ready = sum(s.ready for s in self._servers)
        if not self._live:
            print(f"{ready} of {len(self._servers)} servers ready · {self._where()}", flush=True)

    # ------------------------------------------------------------------ life

    async def run(self) -> int:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop.set)
        grace = min(LONGEST_GRACE, parse_duration(self._resource.spec.drain.timeout))
        epoch = int(time.time()) * 2**16
        self._write_status()
        with contextlib.ExitStack() as stack:
            if self._console.is_terminal:
                self._live = stack.enter_context(Live(console=self._console, refresh_per_second=2))
            async with ControlClient() as client:
                tuner = TunerLoop(client, self.subjects, lambda: epoch, self, self._settings)
                tasks = [asyncio.create_task(s.run(self._changed, grace)) for s in self._servers]
                tasks.append(asyncio.create_task(tuner.run()))
                stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
                done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
                stop.clear()
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
