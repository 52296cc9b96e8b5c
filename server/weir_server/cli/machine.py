"""How many threads the engine should compute with: what the cgroup's CPU quota and the affinity mask leave."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_threads(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole CPUs of ours, at least one. More threads than quota would be throttled together."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return own if quota is None else max(1, min(own, int(quota + 0.01)))


def cpu_quota(root: Path) -> float | None:
    """CPUs that the container may use (cgroup v2, else v1), or None without a limit."""
    try:
        if (v2 := root / "cpu.max").is_file():
            quota, period = v2.read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{n}_us").read_text().strip() for n in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() and int(period) > 0 else None
