"""API keys from the command line and from a file. An empty key is a mistake, since it would open the door to everybody."""

from __future__ import annotations

from pathlib import Path

from weir_server.link.errors import UserError


def read_keys(key: str | None, file: str | None) -> tuple[bytes, ...]:
    """`key`: the flag's value; `file` has one `key` or `name:key` a line, and lines that begin with #. Raises UserError."""
    keys = [] if key is None else [(key, "--api-key (or WEIR_API_KEY)")]
    if file is not None:
        keys += _in_file(file)
    if empty := [where for value, where in keys if not value.strip()]:
        raise UserError(f"The API key of {empty[0]} is empty; give one, or leave it out to ask clients for none.")
    return tuple(value.strip().encode() for value, _ in keys)


def _in_file(file: str) -> list[tuple[str, str]]:
    """(key, where it stands), at least one."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"Cannot read the API keys from {file!r}: {e}.") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered:
        raise UserError(f"{file} holds no API key.")
    return [(line.rpartition(":")[2], f"{file}, line {i},") for i, line in numbered]
