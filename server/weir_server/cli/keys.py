"""API keys from the command line and from a file. An empty key is a mistake, since it would open the door to everybody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from weir_server.link.errors import UserError

log = logging.getLogger("weir")
Keys = tuple[bytes, ...]


def read_keys(key: str | None, file: str | None) -> Callable[[], Keys] | None:
    """What gives the keys in force, or None where clients are asked for none. `key`: the flag's value. Raises UserError."""
    if key is not None and not key.strip():
        raise _empty("--api-key (or WEIR_API_KEY)")
    fixed = () if key is None else (key.strip().encode(),)
    if file is None:
        return (lambda: fixed) if fixed else None
    filed = KeyFile(file)
    return lambda: (*fixed, *filed())


class KeyFile:
    """One `key` or `name:key` a line, and lines that begin with #. At first a file that cannot be used raises UserError.

    It is read at every call (some ten microseconds), so that keys rotate without a restart. A file that has become unusable
    lets nobody in, as with the control token: an old key may be the one that had to go. It is said once.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._raw: bytes | None = _content(file)
        self._keys = _parsed(file, self._raw)

    def __call__(self) -> Keys:
        before, self._raw = self._raw, None
        try:
            self._raw = _content(self._file)
            if self._raw != before:
                self._keys = _parsed(self._file, self._raw)
                log.info("%s has changed: %d API keys are in force", self._file, len(self._keys))
        except UserError as e:
            self._keys = ()
            if self._raw != before:
                log.warning("%s None of it is accepted until that is mended.", e)
        return self._keys


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as e:
        raise UserError(f"Cannot read the API keys from {file!r}: {e}.") from None


def _parsed(file: str, raw: bytes) -> Keys:
    """At least one key."""
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as e:
        raise UserError(f"Cannot read the API keys from {file!r}: {e}.") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered:
        raise UserError(f"{file} holds no API key.")
    found = [(line.rpartition(":")[2].strip(), i) for i, line in numbered]
    if empty := [i for key, i in found if not key]:
        raise _empty(f"{file}, line {empty[0]},")
    return tuple(key.encode() for key, _ in found)


def _empty(where: str) -> UserError:
    return UserError(f"The API key of {where} is empty; give one, or leave it out to ask clients for none.")
