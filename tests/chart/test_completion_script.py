"""What the pod of `helm test` runs, against a real server: one completion, or a sentence that says what was seen last."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from chart_kit import CHART, ROOT

sys.path.insert(0, str(ROOT / "tests" / "unit"))
pytestmark = pytest.mark.chart
SCRIPT = (CHART / "files/completion.py").read_text()


def ask(url: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """As the pod does: the script as an argument, with a proxy in the environment that must not be asked."""
    environment = {"http_proxy": "http://127.0.0.1:9", "PATH": "/usr/bin"}
    return subprocess.run([sys.executable, "-c", SCRIPT, url, str(seconds)], capture_output=True, text=True, timeout=60,
                          env=environment, check=False)


async def test_a_completion_comes_back() -> None:
    from http_kit import serving

    async with serving() as kit:
        done = await asyncio.to_thread(ask, kit.url, 30)
        assert done.returncode == 0 and done.stdout.startswith(f"a completion from {kit.url}"), done.stderr
        wrong = await asyncio.to_thread(ask, kit.url + "/nothing", 1)
    assert wrong.returncode == 1 and "status 404" in wrong.stderr


def test_nobody_answers() -> None:
    done = ask("http://127.0.0.1:1", 1)
    assert done.returncode == 1 and "no completion from http://127.0.0.1:1 within 1 s" in done.stderr
    assert "refused" in done.stderr and "Traceback" not in done.stderr
