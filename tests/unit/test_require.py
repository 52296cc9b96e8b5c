"""WEIR_REQUIRE: where a tier's programs are known to be there, its skip is a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

CASES = """
import pytest

@pytest.mark.chart
def test_marked():
    pytest.skip("no helm")

@pytest.mark.skipif(True, reason="no helm")
@pytest.mark.chart
def test_marked_at_collection():
    pass

def test_other():
    pytest.skip("not asked for")

@pytest.mark.chart
def test_hardware():
    pytest.skip("this processor has no such instructions")
"""


@pytest.mark.parametrize(("require", "failed", "skipped"), [("", False, 4), ("cluster", False, 4), ("cluster,chart", True, 2)])
def test_a_skip_of_a_required_tier_fails(tmp_path, require, failed, skipped):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-c", TESTS.parent / "pyproject.toml", "--rootdir", tmp_path, tmp_path]
    run = subprocess.run(command, env={**os.environ, "WEIR_REQUIRE": require}, capture_output=True, text=True, timeout=60)
    outcomes = f"1 failed, {skipped} skipped, 1 error" if failed else f"{skipped} skipped"
    assert outcomes in run.stdout, run.stdout
    assert ("no helm" in run.stdout) and (("may not be skipped" in run.stdout) is failed)
