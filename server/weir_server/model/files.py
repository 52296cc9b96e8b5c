"""Model files without torch: where a model lies, and what its headers say.

Both processes use this: the parent for the tokenizer and the name, the child for the weights. Everything a user can get
wrong about a model file ends here, as one `ModelError` with one sentence (exit status 2).

GGUF is read by a header reader of our own: `gguf.GGUFReader` builds an array for each of 98,000 strings (3.5 s for
SmolLM2, 0.2 s here). Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir_server.link.errors import UserError

PACKAGE = "package://"


class ModelError(UserError):
    """The user's model cannot be served; one sentence that says what was looked for and where."""


# ---------------------------------------------------------------- where it lies

def resolve(source: str) -> Path:
    """The .gguf file or the directory in the Hugging Face layout that `source` names.

    `source`: a path of either, or `package://distribution/file` for a file inside an installed Python distribution (found by
    its metadata, nothing is imported). Raises ModelError.
    """
    if source.startswith(PACKAGE):
        return _in_package(source)
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is a directory without config.json, so it is no model in the Hugging Face layout.")
        return path
    if path.is_file():
        return path
    raise ModelError(f"No model {source!r}: looked for a .gguf file or a directory with config.json at {path}.")


def _in_package(source: str) -> Path:
    name, _, wanted = source.removeprefix(PACKAGE).partition("/")
    if not name or not wanted:
        raise ModelError(f"{source!r} is not of the form package://distribution/file.")
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"The Python distribution {name!r} of {source!r} is not installed here.") from None
    found = [Path(str(f.locate())) for f in files if f.name == wanted or f.as_posix() == wanted]
    if not found or not found[0].is_file():
        raise ModelError(f"The installed distribution {name!r} has no file {wanted!r}.")
    return found[0].absolute()


# ---------------------------------------------------------------- GGUF

@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a GGUF file. `shape` is outermost first (torch's order); `offset` is from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int  # GGML type number
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All metadata by GGUF key (arrays as lists), and the tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 30: ("BF16", 1, 2),
}  # fmt: skip
"""GGML type number → name, elements in a block, bytes of a block. A test holds it against the gguf library's table."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf_metadata(path: Path) -> GgufHeader:
    """Read the header of a GGUF file and check that the file is as long as its tensors need. Raises ModelError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(512)
            _check_magic(path, size, start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Cursor(data).header(path)
    except OSError as e:
        raise ModelError(f"Cannot read the model file {path}: {e.strerror}.") from None
    except (struct.error, OverflowError, _PastEndError):
        raise ModelError(f"{path} is truncated: its header does not end within the file's {size} bytes.") from None
    except UnicodeDecodeError:
        raise ModelError(f"The header of {path} is damaged: a string in it is not UTF-8.") from None
    expected = max((t.offset + t.nbytes for t in header.tensors.values()), default=0)
    if size < expected:
        raise ModelError(f"{path} is truncated: expected at least {expected} bytes, the file has {size}.")
    return header


def _check_magic(path: Path, size: int, start: bytes) -> None:
    if size == 0:
        raise ModelError(f"{path} is empty (0 bytes), so it is no GGUF file.")
    if start[:4] != b"GGUF":
        page = " (it is an HTML page, as a failed download leaves it)" if start.lstrip()[:1] == b"<" else ""
        raise ModelError(f"{path} is no GGUF file: it starts with {start[:4]!r} and not with b'GGUF'{page}.")


class _PastEndError(Exception):
    """A count in the header promises more than the file holds."""


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4  # behind the magic

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        end = self.scalar("Q") + self.at
        if end > len(self.data):
            raise _PastEndError
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and not nested:
            kind, count = self.scalar("I"), self.scalar("Q")
            if kind in _SCALARS:
                return self.scalars(_SCALARS[kind], count)
            return [self.value(kind, nested=True) for _ in range(count)]
        if kind not in _SCALARS:
            raise _PastEndError  # a type number that no version has: what follows cannot be found
        return self.scalar(_SCALARS[kind])

    def scalars(self, code: str, count: int) -> list[Any]:
        end = self.at + count * struct.calcsize(code)
        if end > len(self.data):
            raise _PastEndError
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
        self.at = end
        return values

    def header(self, path: Path) -> GgufHeader:
        version, n_tensors, n_values = self.scalar("I"), self.scalar("Q"), self.scalar("Q")
        if version not in (2, 3):
            raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 are read.")
        metadata = {}
        for _ in range(n_values):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        entries = []
        for _ in range(n_tensors):
            name = self.string()
            dims = tuple(self.scalar("Q") for _ in range(min(self.scalar("I"), 8)))
            entries.append((name, dims[::-1], self.scalar("I"), self.scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path} sets general.alignment = {alignment!r}, which is no positive number.")
        base = -(-self.at // alignment) * alignment
        return GgufHeader(path, metadata, {e[0]: _tensor(path, base, *e) for e in entries})


def _tensor(path: Path, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    if kind not in GGML_TYPES:
        known = ", ".join(t[0] for t in GGML_TYPES.values())
        raise ModelError(f"The tensor {name} of {path} has GGML type {kind}, which is not read; known are {known}.")
    type_name, block, block_bytes = GGML_TYPES[kind]
    elements = 1
    for n in shape:
        elements *= n
    if elements % block:
        raise ModelError(f"The tensor {name} of {path} has {elements} elements, no multiple of the {block} of {type_name}.")
    return TensorInfo(name, shape, kind, base + offset, elements // block * block_bytes)


# ---------------------------------------------------------------- Hugging Face layout

def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ModelError(f"Cannot read {path}: {e.strerror}.") from None
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return value


def hf_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. A field that is null counts as absent. Raises ModelError."""
    return {k: v for k, v in read_json(directory / "config.json").items() if v is not None}


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a model directory, each checked to be whole. Raises ModelError."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map.")
        files = [directory / name for name in sorted(set(map(str, weight_map.values())))]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        _check_safetensors(file)
    return files


def _check_safetensors(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length + 8 > size:
                raise ModelError(f"{path} is truncated or no safetensors file: its header does not end within {size} bytes.")
            header = json.loads(file.read(length))
        expected = 8 + length + max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
    except OSError as e:
        raise ModelError(f"Cannot read the weights {path}: {e.strerror}.") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ModelError(f"{path} is no safetensors file: its header cannot be read.") from None
    if size != expected:
        raise ModelError(f"{path} is not whole: expected {expected} bytes, the file has {size}.")
