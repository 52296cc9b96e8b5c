"""What this process uses of memory and how much it may: /proc and cgroup v1 and v2. Bytes everywhere."""

from __future__ import annotations

from pathlib import Path

UNLIMITED = 1 << 60
"""cgroup v1 says "no limit" with a number near 2^63."""


def memory_used(status: Path = Path("/proc/self/status")) -> int:
    """Anonymous and shared memory of this process; file pages (a mapped weight cache) can be dropped and do not count."""
    wanted = {"RssAnon", "RssShmem"}
    fields = (line.partition(":") for line in status.read_text().splitlines())
    return sum(int(value.split()[0]) * 1024 for name, _, value in fields if name in wanted)


def cgroup_limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The tightest memory limit of this process's cgroup and its ancestors, or None where there is none."""
    limits: list[int] = []
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in _upwards(top, path):
            limits += _read_limit(folder / name)
    return min(limits, default=None)


def _upwards(top: Path, path: str) -> list[Path]:
    """The folder of a cgroup and those above it. In a container the path may name what is not mounted; the top one is."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [top.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _read_limit(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and int(text) < UNLIMITED else []


def host_available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that the whole machine could give now without swapping."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")
