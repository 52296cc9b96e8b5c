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
EVENTS = (
    ("decision", "Knobs of a pod, or the number of pods, were decided anew."),
    ("retry", "A pass over a resource could not end, and is made again."),
    ("left", "The resource is left to another operator, which serves it, too."),
    ("event-lost", "An Event of a resource could not be written."),
    ("leading", "This replica leads from now on."),
    ("lease-trouble", "The Lease could not be read, renewed or given back."),
    ("lease-released", "The Lease was given back, at the end of the process."),
    ("resync-failed", "Listing everything did not work; what is wrong is also said at `/readyz`."),
    ("namespace-lost", "A namespace cannot be listed: nothing is served there until it can."),
    ("namespace-back", "It can be listed again, and is served."),
    ("watches-ended", "The watches have ended and begin again."),
    ("ended", "The operator gave up, with exit status 2."),
)
"""What `event` may say, in words for documentation."""
KEYS = {
    "event": "What happened, in one word: see below.",
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
    """The keys, and the words of `event`, as a section of documentation."""
    head = """## Log lines

With `--log-format json` (the chart's default) one JSON object a line. `time`, `level`, `logger` and `message` are in each;
`message` is for people and may change. The others where they apply:

| key | meaning |
|---|---|
"""
    keys, words = ("".join(f"| `{name}` | {text} |\n" for name, text in table) for table in (KEYS.items(), EVENTS))
    return f"{head}{keys}\n| `event` | meaning |\n|---|---|\n{words}"


def setup(style: str) -> None:
    """Log to standard error from INFO on; `style` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
