"""The cache of converted weights on disk: safetensors files, each named by a key, mapped where they are read.

A cache that cannot be written costs one log line and the time of converting again, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

log = logging.getLogger("weir.model")

Stored = Mapping[str, torch.Tensor]


def key_of(what: str, files: list[Path]) -> str:
    """Of what is made from `files` as they are now; `what` names the layout and its version."""
    digest = hashlib.sha256(what.encode())
    for file in files:
        stat = file.stat()
        digest.update(f"\0{file.name}\0{stat.st_size}\0{int(stat.st_mtime)}".encode())  # layers of images keep whole seconds
    return digest.hexdigest()[:32]


def directories(explicit: str | None) -> Iterator[Path]:
    """Where a cache may lie, best first: what was asked for, else the user's cache, else the temporary directory."""
    if explicit is not None:
        yield Path(explicit)
        return
    if base := os.environ.get("XDG_CACHE_HOME") or os.environ.get("HOME"):
        yield Path(base) / ("weir" if os.environ.get("XDG_CACHE_HOME") else ".cache/weir")
    shared = Path(tempfile.gettempdir()) / f"weir-{os.getuid()}"
    if not shared.exists() or shared.stat().st_uid == os.getuid():  # anybody may create a name in the temporary directory
        yield shared


def read(path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor] | None:
    """The cached tensors, mapped, or None where there is no whole cache of this layout."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as e:
        log.warning("weight cache %s is damaged (%s): loading from the source", path, e)
        return None
    if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()} != layout:
        log.warning("weight cache %s has another layout: loading from the source", path)
        return None
    return stored


def write(path: Path, tensors: Stored) -> bool:
    """Write the cache so that it appears whole or not at all. False where the file system does not let us."""
    temporary, size = path.with_suffix(f".{os.getpid()}.tmp"), sum(t.nbytes for t in tensors.values())
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (free := shutil.disk_usage(path.parent).free) < size + (1 << 20):
            raise OSError(f"it needs {size} bytes and {free} are free")  # and a small /tmp is not to be filled
        with temporary.open("wb") as file:
            _save(file, tensors)
        os.replace(temporary, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        log.warning("cannot write the weight cache %s: %s", path, e)
        return False
    return True


_DTYPES = {torch.int32: "I32", torch.float32: "F32"}


def _save(file: BinaryIO, tensors: Stored) -> None:
    """A safetensors file whose data begins at a cache line, and in it what is multiplied where it lies, matrices of 8 bits; the
    library would begin anywhere. Format: https://github.com/huggingface/safetensors#format (spaces may end the header)."""
    ordered = sorted(tensors.items(), key=lambda item: item[1].dtype is torch.float32)
    header, at = {}, 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes],
        }  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        tensor.contiguous().numpy().tofile(file)
