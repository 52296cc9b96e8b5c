"""Fixtures over a real API server, and the reason why they skip where its programs are not at hand."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane_kit import ASSETS, NEEDED, ROOT, Cluster, Operator, free_port, start_control_plane

sys.path.insert(0, str(ROOT / "tests" / "unit"))
OPTIONAL_CRDS = os.environ.get("WEIR_OPTIONAL_CRDS", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in NEEDED if not (ASSETS and Path(ASSETS, name).exists())]
    why = f"set KUBEBUILDER_ASSETS to a folder with {', '.join(NEEDED)} (missing: {', '.join(missing)})"
    if not missing and not shutil.which("openssl"):
        missing, why = ["openssl"], "openssl is not installed: the API server needs a signing key"
    for item in items:
        if Path(item.fspath).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.api_server)
            if missing:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port = free_port()
    made = Cluster(tmp_path_factory.mktemp("control-plane"), f"https://127.0.0.1:{port}")
    try:
        lost = ("--node-monitor-period=1s", "--node-monitor-grace-period=8s")  # a node without a word for so long
        start_control_plane(made, port, *lost)
        made.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        made.kubectl("wait", "--for=condition=Established", "crd/inferencedeployments.weir.dev", "--timeout=30s")
        yield made
    finally:
        for process in reversed(made.processes):  # nothing of it is kept, so nothing has to end well
            process.kill()
            process.wait(15)


@pytest.fixture
def kube_config(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kube.connect() in this process means the cluster under test; the client read the variable when it was imported."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.kubeconfig))


def new_namespace(cluster: Cluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = new_namespace(cluster)
    yield name
    cluster.kubectl("delete", "infd", "--all", "-n", name)


@pytest.fixture
async def fake_server() -> AsyncIterator[Callable[[str, int, str], Awaitable[Any]]]:
    """Makes control ports of pods that do not exist, as the unit tests have them."""
    from fake_server import FakeServer

    made: list[FakeServer] = []

    async def start(host: str, port: int, token: str) -> FakeServer:
        made.append(FakeServer(host, port, token))
        return await made[-1].__aenter__()

    yield start
    for server in made:
        await server.__aexit__()


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[Operator]:
    """One for all tests of a module, serving every namespace."""
    made = Operator(cluster, new_namespace(cluster)).start(scope=False)
    yield made
    if made.process and made.process.poll() is None:
        made.stop()
    assert "Traceback" not in made.log, made.log


@pytest.fixture
def optional_kinds(cluster: Cluster) -> Iterator[None]:
    """Definitions of Prometheus Operator's and KEDA's kinds, for as long as a test runs."""
    if not OPTIONAL_CRDS:
        pytest.skip("set WEIR_OPTIONAL_CRDS to a folder with the CRDs of Prometheus Operator and KEDA")
    cluster.kubectl("apply", "--server-side", "-f", OPTIONAL_CRDS)
    cluster.kubectl("wait", "--for=condition=Established", "-f", OPTIONAL_CRDS, "--timeout=30s")
    yield
    cluster.kubectl("delete", "-f", OPTIONAL_CRDS)
