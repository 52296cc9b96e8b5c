"""A systemd unit that keeps a local deployment running on one machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

STOP_SECONDS = 30
"""More than the drain that local mode allows and the kills after it."""


def unit(files: Sequence[Path], options: Sequence[str]) -> str:
    """The unit's text. `files`: absolute paths of the manifests; `options`: of `weir-operator local`, as they were given."""
    names = ", ".join(f.name for f in files)
    command = [sys.executable, "-m", "weir_operator", "local", *map(str, files), *options]
    return f"""[Unit]
Description=Weir: {names}
After=network.target

[Service]
Type=exec
ExecStart={" ".join(map(_quoted, command))} --log-dir=%L/weir
Restart=on-failure
RestartSec=5
# the servers drain when the operator tells them to: only what is left after that is killed
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}
DynamicUser=yes
RuntimeDirectory=weir
RuntimeDirectoryMode=0700
Environment=WEIR_LOCAL_DIR=%t/weir HOME=%S/weir
LogsDirectory=weir
StateDirectory=weir
NoNewPrivileges=yes
ProtectSystem=strict
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """As systemd reads it: % begins a specifier, $ a variable."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(c.isspace() or c in "\"'\\;" for c in word) else escaped
