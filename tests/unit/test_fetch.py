"""`weir-server fetch` against a local Hub, bucket and web server: whole and checked or not at all, one sentence on failure."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fetch_kit import Shelf, serving

from weir_server.cli import fetch as module
from weir_server.cli.fetch import fetch, human
from weir_server.link.errors import UserError

WEIGHTS = random.Random(1).randbytes(3_000_000)
FILES = {
    "config.json": b"{}", "tokenizer.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "pytorch_model.bin": b"no",
    "q/tiny.gguf": b"GGUF" + WEIGHTS[:1_000_000], "README.md": b"hello",
}
DIGEST = hashlib.sha256(FILES["q/tiny.gguf"]).hexdigest()


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    for name in ("HF_TOKEN", "BEARER_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "FIRST_DELAY", 0.01)
    with serving(dict(FILES)) as made:
        yield made


def run(shelf: Shelf, source: str, to: Path, sha256: str | None = None) -> list[str]:
    said: list[str] = []
    source = source.replace("http://web", shelf.url)
    fetch(source, to, None if source.startswith("http") else shelf.url, sha256, said.append)
    return said


def nothing_but(folder: Path, *names: str) -> None:
    """No part, tag or folder of an attempt is left; a lock file is."""
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}
    assert found == set(names)


def test_a_repository_is_there_in_its_layout_and_not_fetched_again(shelf: Shelf, tmp_path: Path) -> None:
    to = tmp_path / "hf/acme/tiny@main"
    said = run(shelf, "hf://acme/tiny@main", to)
    assert (to / "model.safetensors").read_bytes() == WEIGHTS
    nothing_but(to, "config.json", "model.safetensors", "tokenizer.json")  # neither the pickle, nor other formats
    nothing_but(to.parent, *(f"tiny@main/{n}" for n in ("config.json", "model.safetensors", "tokenizer.json")))
    assert said[0] == "hf://acme/tiny@main: 3 files, 3.0 MB"
    asked = len(shelf.asked)
    assert run(shelf, "hf://acme/tiny@main", to) == [f"{to} is there"]
    assert len(shelf.asked) == asked


@pytest.mark.parametrize(("source", "sha256"), [
    ("hf://acme/tiny/q/tiny.gguf", None), ("hf://acme/tiny@v1/q/tiny.gguf", DIGEST), ("s3://bucket/q/tiny.gguf", DIGEST),
    ("s3://bucket/q/tiny.gguf", None), ("http://web/q/tiny.gguf", DIGEST),
])
def test_one_file(shelf: Shelf, tmp_path: Path, source: str, sha256: str | None) -> None:
    to = tmp_path / "a" / "m.gguf"
    run(shelf, source, to, sha256)
    assert to.read_bytes() == FILES["q/tiny.gguf"]
    nothing_but(to.parent, "m.gguf")


def test_a_folder_of_a_bucket(shelf: Shelf, tmp_path: Path) -> None:
    run(shelf, "s3://bucket/q/", tmp_path / "q")
    assert (tmp_path / "q" / "tiny.gguf").read_bytes() == FILES["q/tiny.gguf"]


@pytest.mark.parametrize("source", ["hf://acme/tiny/q/tiny.gguf", "s3://bucket/q/tiny.gguf", "http://web/q/tiny.gguf"])
def test_what_broke_off_is_taken_up_where_it_stopped(shelf: Shelf, tmp_path: Path, source: str) -> None:
    shelf.cut = 2
    run(shelf, source, tmp_path / "m.gguf", DIGEST)
    assert (tmp_path / "m.gguf").read_bytes() == FILES["q/tiny.gguf"]
    ranges = [r for method, where, r in shelf.asked if method == "GET" and where.endswith("tiny.gguf") and r]
    assert shelf.cut == 0 and ranges, "it was cut off, and asked for the rest"
    assert shelf.sent < 1.2 * len(FILES["q/tiny.gguf"]) + 10_000, "no byte came twice"


@pytest.mark.parametrize("source", ["hf://acme/tiny/q/tiny.gguf", "s3://bucket/q/tiny.gguf", "http://web/q/tiny.gguf"])
def test_a_killed_download_is_taken_up_by_the_next_process(shelf: Shelf, tmp_path: Path, source: str) -> None:
    shelf.cut = 1
    to = tmp_path / "m.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TRIES", 1)
        with pytest.raises(UserError, match="tried 1 times"):
            run(shelf, source, to, DIGEST)
    assert not to.exists()
    before = shelf.sent
    run(shelf, source, to, DIGEST)
    assert to.read_bytes() == FILES["q/tiny.gguf"]
    assert shelf.sent - before < 0.6 * len(FILES["q/tiny.gguf"]) + 10_000


def test_a_part_of_another_version_is_begun_anew(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cut = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TRIES", 1)
        with pytest.raises(UserError):
            run(shelf, "s3://bucket/q/tiny.gguf", tmp_path / "m")
    shelf.files["q/tiny.gguf"] = b"GGUF" + WEIGHTS[1_000_000:2_000_000]
    run(shelf, "s3://bucket/q/tiny.gguf", tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == shelf.files["q/tiny.gguf"]


def test_trouble_that_passes_is_waited_for(shelf: Shelf, tmp_path: Path) -> None:
    shelf.down = 2
    said = run(shelf, "http://web/q/tiny.gguf", tmp_path / "m", DIGEST)
    assert shelf.down == 0 and sum("again in" in line for line in said) == 2


def test_a_token_is_shown_and_stays_with_its_host(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.token = "s3cret"
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    run(shelf, "hf://acme/tiny/config.json", tmp_path / "a")
    monkeypatch.setenv("BEARER_TOKEN", "s3cret")
    with serving(dict(FILES)) as other:
        shelf.redirect = other.url
        run(shelf, "http://web/q/tiny.gguf", tmp_path / "b", DIGEST)
        assert (tmp_path / "b").exists()
        assert set(other.authorizations) == {""}


def test_of_several_one_downloads(shelf: Shelf, tmp_path: Path) -> None:
    to, failed = tmp_path / "m", list[BaseException]()

    def one() -> None:
        try:
            run(shelf, "http://web/q/tiny.gguf", to, DIGEST)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and to.read_bytes() == FILES["q/tiny.gguf"]
    assert sum(method == "GET" for method, _, _ in shelf.asked) == 1


def lying(shelf: Shelf) -> None:
    shelf.lies.add("q/tiny.gguf")


def gated(shelf: Shelf) -> None:
    shelf.token, shelf.gated = "other", True


def private(shelf: Shelf) -> None:
    shelf.token = "other"


WRONG: list[tuple[str, Any, str | None, str]] = [
    ("hf://acme/none", None, None, "has no repository acme/none, or it is private and HF_TOKEN holds no token"),
    ("hf://acme/tiny@v9", None, None, "has no revision 'v9'"),
    ("hf://acme/tiny/none.gguf", None, None, "has no file 'none.gguf'; it has README.md, config.json"),
    ("hf://acme/tiny", lambda s: s.files.pop("model.safetensors"), None, "has no safetensors; name one of its GGUF files"),
    ("hf://acme/tiny/q/tiny.gguf", lying, None, "is another file, or damaged"),
    ("hf://acme/tiny", gated, None, "is gated: accept its terms there"),
    ("s3://bucket/none", None, None, "There is no s3://bucket/none"),
    ("s3://bucket/none/", None, None, "There is nothing below s3://bucket/none/"),
    ("s3://bucket/q/tiny.gguf", private, None, "may not be read"),
    ("http://web/none", None, DIGEST, "(status 404)"),
    ("http://web/q/tiny.gguf", private, DIGEST, "check BEARER_TOKEN"),
    ("http://web/q/tiny.gguf", None, "0" * 64, "is another file, or damaged: its checksum is " + DIGEST),
    ("http://web/q/tiny.gguf", None, None, "http:// only together with --sha256"),
    ("http://web/q/tiny.gguf", lambda s: setattr(s, "down", 99), DIGEST, "the server answers 503; tried 6 times"),
    ("ftp://a/b", None, None, "is no source"),
    ("hf://name", None, None, "is no source"),
]


@pytest.mark.parametrize(("source", "spoil", "sha256", "sentence"), WRONG, ids=[f"{w[0]} {w[3][:20]}" for w in WRONG])
def test_what_cannot_be_had_is_one_sentence_and_leaves_nothing(
    shelf: Shelf, tmp_path: Path, source: str, spoil: Any, sha256: str | None, sentence: str,
) -> None:
    if spoil:
        spoil(shelf)
    with pytest.raises(UserError) as e:
        run(shelf, source, tmp_path / "m", sha256)
    assert sentence in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "m").exists()


def test_no_room_is_said_before_anything_is_downloaded(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: _Usage())
    with pytest.raises(UserError, match=r"has 1\.0 MB and .* has room for 10 B"):
        run(shelf, "s3://bucket/q/tiny.gguf", tmp_path / "m")
    assert shelf.sent == 0


class _Usage:
    free = 10


def test_the_command_ends_with_2_and_its_sentence(shelf: Shelf, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weir_server", "fetch", "hf://acme/none", f"--to={tmp_path}/m", f"--endpoint={shelf.url}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("weir-server: ") and "Traceback" not in done.stderr
    command[4:] = ["hf://acme/tiny", f"--to={tmp_path}/m"]  # the Hub by the variable that everything for Hubs has
    env = {**os.environ, "HF_ENDPOINT": shelf.url}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m" / "config.json").exists()


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (7e12, "7000.0 GB")])
def test_bytes_as_people_read_them(count: float, text: str) -> None:
    assert human(count) == text
