"""The text pipeline: every chunking gives the same text; stops; templates; tokenizers from small files of our own."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from weir_server.model.files import ModelError
from weir_server.text.defaults import load_defaults
from weir_server.text.detok import RowText
from weir_server.text.stops import StopScanner
from weir_server.text.template import ChatTemplate, TemplateError, find_template, flatten
from weir_server.text.tokenizer import Tokenizer, load_tokenizer


def cuts(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    inner = range(1, len(text))
    out = []
    for n in range(len(text)):
        for places in combinations(inner, n):
            edges = [0, *places, len(text)]
            out.append([text[a:b] for a, b in pairwise(edges)])
    return out


def scan(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    out = "".join(scanner.feed(p) for p in pieces)
    return out + scanner.flush(), scanner.found


def first_complete(text: str, stops: list[str]) -> tuple[str, bool]:
    """The oracle, a character at a time: at the first end of any stop, cut before the one that began first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("abcabd", ["abd"]), ("aaaaab", ["aab"]), ("abcdef", ["cd", "bcde"]), ("abcdef", ["bcd", "d"]), ("xyxyxz", ["xyxz"]),
        ("abab", ["abc"]), ("....!", ["..!", "!"]), ("abc", ["abc", "b"]), ("a\nb\n\nc", ["\n\n"]), ("abcd", []),
    ],
)  # fmt: skip
def test_stops_are_found_however_the_text_is_cut(text: str, stops: list[str]):
    """Exhaustive: all 2^(n-1) ways. What a stop cuts off is never shown before it is found."""
    for pieces in cuts(text):
        scanner, shown, expected = StopScanner(stops), "", first_complete(text, stops)
        for piece in pieces:
            shown += scanner.feed(piece)
            assert expected[0].startswith(shown), pieces
        assert (shown + scanner.flush(), scanner.found) == expected


@given(st.text("ab.", max_size=12), st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3), st.data())
def test_stops_against_the_oracle(text: str, stops: list[str], data: st.DataObject):
    places = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4))) if len(text) > 1 else []
    edges = [0, *places, len(text)]
    assert scan([text[a:b] for a, b in pairwise(edges)], stops) == first_complete(text, stops)


def test_hidden_text_takes_part_in_matches_and_is_not_shown():
    scanner = StopScanner(["<end>\nx"])
    assert scanner.feed("a") + scanner.feed("<end>", hidden=True) + scanner.feed("\n") == "a"
    assert scanner.feed("y") == "\ny"
    assert scanner.feed("b") + scanner.feed("<end>", hidden=True) + scanner.feed("\nx!") == "b"
    assert scanner.found


# ------------------------------------------------------------------------------------------------ bytes to text

def by_bytes(special: frozenset[int] = frozenset()) -> Tokenizer:
    """One id for each byte; 256 is a special token called <s>."""
    core = tokenizers.Tokenizer(models.BPE())
    return Tokenizer(core, [bytes([i]) for i in range(256)] + [b"<s>"], frozenset({256}) | special)


@pytest.mark.parametrize("text", ["aé🌟b", "🌟🌟", "\N{COMBINING ACUTE ACCENT}e", "漢字", "a" * 40])
def test_half_characters_are_held_back(text: str):
    row, out = RowText(by_bytes()), []
    for byte in text.encode():
        piece = row.feed(byte)
        assert "�" not in piece
        out.append(piece)
    assert "".join(out) + row.finish() == text


@given(st.binary(max_size=24))
def test_any_bytes_become_what_decoding_them_at_once_gives(data: bytes):
    row = RowText(by_bytes())
    assert "".join(map(row.feed, data)) + row.finish() == data.decode("utf-8", "replace")


def test_a_stop_ends_the_row_and_its_count():
    row = RowText(by_bytes(), ["STOP"])
    shown = "".join(map(row.feed, b"go STOP and more"))
    assert (shown, row.stopped_at, row.tokens) == ("go ", 7, 7)
    assert row.feed(65) == "" and row.finish() == ""


def test_special_tokens_are_hidden_and_stop_by_name():
    row = RowText(by_bytes(), ["<s>"])
    assert row.feed(97) + row.feed(256) == "a"
    assert row.stopped_at == 2
    row = RowText(by_bytes())
    assert "".join(map(row.feed, (0xF0, 0x9F, 256, 98))) == "�b", "a special token ends an open character"


def test_any_token_may_end_a_text_half_a_character_too():
    """As a model's end of sequence, which is hidden from the text: ids need not be whole characters."""
    row = RowText(by_bytes().hiding((0xF0, 0x9F)), ["�x"])
    assert row.feed(97) + row.feed(0xF0) + row.feed(98) + row.feed(0x9F) == "ab"
    assert row.feed(120) == "" and row.stopped_at == 5, "a stop string sees it as it would be written"


def test_the_longest_piece_is_looked_for_once():
    """It is asked for with every prompt, and a vocabulary has 50,000 pieces."""

    class Pieces(list[bytes]):
        walks = 0

        def __iter__(self):
            Pieces.walks += 1
            return super().__iter__()

    tokenizer = Tokenizer(by_bytes().core, Pieces([b"a", b"abc"]), frozenset())
    assert [tokenizer.longest_piece for _ in range(3)] == [3, 3, 3] and Pieces.walks == 1


def test_ids_beyond_the_tokenizer_add_nothing():
    """pegainfer-project/pegainfer#673: embeddings are padded beyond the tokenizer."""
    assert by_bytes().decode([65, 300, 66, 10**9]) == "AB"
    row = RowText(by_bytes())
    assert row.feed(300) + row.finish() == "" and row.tokens == 1


# ------------------------------------------------------------------------------------------------ templates

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def test_content_of_every_kind_is_a_string_for_the_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    wanted = {None: "", "x": "x"}
    for content, text in wanted.items():
        assert flatten({"role": "user", "content": content})["content"] == text
    assert flatten({"role": "user", "content": []})["content"] == flatten({"role": "user"})["content"] == ""
    assert flatten({"role": "user", "content": parts})["content"] == "ab"
    assert flatten({"role": "developer", "content": "x"})["role"] == "system"
    turn = flatten({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}], "refusal": None})
    assert turn == {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}


def test_what_templates_in_the_wild_use():
    source = "{{ bos_token }}{{ messages | tojson }}{{ strftime_now('%Y') }}{% for m in messages %}{% break %}{% endfor %}"
    rendered = ChatTemplate(source, bos="<s>", now=lambda: datetime(2031, 1, 1, tzinfo=UTC)).render([{"role": "é"}])
    assert rendered == '<s>[{"role": "é"}]2031'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "cannot take"), ("{{ messages.pop() }}", "cannot take"),
        ("{% if %}", "cannot be read"), (None, "no chat template"),
        ("{{ ''.__class__.__mro__ }}", "cannot take"),
    ],
)  # fmt: skip
def test_a_template_that_refuses_says_why(source: str | None, words: str):
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def directory(tmp_path: Path, **files: object) -> Path:
    """A model directory with a byte-level tokenizer and these further files."""
    core = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "Ġ": 3}, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    core.save(str(tmp_path / "tokenizer.json"))
    for name, content in {"config.json": {}, **files}.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_where_the_template_is_found(tmp_path: Path):
    """huggingface/text-generation-inference#3247: its own file wins, as in transformers."""
    (tmp_path / "none").mkdir()
    assert find_template(directory(tmp_path / "none")) is None
    for name, files, expected in (
        ("config", {"tokenizer_config.json": {"chat_template": CHATML}}, CHATML),
        ("file", {"chat_template.jinja": CHATML}, CHATML),
        ("both", {"chat_template.jinja": "X\n" + CHATML, "tokenizer_config.json": {"chat_template": CHATML}}, "X\n" + CHATML),
        ("named", {"tokenizer_config.json": {"chat_template": [
            {"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML},
        ]}}, CHATML),
        ("null", {"tokenizer_config.json": {"chat_template": None}}, None),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        assert find_template(directory(tmp_path / name, **files)) == expected


def test_a_directory_tokenizer_and_its_ends(tmp_path: Path):
    ends = {"tokenizer_config.json": {"eos_token": {"content": "<eos>"}}}
    path = directory(tmp_path, **ends, **{"generation_config.json": {"eos_token_id": [2, 4], "top_k": 5}})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("ab a", True) == [2, 3, 0]
    assert [tokenizer.piece(i) for i in range(5)] == [b"a", b"b", b"ab", b" ", b"<eos>"]
    assert tokenizer.special == {4}
    defaults = load_defaults(path, tokenizer)
    assert defaults.stop_ids == (2, 4) and defaults.sampling == {"top_k": 5}


def test_generation_config_that_forbids_sampling_is_greedy(tmp_path: Path):
    generation = {"do_sample": False, "temperature": 0.7}
    path = directory(tmp_path, **{"generation_config.json": generation, "config.json": {"eos_token_id": 2}})
    defaults = load_defaults(path, load_tokenizer(path))
    assert defaults.sampling == {"temperature": 0.0} and defaults.stop_ids == (2,)


def test_a_tokenizer_that_cannot_be_read_is_a_sentence(tmp_path: Path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_long_text_is_encoded_beside_other_threads():
    """huggingface/tokenizers: `encode` holds the GIL from its first byte to its last, `encode_batch` does not."""
    core = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "aa": 1}, merges=[("a", "a")]))
    tokenizer, turns, done = Tokenizer(core, [b"a", b"aa"], frozenset()), 0, threading.Event()

    def beside():
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=beside)
    thread.start()
    before = turns
    ids = tokenizer.encode("a" * 1_000_000, add_special=False)
    during = turns - before
    done.set()
    thread.join()
    assert ids == [1] * 500_000
    assert during > 100


@pytest.mark.parametrize("ends", ["x", True, -1, 2.5, [2, "x"], {"id": 2}])
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, ends: object):
    """Passed over in silence, text would not end."""
    for name in ("generation_config.json", "config.json"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        path = directory(folder, **{name: {"eos_token_id": ends}})
        with pytest.raises(ModelError, match=rf"{name} sets eos_token_id = "):
            load_defaults(path, load_tokenizer(path))
