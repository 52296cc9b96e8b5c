"""Local mode without a server: how a deployment looks to those who ask, what it lets them change, its socket, its unit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from weir_operator.api import names
from weir_operator.cli.app import app
from weir_operator.cli.local.api import LocalApi, make_folder
from weir_operator.cli.local.deployment import LocalDeployment, NotHere
from weir_operator.cli.local.systemd import unit
from weir_operator.cli.plugin.api import LocalSocket, Where, find, proxied, reach
from weir_operator.io.apply import Writer
from weir_operator.io.kube import ApiError, Unreachable
from weir_operator.io.processes import Exit
from weir_operator.plan.plan import SpecError, parse

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/smollm2.yaml"


@pytest.fixture
def deployment(tmp_path: Path) -> LocalDeployment:
    return LocalDeployment(parse(yaml.safe_load(EXAMPLE.read_text())), "127.0.0.1", 0, tmp_path, tmp_path, "token")


@pytest.fixture
async def served(deployment: LocalDeployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalApi]:
    monkeypatch.setenv("WEIR_LOCAL_DIR", str(tmp_path / "sockets"))
    deployments = {deployment.name: deployment}
    async with LocalApi(deployments, lambda key: {"of": key}, lambda _: None, tmp_path / "sockets") as api:
        yield api


def condition(deployment: LocalDeployment, kind: str) -> dict[str, Any]:
    return next(c for c in deployment.status["conditions"] if c["type"] == kind)


# ---------------------------------------------------------------- how it looks

def test_a_server_that_ended_is_a_pod_that_crashed(deployment: LocalDeployment) -> None:
    [server] = deployment.servers
    assert condition(deployment, "Ready")["reason"] == "Starting"
    server.exit, server.restarts = Exit(-9, "ended by SIGKILL", 4.0), 3
    deployment.refresh()
    assert condition(deployment, "Ready")["reason"] == "CrashLooping"
    assert "ended by SIGKILL" in condition(deployment, "Ready")["message"]
    [container] = deployment.pod(server)["status"]["containerStatuses"]
    assert (container["restartCount"], container["lastState"]["terminated"]["exitCode"]) == (3, 137)
    assert container["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    server.exit, server.ready = Exit(2, "no such file", 1.0), False
    deployment.refresh()
    assert (condition(deployment, "ModelLoaded")["reason"], condition(deployment, "ModelLoaded")["message"]) == (
        "LoadFailed", "no such file",
    )
    for ready in (True, False):
        server._set_ready(ready, deployment.refresh)
    assert condition(deployment, "Ready")["reason"] == "Starting", "it has served since"


@pytest.mark.parametrize("mode", ["Internal", "External"])
def test_the_number_of_servers_is_fixed_here_whoever_would_set_it_in_a_cluster(tmp_path: Path, mode: str) -> None:
    raw = yaml.safe_load(EXAMPLE.read_text())
    raw["spec"]["autoscaling"] = {"mode": mode, "minReplicas": 2, "maxReplicas": 4}
    made = LocalDeployment(parse(raw), "127.0.0.1", 0, tmp_path, tmp_path, "token")
    owner = condition(made, "AutoscalerOwned")
    assert (len(made.servers), made.status["desiredReplicas"]) == (2, 2)
    assert (owner["status"], owner["reason"]) == ("False", "FixedHere")
    assert made.subject().replicas is None, "the tuner is not asked for another number"
    with pytest.raises(NotHere, match="replicas are fixed"):
        made.patch({"spec": {"autoscaling": {"minReplicas": 3}}})


def test_the_token_is_in_the_status_file_alone(deployment: LocalDeployment) -> None:
    assert deployment.with_processes()["processes"][0]["token"] == "token"
    assert "processes" not in deployment.object()
    assert "token" not in str(deployment.object())


def test_a_patch_changes_what_moves_while_running_and_refuses_the_rest(deployment: LocalDeployment, tmp_path: Path) -> None:
    version = deployment.version
    deployment.patch({"spec": {"slo": {"ttft": "5s"}, "tuning": {"knobs": {"maxBatchSize": {"initial": None, "max": 8}}}}})
    spec = deployment.resource.spec
    assert spec.slo is not None and (spec.slo.ttft, spec.slo.tpot) == ("5s", "80ms")
    assert (spec.tuning.knobs.max_batch_size.initial, spec.tuning.knobs.max_batch_size.max) == (None, 8)
    boot = yaml.safe_load((tmp_path / "smollm2.boot.yaml").read_text())
    assert boot["slo"]["ttft"] == 5.0 and "max_batch_size" not in boot["initial"]  # what a restarted server begins with
    assert deployment.version > version and deployment.resource.metadata.generation == 1
    for fixed in ({"replicas": 2}, {"model": {"servedName": "other"}}, {"engine": {"prefixCaching": False}}):
        with pytest.raises(NotHere, match="change the manifest"):
            deployment.patch({"spec": fixed})
    with pytest.raises(SpecError, match="foo"):
        deployment.patch({"spec": {"foo": 1}})
    assert deployment.resource.spec == spec
    deployment.patch({"metadata": {"annotations": {"a": "1", "b": "2"}}})
    deployment.patch({"metadata": {"annotations": {"a": None}}})
    assert deployment.object()["metadata"]["annotations"] == {"b": "2"}


# ---------------------------------------------------------------- its socket

async def test_the_plugins_requests_are_answered_as_an_api_server_would(served: LocalApi, deployment: LocalDeployment) -> None:
    [api] = await reach(Where(local=True))
    try:
        [raw] = await api.list(names.KIND)
        assert raw["spec"]["slo"]["ttft"] == "2s" and raw["metadata"]["namespace"] == "default"
        assert (await find([api], Where(local=True), "smollm2"))[1] == await api.get(names.KIND, "default", "smollm2")
        assert await api.get(names.KIND, "default", "other") is None
        await Writer(api).patch_spec("default", "smollm2", {"tuning": {"paused": True}}, "test", {"note": "x"})
        assert deployment.resource.spec.tuning.paused and deployment.object()["metadata"]["annotations"] == {"note": "x"}
        with pytest.raises(ApiError, match="change the manifest") as refused:
            await Writer(api).patch_spec("default", "smollm2", {"replicas": 5}, "test")
        assert (refused.value.status, refused.value.reason) == (422, "Invalid")
        [pod] = await api.list("Pod", "default", f"{names.OWNER_LABEL}=smollm2")
        assert await api.list("Pod", "default", f"{names.OWNER_LABEL}=other") == []
        with pytest.raises(ApiError, match="does not answer") as silent:
            await api.text(proxied(pod, "http", "metrics"))
        assert silent.value.status == 503
        assert await api.explained(raw) == {"of": "default/smollm2"}
        with pytest.raises(ApiError, match="local mode has no GET"):
            await api.list("Deployment", "default")
        with pytest.raises(ApiError, match="not found"):
            await api.explained({"metadata": {"namespace": "default", "name": "other"}})
    finally:
        await api.close()


async def test_a_log_is_read_from_its_end(served: LocalApi, deployment: LocalDeployment) -> None:
    log = "/api/v1/namespaces/default/pods/smollm2-0/log?tailLines=2"
    api = LocalSocket(served.path)
    try:
        with pytest.raises(ApiError, match="no log of smollm2-0"):
            await api.text(log)
        deployment.servers[0].log.write_text("a\nb\nc\n")
        assert await api.text(log) == "b\nc\n"
    finally:
        await api.close()


async def test_sockets_of_killed_processes_go_and_two_of_one_name_are_told_apart_from_none(
    served: LocalApi, deployment: LocalDeployment, tmp_path: Path,
) -> None:
    folder = served.path.parent
    left = folder / "1.sock"
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(left))
    apis = await reach(Where(local=True))
    assert len(apis) == 1
    assert not left.exists()
    for api in apis:
        await api.close()
    second = LocalApi({deployment.name: deployment}, lambda _: None, lambda _: None, folder)
    second.path = folder / "2.sock"
    async with second:
        apis = await reach(Where(local=True))
        try:
            with pytest.raises(ApiError, match="2 local processes run a 'smollm2'"):
                await find(apis, Where(local=True), "smollm2")
            with pytest.raises(ApiError, match="no InferenceDeployment 'x' runs on this machine"):
                await find(apis, Where(local=True), "x")
        finally:
            for api in apis:
                await api.close()


async def test_without_a_process_the_plugin_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_LOCAL_DIR", str(tmp_path / "none"))
    with pytest.raises(Unreachable, match="weir-operator local starts one"):
        await reach(Where(local=True))


@pytest.mark.parametrize("verb", [("top", "smollm2", "--seconds=0.5"), ("bench", "smollm2", "--seconds=60")])
async def test_ctrl_c_ends_a_verb_cleanly(
    served: LocalApi, deployment: LocalDeployment, verb: tuple[str, ...], bystander: str,
) -> None:
    """On a terminal: a live table, or a load under way, ends with status 130, the cursor shown and no trace."""
    [server] = deployment.servers
    server.url, server.ready = bystander, True
    reading, writing = pty.openpty()
    code = "from weir_operator.cli.plugin import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *verb, "--local", stdin=writing, stdout=writing, stderr=writing,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(writing)
    said = b""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        while not (b"POD" in said or b"requests/s" in said):
            said += await loop.run_in_executor(None, os.read, reading, 4096)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(reading, 4096):
            said += more
    os.close(reading)
    assert b"Traceback" not in said and b"Aborted" not in said, said.decode(errors="replace")
    assert said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h")


@pytest.fixture
async def bystander() -> AsyncIterator[str]:
    """A server that has no metrics, takes completions and never answers them."""
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(3600 if request.method == "POST" else 0)
        return web.Response(status=404)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", hang)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    make_folder(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for wrong in ("open", "link"):
        with pytest.raises(PermissionError):
            make_folder(tmp_path / wrong)


# ---------------------------------------------------------------- the command

def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["local", *args])
    return result.exit_code, result.output


def test_several_documents_and_files_are_one_command_and_a_name_is_taken_once(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(EXAMPLE.read_text().replace("name: smollm2", "name: other", 1))
    both = tmp_path / "both.yaml"
    both.write_text(f"{EXAMPLE.read_text()}\n---\nkind: Namespace\n---\n{other.read_text()}")
    status, said = invoke(str(both), str(other))
    assert (status, said.count("\n")) == (2, 1)
    assert "a second InferenceDeployment is called other" in said
    empty = tmp_path / "empty.yaml"
    empty.write_text("kind: Namespace\n")
    assert "holds no InferenceDeployment" in invoke(str(EXAMPLE), str(empty))[1]
    with socket.socket() as taken:  # the second deployment's port
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said = invoke(str(EXAMPLE), str(other), f"--port={port - 1}")
    assert status == 2 and "is in use" in said


def test_a_unit_runs_the_same_command_from_anywhere(tmp_path: Path) -> None:
    odd = tmp_path / "a b%.yaml"
    odd.write_text(EXAMPLE.read_text())
    log = f"--decision-log={os.path.relpath(tmp_path)}/d"
    status, text = invoke(str(odd), "--systemd", "--port=9000", "--mode=Advise", log)
    assert status == 0, text
    [command] = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    given = f"--mode=Advise --port=9000 --decision-log={tmp_path}/d"
    assert command.endswith(f'local "{tmp_path}/a b%%.yaml" {given} --log-dir=%L/weir')
    assert command.startswith(f"ExecStart={sys.executable} -m weir_operator")
    assert "WEIR_LOCAL_DIR=%t/weir" in text


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed: it checks the unit")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "weir.service"
    file.write_text(unit([tmp_path / "m n.yaml"], ["--mode=Auto"]))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "weir.service" in line]
    assert done.returncode == 0 and not ours, done.stderr
