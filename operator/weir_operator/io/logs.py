"""The operator's log: one line an event, as JSON for machines or as text for a terminal.

A JSON line has `time`, `level`, `logger` and `message`, and those of KEYS that apply: a reader may rely on the names. `message`
is for people and may change; `event` says in one word what happened.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
KEYS = {
    "event": (
        "What happened: `decision`, `retry`, `leading`, `lease-trouble`, `lease-released`, `resync-failed`, `event-lost`, "
        "`ended` (it gave up, exit status 2)."
    ),
    "resource": "The InferenceDeployment, as namespace/name.",
    "pod": "The pod that a decision is about.",
    "rule": "The rule of the law that decided.",
    "outcome": "What came of it.",
    "changes": "Knob → [before, after].",
    "error": "A fault's traceback, lines joined by \\n.",
}
"""Beyond the four that every line has; given to a logger as `extra`."""


class JsonLines(logging.Formatter):
    """One JSON object a record. A value that JSON does not know becomes its text: a log line must never fail."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
        }
        line |= {key: value for key in KEYS if (value := getattr(record, key, None)) is not None}
        if record.exc_info and record.exc_info[1]:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def reference() -> str:
    """The keys as a section of documentation."""
    head = """## Log lines

With `--log-format json` (the chart's default) one JSON object a line. `time`, `level`, `logger` and `message` are in each;
`message` is for people and may change. The others where they apply:

| key | meaning |
|---|---|
"""
    return head + "".join(f"| `{key}` | {text} |\n" for key, text in KEYS.items())


def setup(style: str) -> None:
    """Log to standard error from INFO on; `style` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
