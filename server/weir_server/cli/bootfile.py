"""The boot file: objectives, start values of the knobs and the drain timeout, declared outside of the command line.

In a pod it is a mounted ConfigMap, so it is read at start and, for the drain timeout, again when a drain begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from weir_server.contract import KNOBS
from weir_server.link.errors import UserError

MOST_SECONDS = 1e9
"""What a timer can be set to."""


@dataclass(frozen=True)
class BootFile:
    """Absent values are None or missing. Seconds, bytes, rows, shares."""

    ttft: float | None = None
    tpot: float | None = None
    drain_timeout: float | None = None
    initial: dict[str, Any] = field(default_factory=dict)


def read_boot_file(path: str | None) -> BootFile:
    """Raises UserError that names file and key."""
    if path is None:
        return BootFile()
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"Cannot read the boot file {path}: {e}.") from None
    except yaml.YAMLError as e:
        raise UserError(f"The boot file {path} is not YAML: {' '.join(str(e).split())}.") from None
    slo, initial = (_mapping(path, content, key) for key in ("slo", "initial"))
    if unknown := [k for k in initial if k not in KNOBS]:
        raise UserError(f"The boot file {path} has initial.{unknown[0]}, which is no knob; the knobs are {', '.join(KNOBS)}.")
    knobs = {k: _number(path, f"initial.{k}", v, k != "admission_watermark") for k, v in initial.items() if v is not None}
    return BootFile(
        _number(path, "slo.ttft", slo.get("ttft")), _number(path, "slo.tpot", slo.get("tpot")),
        _number(path, "drain_timeout", content.get("drain_timeout")), knobs,
    )  # fmt: skip


def _mapping(path: str, content: Any, key: str) -> dict[str, Any]:
    value = (content.get(key) if isinstance(content, dict) else None) or {}
    if not isinstance(content, dict) or not isinstance(value, dict):
        raise UserError(f"The boot file {path} must be a mapping, and so must its {key}.")
    return value


def _number(path: str, key: str, value: Any, whole: bool = False) -> Any:
    if value is None:
        return None
    most = math.inf if whole else MOST_SECONDS
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 <= value <= most:
        kind = "an integer from 0" if whole else f"a number from 0 to {MOST_SECONDS:.0f}"
        raise UserError(f"The boot file {path} has {key}: {value!r}; it must be {kind}.")
    return value
