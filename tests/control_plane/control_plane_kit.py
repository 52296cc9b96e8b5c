"""A real etcd, kube-apiserver and kube-controller-manager, from the programs in KUBEBUILDER_ASSETS (as envtest has them)."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
NEEDED = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
ADMIN = "admin-token"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait(what: Callable[[], Any], seconds: float = 30.0, why: str = "") -> Any:
    """Poll until `what` gives something true; that. Fails with what was seen last."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            last = what()
            if last:
                return last
        except (subprocess.CalledProcessError, OSError, KeyError, IndexError, TypeError) as e:
            last = e
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {why or what}; last: {last}")


@dataclass
class Cluster:
    """The API server as a test sees it. Every test takes a namespace of its own."""

    folder: Path
    url: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def audit(self) -> Path:
        return self.folder / "audit.log"

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [f"{ASSETS}/kubectl", "--kubeconfig", str(self.kubeconfig), *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=180, check=False)
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(args)}: {done.stderr}")
        return done

    def get(self, kind: str, name: str, namespace: str) -> Any:
        done = self.kubectl("get", kind, name, "-n", namespace, "-o", "json", "--show-managed-fields", check=False)
        return yaml.safe_load(done.stdout) if done.returncode == 0 else None

    def apply(self, manifest: Any, namespace: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest), check=check)

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})}, cwd=ROOT)
        self.processes.append(process)
        return process

    def named(self, program: str) -> subprocess.Popen[bytes]:
        """The process of one of the control plane's programs that was started last."""
        return next(p for p in reversed(self.processes) if Path(p.args[0]).name == program)  # type: ignore[index]

    def writes(self, namespace: str) -> list[dict[str, Any]]:
        """What the operator wrote to this namespace, Leases aside, as audited."""
        lines = [json.loads(line) for line in self.audit.read_text().splitlines()]
        found = [line for line in lines if (line.get("objectRef") or {}).get("namespace") == namespace]
        others = ("kubectl", "kube-controller", "kube-apiserver")  # the last one tells of Services' addresses
        ours = [line for line in found if not line["userAgent"].startswith(others)]
        return [line for line in ours if line["objectRef"]["resource"] != "leases" and line["verb"] in WRITES]

    def quiet(self, operator: Operator, namespace: str, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait until the status speaks of the pods that are there, the tuner has had its first say, and nothing is written;
        or until `unless`."""
        count, same = -1, 0

        def still() -> bool:
            nonlocal count, same
            before, count = count, len(self.writes(namespace))
            same = same + 1 if before == count and operator.metric("weir_operator_queued_keys") == 0 else 0
            return same >= 5

        def settled() -> bool:
            listed = json.loads(self.kubectl("get", "infd,deployment", "-n", namespace, "-o", "json").stdout)["items"]
            made = {i["metadata"]["name"]: i for i in listed if i["kind"] == "Deployment"}
            for infd in (i for i in listed if i["kind"] == "InferenceDeployment"):
                deployment = made[infd["metadata"]["name"]]
                status, pods = deployment["status"], deployment["status"].get("replicas", 0)
                seen = status["observedGeneration"] == deployment["metadata"]["generation"]
                if not seen or pods < deployment["spec"]["replicas"]:
                    return False
                if "tuning" not in infd["status"] or infd["status"]["replicas"] != pods:
                    return False
            return True

        wait(lambda: unless() or settled(), why="the controllers and the tuner have had their say")
        wait(lambda: unless() or still(), why="nothing left to do")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def token_config(self, token: str, name: str) -> Path:
        """A kubeconfig with this bearer token."""
        file = self.folder / f"{name}.kubeconfig"
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        file.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "t",
            "clusters": [{"name": "t", "cluster": cluster}], "users": [{"name": "t", "user": {"token": token}}],
            "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}],
        }))
        return file


def start_control_plane(cluster: Cluster, port: int, *of_controllers: str) -> None:
    """`of_controllers`: more flags of the controller manager."""
    folder, etcd = cluster.folder, f"http://127.0.0.1:{free_port()}"
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
    cluster.token_config(ADMIN, "admin").rename(cluster.kubeconfig)
    rules = [{"level": "Metadata", "omitStages": ["RequestReceived", "ResponseStarted"]}]
    (folder / "audit.yaml").write_text(yaml.safe_dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
    peer = f"http://127.0.0.1:{free_port()}"
    cluster.start(
        "etcd", f"{ASSETS}/etcd", f"--data-dir={folder}/etcd", "--unsafe-no-fsync", f"--listen-client-urls={etcd}",
        f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}", "--log-level=error",
    )
    cluster.start(
        "apiserver", f"{ASSETS}/kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={port}",
        f"--cert-dir={folder}/certs",
        f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC", "--service-cluster-ip-range=10.97.0.0/16",
        f"--service-account-key-file={folder}/sa.key", f"--service-account-signing-key-file={folder}/sa.key",
        "--service-account-issuer=https://kubernetes.default.svc", "--bind-address=127.0.0.1",
        f"--audit-policy-file={folder}/audit.yaml", f"--audit-log-path={cluster.audit}",
    )
    wait(lambda: cluster.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", 60, "the API server")
    cluster.start(
        "controllers", f"{ASSETS}/kube-controller-manager", f"--kubeconfig={cluster.kubeconfig}", "--leader-elect=false",
        f"--service-account-private-key-file={folder}/sa.key", f"--cert-dir={folder}/kcm", "--bind-address=127.0.0.1",
        f"--secure-port={free_port()}", "--kube-api-qps=200", "--kube-api-burst=400", *of_controllers,
    )


def restart(cluster: Cluster, program: str, away: float = 0.0) -> None:
    """End one of the control plane's programs at once, have it away for a while, and wait until the API server serves again."""
    old = cluster.named(program)
    old.kill()
    old.wait(15)
    time.sleep(away)
    cluster.start(program.removeprefix("kube-"), *old.args)  # type: ignore[misc]
    wait(lambda: cluster.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", 60, "the API server")


class Operator:
    """`weir-operator run` as a process. Its Lease and key are in `namespace`; unless told otherwise it serves that one only."""

    def __init__(self, cluster: Cluster, namespace: str, name: str = "operator", kubeconfig: Path | None = None) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, f"{name}-{namespace}"
        self.kubeconfig, self.port = kubeconfig or cluster.kubeconfig, free_port()
        self.env: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *args: str, scope: bool = True) -> Operator:
        where = [f"--namespace={self.namespace}"] if scope else []
        self.process = self.cluster.start(
            self.name, sys.executable, "-m", "weir_operator", "run", *where, f"--health-port={self.port}",
            "--server-image=registry/weir-server:test", *args,
            env={"KUBECONFIG": str(self.kubeconfig), "POD_NAMESPACE": self.namespace, **self.env},
        )
        return self

    @property
    def log(self) -> str:
        return self.cluster.log(self.name)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples on the operator's health port."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))

    def stop(self, sign: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(sign)
        return self.process.wait(15)


def resource(name: str = "chat", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "weir.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name},
        "spec": {"model": {"source": "file:///models/m.gguf"}, "slo": {"ttft": "2s", "tpot": "80ms"}, **spec},
    }


def condition(cluster: Cluster, namespace: str, kind: str, name: str = "chat") -> dict[str, Any]:
    status = (cluster.get("infd", name, namespace) or {}).get("status", {})
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def token_of(cluster: Cluster, namespace: str, account: str) -> str:
    return cluster.kubectl("create", "token", account, "-n", namespace).stdout.strip()


def decoded(secret: dict[str, Any], key: str) -> str:
    return base64.b64decode(secret["data"][key]).decode()



def child(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any] | None:
    """The one object of a kind that the operator keeps for `chat`."""
    listed = cluster.kubectl("get", kind, "-n", namespace, "-l", "weir.dev/name=chat", "-o", "json").stdout
    items = json.loads(listed)["items"]
    return items[0] if len(items) == 1 else None


def settled(cluster: Cluster, operator: Operator, namespace: str) -> None:
    """Wait until the operator has applied everything and has nothing left to do."""
    wait(lambda: condition(cluster, namespace, "Ready").get("reason"), why="a status")
    wait(lambda: child(cluster, namespace, "deployment"))
    wait(lambda: operator.metric("weir_operator_queued_keys") == 0)


def make_ready(cluster: Cluster, namespace: str, address: str = "127.0.0.1") -> dict[str, Any]:
    """There is no node: say in its place that the deployment's pod runs and is ready."""
    pod = wait(lambda: child(cluster, namespace, "pod"), why="a pod of the deployment")
    status = {
        "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
        "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady", "PodScheduled")],
        "containerStatuses": [{
            "name": "server", "ready": True, "restartCount": 0, "image": "x", "imageID": "x",
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }],
    }
    cluster.kubectl(
        "patch", "pod", pod["metadata"]["name"], "-n", namespace, "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": status}),
    )
    return pod


def edit(cluster: Cluster, namespace: str, seconds: int) -> None:
    """Change something that restarts no pod: the objective `ttft` of `chat`."""
    change = json.dumps({"spec": {"slo": {"ttft": f"{seconds}s"}}})
    cluster.kubectl("patch", "infd", "chat", "-n", namespace, "--type=merge", "-p", change)


def acted(cluster: Cluster, namespace: str, seconds: int) -> bool:
    """Whether the operator has carried that change out."""
    return f"ttft: {seconds}.0" in (child(cluster, namespace, "configmap") or {})["data"]["boot.yaml"]


@contextmanager
def watching_replicas(cluster: Cluster, namespace: str) -> Iterator[list[int]]:
    """Every number of pods that the Deployment has had, as a watch tells it."""
    seen: list[int] = []
    command = [
        f"{ASSETS}/kubectl", "--kubeconfig", str(cluster.kubeconfig), "get", "deployment", "chat", "-n", namespace, "-w",
        "-o", "jsonpath={.spec.replicas}{'\\n'}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        def read() -> None:
            assert process.stdout is not None
            seen.extend(int(line) for line in process.stdout if line.strip())

        reader = threading.Thread(target=read)
        reader.start()
        try:
            wait(lambda: len(seen) > 0, why="the watch tells")
            yield seen
        finally:
            process.terminate()
            reader.join(10)


def replicas(cluster: Cluster, namespace: str) -> int:
    return int(cluster.get("deployment", "chat", namespace)["spec"]["replicas"])
