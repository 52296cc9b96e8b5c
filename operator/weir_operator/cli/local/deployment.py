"""One manifest on this machine: its servers, what the tuner loop is told of it, and how it looks to those who ask.

It is shown as a cluster shows it: the resource with its status, and each server as a Pod whose container is the process.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from weir_operator.api import names
from weir_operator.api.quantity import parse_duration
from weir_operator.api.types import InferenceDeployment
from weir_operator.cli.local.models import models_folder
from weir_operator.io.apply import utc_now
from weir_operator.io.processes import ServerProcess, free_port
from weir_operator.io.scrape import Endpoint, url_for
from weir_operator.loops.steering import Subject
from weir_operator.plan.args import boot_file, server_args
from weir_operator.plan.manifests import Defaults
from weir_operator.plan.observed import Observed, TuningReport
from weir_operator.plan.plan import parse, plan
from weir_operator.plan.replicas import wanted_replicas
from weir_operator.plan.sources import locate

LOOPBACK = "127.0.0.1"
"""Of the control ports, wherever the servers themselves listen: only this process has to reach them."""
LONGEST_GRACE = 10.0
"""Seconds that running requests get after Ctrl-C; a second Ctrl-C ends at once."""
LOG_ANNOTATION = f"{names.GROUP}/log"


class NotHere(ValueError):
    """A change that a running local deployment cannot take; the text says why."""


def servers_of(resource: InferenceDeployment) -> int:
    """As many as a cluster would begin with; no autoscaler changes it here."""
    return wanted_replicas(resource, Observed(scalable=False))


class LocalDeployment:
    """`port`: of its first server, 0 = free ones. `folder` holds what it writes for its servers, `logs` what they write."""

    def __init__(
        self, resource: InferenceDeployment, host: str, port: int, folder: Path, logs: Path, token: str,
    ) -> None:
        self.resource, self._folder, self._token = resource, folder, token
        self._annotations: dict[str, str] = {}
        self._report: TuningReport | None = None
        self._uid, self._since, self.version = str(uuid.uuid4()), utc_now(), 1
        self.status: dict[str, Any] = {}
        (folder / f"{self.name}.token").write_text(token)
        (folder / f"{self.name}.token").chmod(0o600)
        self._write_boot()
        numbers = range(servers_of(resource))
        self.servers = [self._server(i, host, port + i if port else free_port(host), logs) for i in numbers]
        self.refresh()

    @property
    def name(self) -> str:
        return self.resource.metadata.name

    @property
    def grace(self) -> float:
        return min(LONGEST_GRACE, parse_duration(self.resource.spec.drain.timeout))

    @property
    def where(self) -> str:
        return ", ".join(s.url for s in self.servers) or "no servers"

    def _server(self, index: int, host: str, http: int, logs: Path) -> ServerProcess:
        control = free_port(LOOPBACK)
        serve, _, *flags = server_args(self.resource.spec)  # but for where the model lies, as in a pod
        args = [
            serve, locate(self.resource.spec, str(models_folder())).path, *flags, f"--host={host}", f"--port={http}",
            f"--control-host={LOOPBACK}", f"--control-port={control}",
            f"--control-token-file={self._folder / self.name}.token", f"--boot-file={self._folder / self.name}.boot.yaml",
        ]
        name = f"{self.name}-{index}"
        return ServerProcess(name, args, url_for(host, http), url_for(LOOPBACK, control), logs / f"{name}.log")

    def _write_boot(self) -> None:
        """Read by a server at its next start: a change of objectives or start values outlives a crash."""
        (self._folder / f"{self.name}.boot.yaml").write_text(yaml.safe_dump(boot_file(self.resource.spec)))

    # ------------------------------------------------------------------ the tuner loop's side

    def subject(self) -> Subject:
        endpoints = tuple(Endpoint(s.name, s.control_url, self._token, s.ready) for s in self.servers)
        return Subject(f"{self.resource.metadata.namespace}/{self.name}", self.resource, endpoints)

    def publish(self, news: TuningReport) -> None:
        self._report = news
        self.refresh()

    def refresh(self) -> None:
        """Make the status say what is true now, by the same plan as in a cluster."""
        ready, wanted = sum(s.ready for s in self.servers), len(self.servers)
        counts = {"replicas": wanted, "updatedReplicas": wanted, "readyReplicas": ready}
        deployment = {"spec": {"replicas": wanted}, "status": counts}
        resource = self.resource.model_copy(update={"status": self.status})
        seen = Observed(utc_now(), deployment, [self.pod(s) for s in self.servers], tuning=self._report, scalable=False)
        status = {**plan(resource, seen, Defaults("", "")).status, "url": self.servers[0].url if self.servers else ""}
        self.version += status != self.status
        self.status = status

    # ------------------------------------------------------------------ how it looks

    def object(self) -> dict[str, Any]:
        """The resource as an API server would give it."""
        meta = self.resource.metadata
        return {
            "apiVersion": names.API_VERSION, "kind": names.KIND,
            "metadata": {
                "name": meta.name, "namespace": meta.namespace, "uid": self._uid, "creationTimestamp": self._since,
                "generation": meta.generation, "resourceVersion": str(self.version), "annotations": dict(self._annotations),
            },
            "spec": self.resource.spec.model_dump(by_alias=True, exclude_none=True, mode="json"),
            "status": self.status,
        }

    def with_processes(self) -> dict[str, Any]:
        """For the status file, which its owner alone may read: with where the servers are and the token of their control
        ports."""
        return {**self.object(), "processes": [
            {
                "name": s.name, "pid": s.pid, "ready": s.ready, "restarts": s.restarts, "url": s.url,
                "controlUrl": s.control_url, "token": self._token, "log": str(s.log),
            }
            for s in self.servers
        ]}

    def pod(self, server: ServerProcess) -> dict[str, Any]:
        """A server as a Pod: ready, restarts, and how its process ended the last time."""
        ready, ended = server.ready, server.exit
        state: dict[str, Any] = {"running": {}} if server.pid else {}
        if ended and not server.pid:
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": f"started again {ended.delay:.0f} s after it ended"}}
        container: dict[str, Any] = {"name": names.CONTAINER, "ready": ready, "restartCount": server.restarts, "state": state}
        if ended:
            container["lastState"] = {"terminated": {"exitCode": _code(ended.status), "message": ended.words}}
        host, port = server.url.removeprefix("http://").rsplit(":", 1)
        return {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": server.name, "namespace": self.resource.metadata.namespace, "labels": {names.OWNER_LABEL: self.name},
                "annotations": {LOG_ANNOTATION: str(server.log)}, "creationTimestamp": self._since,
            },
            "spec": {"containers": [{"name": names.CONTAINER, "ports": [{"name": "http", "containerPort": int(port)}]}]},
            "status": {
                "phase": "Running", "podIP": host.strip("[]"),
                "conditions": [{"type": "Ready", "status": str(ready)}], "containerStatuses": [container],
            },
        }

    def patch(self, change: Mapping[str, Any]) -> None:
        """A merge patch of spec and annotations. Raises SpecError for a spec that cannot be used, NotHere for a change of what
        the running servers were started with."""
        meta = self.resource.metadata
        spec = _merged(self.resource.spec.model_dump(by_alias=True, exclude_none=True, mode="json"), change.get("spec") or {})
        fresh = parse({
            "apiVersion": names.API_VERSION, "kind": names.KIND, "spec": spec,
            "metadata": {"name": meta.name, "namespace": meta.namespace, "generation": meta.generation + 1},
        })
        before, after = self.resource.spec, fresh.spec
        if server_args(before) != server_args(after) or servers_of(self.resource) != servers_of(fresh):
            raise NotHere("model, engine and replicas are fixed while it runs: change the manifest and start it again")
        if after != before:
            self.resource = fresh
            self._write_boot()
        annotations = (change.get("metadata") or {}).get("annotations") or {}
        self._annotations = _merged(self._annotations, annotations)
        self.version += 1
        self.refresh()


def _code(status: int) -> int:
    """As a shell and a container runtime have it: 128 and the signal."""
    return status if status >= 0 else 128 - status


def _merged(value: Any, change: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396: null deletes, objects merge, everything else replaces."""
    out = dict(value) if isinstance(value, Mapping) else {}
    for key, new in change.items():
        if new is None:
            out.pop(key, None)
        else:
            out[key] = _merged(out.get(key), new) if isinstance(new, Mapping) else new
    return out
