"""`weir-server fetch`: a model from a Hub, a bucket or a web server into a folder, as an init container does it.

Bound: TO is there whole and checked, or not at all. What is on its way lies in a folder beside it and is taken up where it
stopped, by this process or by another one; of several that want the same model one downloads, the others wait for it. Cost: a
rename at the end, and one more reading of each file for its checksum. Reason: a pod that dies while it downloads must leave
nothing that a later one takes for a model (huggingface/text-generation-inference#1186 and its like).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from weir_server.link.errors import UserError

TRIES = 6
"""Of one file, with what came so far kept between them."""
FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0
PROGRESS_SECONDS, LOCK_POLL_SECONDS, LONGEST_WAIT = 5.0, 1.0, 6 * 3600.0
SILENT_SECONDS = 60.0
"""A server that sends nothing for so long has failed."""
CHUNK = 1 << 20
Say = Callable[[str], None]
T = TypeVar("T")


class Interrupted(Exception):
    """It may go better the next time; the text says what happened."""


@dataclass(frozen=True, slots=True)
class File:
    """One file to have. `name`: below the destination. `save(target, count)` gets it, from what lies at `target` already, and
    tells `count` of bytes that came; it raises Interrupted or UserError. `size` and `sha256`: as the source tells them."""

    name: str
    save: Callable[[Path, Callable[[int], None]], None]
    size: int | None = None
    sha256: str | None = None


class Progress:
    """Lines about how far it is, not too many."""

    def __init__(self, total: int | None, say: Say) -> None:
        self._total, self._say, self._bytes, self._began, self._told = total, say, 0, time.monotonic(), time.monotonic()

    def __call__(self, count: int) -> None:
        self._bytes += count
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS:
            self._told = now
            share = f"{100 * self._bytes // self._total:.0f} % of {human(self._total)}" if self._total else human(self._bytes)
            self._say(f"{share}, {human(int(self._bytes / max(now - self._began, 0.001)))}/s")


def human(count: float) -> str:
    """Bytes as people read them."""
    power = min(3, max(0, (len(str(int(count))) - 1) // 3))
    return f"{count / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB')[power]}"


def _option(name: str, help: str) -> Any:
    """A flag with its environment variable, as `serve` has them."""
    return typer.Option(f"--{name}", envvar=f"WEIR_{name.upper()}", show_envvar=False, help=help)


def command(
    source: Annotated[str, typer.Argument(help="hf://ORG/NAME[@REVISION][/FILE], s3://BUCKET/KEY, https://HOST/FILE.")],
    to: Annotated[Path, _option("to", "Where it will lie: a file, or a folder for a repository or a prefix.")],
    endpoint: Annotated[str | None, _option("endpoint", "Another Hub than huggingface.co, or S3 service than AWS.")] = None,
    sha256: Annotated[str | None, _option("sha256", "Checksum that the file must have.")] = None,
) -> None:
    """Download a model, whole and checked. What is there already is not downloaded again; what broke off is taken up.

    Secrets come from the environment: HF_TOKEN; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_SESSION_TOKEN;
    BEARER_TOKEN for https.
    """
    fetch(source, to, endpoint, sha256, lambda line: print(line, flush=True))


def fetch(source: str, to: Path, endpoint: str | None, sha256: str | None, say: Say) -> None:
    """Have the model of `source` at `to`. Raises UserError with one sentence."""
    if to.exists():
        say(f"{to} is there")
        return
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with _alone(to, say):
            if to.exists():
                say(f"{to} is there: another process has downloaded it meanwhile")
                return
            _download(source, to, endpoint, sha256, say)
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise UserError(f"No space is left below {to.parent} for {source}.") from None
        raise UserError(f"Cannot write {e.filename or to}: {e.strerror or e}.") from None


def _download(source: str, to: Path, endpoint: str | None, sha256: str | None, say: Say) -> None:
    """Into a folder beside `to`, then in one step to `to`."""
    from weir_server.cli.fetch_sources import files_of

    began = time.monotonic()
    single, files = _patiently(lambda: files_of(source, endpoint, sha256), f"Cannot ask for {source}", say)
    staging = to.with_name(f".{to.name}.part")
    staging.mkdir(exist_ok=True)
    wanted = [f.size for f in files]
    total = sum(size for size in wanted if size is not None) if None not in wanted else None
    _room(source, staging, total)
    say(f"{source}: {len(files)} file{'s' if len(files) > 1 else ''}{f', {human(total)}' if total else ''}")
    progress = Progress(total, say)
    for file in files:
        target = staging / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        _patiently(lambda: _one(source, file, target, progress), f"Cannot download {file.name} of {source}", say)  # noqa: B023
    for leftover in (*staging.rglob("*.part"), *staging.rglob("*.tag"), staging / ".cache"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    (staging / files[0].name if single else staging).replace(to)
    shutil.rmtree(staging, ignore_errors=True)
    say(f"{to} is there after {time.monotonic() - began:.0f} s")


def _one(source: str, file: File, target: Path, progress: Progress) -> None:
    """One file, checked; from what an earlier attempt left of it. Raises Interrupted, UserError."""
    if not target.exists():
        file.save(target, progress)
    size = target.stat().st_size
    if file.size is not None and size != file.size:
        target.unlink()
        raise Interrupted(f"it has {size} bytes and not {file.size}")
    if file.sha256 is not None and (found := _sha256(target)) != file.sha256:
        target.unlink()
        raise UserError(f"{file.name} of {source} is another file, or damaged: its checksum is {found} and not {file.sha256}.")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _patiently(work: Callable[[], T], what: str, say: Say) -> T:
    """The result of `work`, tried again while it is interrupted. Raises UserError."""
    for attempt in range(TRIES):
        try:
            return work()
        except Interrupted as e:
            if attempt == TRIES - 1:
                raise UserError(f"{what}: {e}; tried {TRIES} times.") from None
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2**attempt) * random.uniform(1.0, 1.5)
            say(f"{what}: {e}; again in {delay:.0f} s")
            time.sleep(delay)
    raise AssertionError


def _room(source: str, folder: Path, total: int | None) -> None:
    """Raises UserError where it cannot fit."""
    there = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    free = shutil.disk_usage(folder).free
    if total is not None and total - there > free:
        raise UserError(f"{source} has {human(total)} and {folder.parent} has room for {human(free + there)}: give it more.")


@contextlib.contextmanager
def _alone(to: Path, say: Say) -> Iterator[None]:
    """While this holds, no other process downloads to `to`; the kernel lets go if this one dies. Raises UserError."""
    lock, deadline, told = os.open(to.with_name(f".{to.name}.lock"), os.O_CREAT | os.O_RDWR, 0o666), time.monotonic(), False
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as e:
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise UserError(f"The file system of {to.parent} has no locks: {e.strerror}.") from None
            if time.monotonic() - deadline > LONGEST_WAIT:
                raise UserError(f"Another process has been downloading {to} for {LONGEST_WAIT / 3600:.0f} h.")
            if not told:
                say(f"another process downloads {to}: waiting for it")
                told = True
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(lock)
