"""Text ↔ token ids, built from GGUF metadata or from a tokenizer.json, with the `tokenizers` library and nothing else.

What the server needs beyond that library is the *bytes* of each single id (a character may be spread over several ids), and
which ids are special: hidden from the text, and yet findable by stop strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from weir_server.model.files import ModelError, read_gguf_metadata, read_json

GGUF_CONTROL = 3
"""`tokenizer.ggml.token_type` of special tokens. 1 = normal, 4 = user defined (literal text), 6 = one byte."""
GGUF_USER_DEFINED = 4

PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    ),
}
"""`tokenizer.ggml.pre` → how text is cut before the merges. A name that is not here is refused: another cut gives wrong ids."""


@dataclass(frozen=True)
class Tokenizer:
    """Immutable and safe to use from several threads; `encode` releases the GIL.

    `pieces[id]` are the bytes that the id adds to the text (a special token's: its name). Ids beyond it add nothing.
    """

    core: tokenizers.Tokenizer
    pieces: list[bytes]
    special: frozenset[int]
    bos: str = ""
    eos: str = ""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None  # to be put in front of a plain prompt; None where the model wants none or `core` does it

    @cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token: no text of more than n times so many bytes has only n tokens."""
        return max(map(len, self.pieces))

    def hiding(self, ids: tuple[int, ...]) -> Tokenizer:
        """The same, with these ids hidden from the text too: what ends a text is no part of it."""
        return replace(self, special=self.special | frozenset(ids))

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of `text`; names of special tokens in it become those tokens.

        `add_special`: put in front (or behind) what the model expects around a plain prompt. A chat template has written
        those itself, so its output is encoded without: a single BOS.
        """
        ids: list[int] = self.core.encode_batch_fast([text], add_special_tokens=add_special)[0].ids  # `encode` holds the GIL
        return [self.bos_id, *ids] if add_special and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def piece(self, token: int) -> bytes:
        """Bytes of one id, empty for ids that the tokenizer does not have (padded embeddings)."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens by name; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a .gguf file or a model directory. Raises ModelError."""
    return _from_directory(model) if model.is_dir() else _from_gguf(model, read_gguf_metadata(model).metadata)


# ---------------------------------------------------------------- GGUF

def _from_gguf(path: Path, meta: Mapping[str, Any]) -> Tokenizer:
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelError(f"The tokenizer of {path} is of the kind {kind!r}; byte-level BPE ('gpt2') is what can be read.")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"The tokenizer of {path} cuts text as {pre!r}, which is not known here; known: {known}.")
    try:
        tokens: list[str] = meta["tokenizer.ggml.tokens"]
        types: list[int] = meta["tokenizer.ggml.token_type"]
        merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    except KeyError as e:
        raise ModelError(f"{path} has no {e.args[0]}, so its tokenizer cannot be built.") from None
    core = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = PRE_TOKENIZERS[pre]()
    core.decoder = decoders.ByteLevel()
    special = [i for i, t in enumerate(types) if t == GGUF_CONTROL]
    literal = [i for i, t in enumerate(types) if t == GGUF_USER_DEFINED]
    core.add_special_tokens([tokenizers.AddedToken(tokens[i], special=True, normalized=False) for i in special])
    core.add_tokens([tokenizers.AddedToken(tokens[i], special=False, normalized=False) for i in literal])
    whole = frozenset(special) | frozenset(literal)
    pieces = [t.encode() if i in whole else _byte_level(t) for i, t in enumerate(tokens)]
    bos, eos = meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.eos_token_id")
    ends = [meta.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom")]
    return Tokenizer(
        core, pieces, frozenset(special),
        bos="" if bos is None else tokens[bos], eos="" if eos is None else tokens[eos],
        eos_ids=tuple(dict.fromkeys(e for e in ends if e is not None)),
        bos_id=bos if meta.get("tokenizer.ggml.add_bos_token") else None,
    )  # fmt: skip


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (source: openai/gpt-2 encoder.py `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(rest)}}


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token in GPT-2's alphabet as bytes; characters outside it stand for themselves."""
    try:
        return bytes(_BYTES[c] for c in token)
    except KeyError:
        return token.encode()


# ---------------------------------------------------------------- Hugging Face layout

def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"The model directory {directory} has no tokenizer.json.")
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
        decoder = json.dumps(json.loads(core.to_str()).get("decoder"))
    except Exception as e:  # the library raises bare Exception
        raise ModelError(f"{path} cannot be read as a tokenizer: {e}.") from None
    config = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    added = core.get_added_tokens_decoder()
    as_bytes = _byte_level if '"ByteLevel"' in decoder else _sentence_piece
    vocab = core.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        pieces[i] = added[i].content.encode() if i in added else as_bytes(token)
    bos, eos = _name(config.get("bos_token")), _name(config.get("eos_token"))
    return Tokenizer(
        core, pieces, frozenset(i for i, t in added.items() if t.special),
        bos=bos, eos=eos, eos_ids=(vocab[eos],) if eos in vocab else (),
    )  # fmt: skip


def _sentence_piece(token: str) -> bytes:
    """`<0xNN>` is that byte; `▁` is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _name(token: Any) -> str:
    """A token in tokenizer_config.json: a string, an object with `content`, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
