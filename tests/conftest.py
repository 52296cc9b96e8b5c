"""What every tier shares: the benchmarks' package on the path, and which tiers may not be skipped.

WEIR_REQUIRE=cluster,api_server,chart turns a skip of a test with one of these markers into a failure: where their programs are
known to be there, a tier that skips itself proves nothing. What a processor lacks can't be installed: skips that begin with
"this processor" stay skips.

hypothesis times nothing: how long an example takes is the machine's affair. It tries the same examples in every run, so that a
change fails for what it changed; what nobody has tried yet is for `make fuzz`, `make law-plants` and `make law-fuzz`.

`make test` has three processes: one for the tiers that compute in their own, two that share the files of those that mostly wait
for servers and control planes. OpenMP waits passively here as it does in the server: a spinning barrier beside a busy neighbour
takes 10 × as long.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell puts in the background; our children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before the first import of torch

settings.register_profile("weir", deadline=None, derandomize=True)
settings.load_profile("weir")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

REQUIRED = frozenset(m.strip() for m in os.environ.get("WEIR_REQUIRE", "").split(",") if m.strip())


COMPUTING = ("tests/parity/", "tests/unit/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long group first: processes take files in this order."""
    items.sort(key=lambda item: not item.nodeid.startswith(COMPUTING))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class OneComputes(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "computes" if nodeid.startswith(COMPUTING) else super()._split_scope(nodeid)

    return OneComputes(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
    report = yield
    required = REQUIRED & {m.name for m in item.iter_markers()}
    if not (required and report.skipped) or hasattr(report, "wasxfail"):
        return report
    why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    if not why.removeprefix("Skipped: ").startswith("this processor"):
        report.outcome = "failed"
        report.longrepr = f"WEIR_REQUIRE names {', '.join(sorted(required))}, so this may not be skipped: {why}"
    return report
