"""Kubernetes quantities and Go durations, exactly: every legal spelling and nothing else.

Sources: apimachinery `resource.ParseQuantity` (decimal and binary suffixes, decimal exponents, `m` and below) and Go's
`time.ParseDuration`. Home-made parsers that know only Mi and Gi are a classic (stackabletech/operator-rs#617).
"""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Context, Decimal

_SUFFIX = {
    **{s: Decimal(1024) ** i for i, s in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{s: Decimal(1000) ** i for i, s in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), start=-3)},
}
_EXACT = Context(prec=100)
"""The default's 28 digits round a long number with a large suffix."""
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]{1,3})|([KMGTPE]i|[numkMGTPE]?))")

_UNIT = {"ns": "1e-9", "us": "1e-6", "µs": "1e-6", "ms": "1e-3", "s": "1", "m": "60", "h": "3600"}
DURATION_PATTERN = "(([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|µs|ms|s|m|h))+"
"""Without a backslash: CEL reads it too."""
_DURATION_PART = re.compile("([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|µs|ms|s|m|h)")


def parse_quantity(text: str) -> Decimal:
    """The number that `text` means. Raises ValueError with one sentence if it is not a quantity."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a quantity; write for example 512Mi, 2Gi, 1.5G or a number of bytes")
    number, exponent, suffix = match.groups()
    return Decimal(number + exponent) if exponent else _EXACT.multiply(Decimal(number), _SUFFIX[suffix or ""])


def parse_bytes(text: str) -> int:
    """Whole bytes of a positive quantity, rounded down. Raises ValueError."""
    value = parse_quantity(text)
    if value < 1:
        raise ValueError(f"{text!r} is not a positive number of bytes")
    return int(value)


def parse_duration(text: str) -> float:
    """Seconds of a positive duration such as `2s`, `80ms` or `1m30s`. Raises ValueError."""
    if not re.fullmatch(DURATION_PATTERN, text):
        raise ValueError(f"{text!r} is not a duration; write for example 80ms, 2s or 1m30s")
    seconds = sum(Decimal(number) * Decimal(_UNIT[unit]) for number, unit in _DURATION_PART.findall(text))
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a duration above zero")
    return float(seconds)


def parse_time(text: str) -> datetime:
    """A time as Kubernetes writes it, RFC 3339 with Z. Raises ValueError."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
