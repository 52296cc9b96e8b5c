"""The command line of the operator: what it prints, and one line with status 2 for a user's mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from weir_operator.cli.app import app
from weir_operator.cli.local.deployment import LocalDeployment
from weir_operator.plan.plan import parse

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def invoke(*args: str, stdin: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(args), input=stdin)
    return result.exit_code, result.output


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_every_example_has_a_plan(example: Path) -> None:
    status, text = invoke("plan", str(example))
    assert status == 0, text
    kinds = {m["kind"] for m in yaml.safe_load_all(text)}
    assert {"ServiceAccount", "Secret", "ConfigMap", "Service", "NetworkPolicy", "Deployment"} <= kinds


def test_a_plan_of_standard_input_is_printed_the_same_twice() -> None:
    text = EXAMPLES[0].read_text()
    assert invoke("plan", "-", stdin=text) == invoke("plan", "-", stdin=text)


MISTAKES = [
    ("kind: Other\n", "must hold one InferenceDeployment, it holds 0"),
    (EXAMPLES[0].read_text() + "---\n" + EXAMPLES[0].read_text(), "it holds 2"),
    ("a: [b\n", "is no YAML"),
    ("kind: InferenceDeployment\nspec: 3\n", "apiVersion"),
    ("kind: InferenceDeployment\napiVersion: weir.dev/v1alpha1\nmetadata: {name: a}\nspec: 3\n", "spec"),
    ("kind: InferenceDeployment\napiVersion: weir.dev/v2\nmetadata: {name: a}\nspec: {model: {source: 'file:///m'}}\n", "apiV"),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES)
def test_a_wrong_manifest_is_one_line_and_status_2(text: str, words: str) -> None:
    status, said = invoke("plan", "-", stdin=text)
    assert status == 2
    assert words in said
    assert len(said.strip().splitlines()) == 1, said


LOCAL_MISTAKES = [
    (("--decision-log=/nowhere/log",), "/nowhere/log: No such file or directory"),
    (("--status-file=/nowhere/status",), "/nowhere/status"),
    (("--host=no.such.host.invalid",), "cannot listen on no.such.host.invalid"),
    (("--host=no.such.host.invalid", "--port=0"), "cannot listen on no.such.host.invalid"),
    (("--host=203.0.113.7",), "cannot listen on 203.0.113.7, port 8080: Cannot assign requested address"),
]


@pytest.mark.parametrize(("args", "words"), LOCAL_MISTAKES)
def test_what_local_cannot_use_is_one_line_and_status_2(args: tuple[str, ...], words: str) -> None:
    status, said = invoke("local", str(EXAMPLES[0]), "--port=0" if "host" not in args[0] else "--mode=Auto", *args)
    assert status == 2, said
    assert words in said
    assert len(said.strip().splitlines()) == 1, said


def test_a_mode_for_a_manifest_whose_tuning_is_no_mapping() -> None:
    text = EXAMPLES[0].read_text()
    raw = {**yaml.safe_load(text), "spec": {**yaml.safe_load(text)["spec"], "tuning": "foo"}}
    status, said = invoke("local", "-", "--mode=Advise", stdin=yaml.safe_dump(raw))
    assert (status, len(said.strip().splitlines())) == (2, 1), said
    assert "spec.tuning" in said


def test_control_ports_stay_on_loopback(tmp_path: Path) -> None:
    resource = parse(yaml.safe_load(EXAMPLES[0].read_text()))
    [server] = LocalDeployment(resource, "0.0.0.0", 0, tmp_path, tmp_path, "token").servers
    assert "--host=0.0.0.0" in server.args
    assert "--control-host=127.0.0.1" in server.args
    assert server.control_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("name", ["", "Weir", "-a", "a/b"])
def test_a_lease_name_that_no_object_can_have_is_one_line(name: str) -> None:
    status, said = invoke("run", f"--lease-name={name}")
    assert status == 2 and len(said.strip().splitlines()) == 1
    assert f"--lease-name {name!r}: must be of a-z" in said


def test_a_missing_file_is_named() -> None:
    assert invoke("plan", "/nowhere.yaml") == (2, "weir-operator: cannot read /nowhere.yaml: No such file or directory\n")


@pytest.mark.parametrize("command", ["run", "local", "plan", "replay"])
def test_every_command_has_help(command: str) -> None:
    status, text = invoke(command, "--help")
    assert status == 0
    assert len(text) > 300


def test_service_links_are_no_settings_and_no_cluster_is_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "WEIR_HEALTH_PORT": "tcp://10.96.3.7:8082", "KUBECONFIG": str(tmp_path / "none")}
    env.pop("KUBERNETES_SERVICE_HOST", None)
    command = [sys.executable, "-m", "weir_operator", "run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no cluster" in done.stderr
    assert "Traceback" not in done.stderr
    assert "health" not in done.stderr.lower()
