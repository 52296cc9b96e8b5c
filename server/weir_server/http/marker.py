"""A marker file that outlives an unclean exit: the KV budget that was running when the process was killed.

Reason: an out-of-memory kill would repeat itself at the same size, so the next start takes 0.85 of it. Bound: each unclean
exit takes 0.85 once more, never below the envelope's least budget; a clean end removes the marker, and what the operator
pushes later is in force as always.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

log = logging.getLogger("weir")
NAME = "running.json"
BACK_OFF = 0.85


class Marker:
    """`directory` None: no marker is kept. A directory that can't be written is a warning and no reason to fail."""

    def __init__(self, directory: str | None) -> None:
        self._path = None if directory is None else Path(directory) / NAME
        self._written: int | None = None

    def start_budget(self) -> int | None:
        """Bytes to start with after an unclean exit, or None after a clean one."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            budget = int(json.loads(self._path.read_text())["kv_cache_budget"])
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("%s cannot be read; starting as usual", self._path)
            return None
        log.warning("the last run ended uncleanly with a KV budget of %d bytes; starting with %.2f of it", budget, BACK_OFF)
        return int(budget * BACK_OFF)

    def note(self, budget: int | None) -> None:
        """Remember the budget in force; writes only what changed."""
        if self._path is None or budget is None or budget == self._written:
            return
        self._written = budget
        try:
            self._path.write_text(json.dumps({"kv_cache_budget": budget}))
        except OSError as e:
            log.warning("cannot write %s: %s", self._path, e)

    def remove(self) -> None:
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as e:
            log.warning("cannot remove %s, so the next start takes less memory than it could: %s", self._path, e)
