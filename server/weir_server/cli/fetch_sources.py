"""Where `fetch` gets files from: a Hugging Face Hub, S3, a web server. Each says what there is, and saves a file from where an
earlier attempt stopped."""

from __future__ import annotations

import fnmatch
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

from weir_server.cli import s3
from weir_server.cli.fetch import CHUNK, SILENT_SECONDS, File, Interrupted
from weir_server.link.errors import UserError

LAYOUT = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What a repository in the Hugging Face layout is served from: other formats of the same weights are left where they are."""


def files_of(source: str, endpoint: str | None, sha256: str | None) -> tuple[bool, list[File]]:
    """Whether `source` is one file, and its files. Raises Interrupted, UserError."""
    scheme, _, rest = source.partition("://")
    if scheme == "hf" and rest.count("/"):
        return _hub(rest, endpoint, sha256)
    if scheme == "s3" and rest.partition("/")[2]:
        return _bucket(rest, endpoint, sha256)
    if scheme == "https" or (scheme == "http" and sha256):  # without TLS only what a checksum vouches for
        return True, [_at(source, sha256)]
    raise UserError(
        f"{source!r} is no source: write hf://ORG/NAME[@REVISION][/FILE], s3://BUCKET/KEY or https://HOST/FILE "
        "(http:// only together with --sha256)."
    )


Count = Callable[[int], None]
Chunks = Callable[[int], tuple[int, Iterator[bytes]]]


def _resumed(target: Path, tag: str, size: int | None, chunks: Chunks, count: Count) -> None:
    """Write to a .part beside `target` and rename it. `tag` names the source's version: a part of another version is begun
    anew. `chunks(offset)` gives where the source really goes on from, and its bytes. Raises Interrupted."""
    part, note = target.with_name(target.name + ".part"), target.with_name(target.name + ".tag")
    have = part.stat().st_size if tag and part.exists() and note.exists() and note.read_text() == tag else 0
    note.write_text(tag)
    start, stream = chunks(have)
    with part.open("r+b" if start else "wb") as f:
        f.truncate(start)
        f.seek(start)
        count(start)
        for chunk in stream:
            f.write(chunk)
            count(len(chunk))
        f.flush()
        os.fsync(f.fileno())
    if size is not None and (came := part.stat().st_size) < size:
        raise Interrupted(f"broke off after {came} of {size} bytes")
    part.replace(target)


# ---------------------------------------------------------------- Hugging Face Hub

def _hub(rest: str, endpoint: str | None, sha256: str | None) -> tuple[bool, list[File]]:
    import huggingface_hub as hub
    from huggingface_hub import constants, utils  # no attributes of the package until somebody has imported them

    organisation, _, rest = rest.partition("/")
    name, _, wanted = rest.partition("/")
    name, _, revision = name.partition("@")
    repository, where = f"{organisation}/{name}", endpoint or constants.ENDPOINT
    token = os.environ.get("HF_TOKEN") or False  # never one that lies about in a home
    api = hub.HfApi(endpoint=where, token=token, library_name="weir")
    info = _asked(
        lambda: api.model_info(repository, revision=revision or None, files_metadata=True), where, repository, revision,
    )
    there = {s.rfilename: s for s in info.siblings or ()}
    served = [n for n in sorted(there) if "/" not in n and any(fnmatch.fnmatch(n, p) for p in LAYOUT)]
    names = [wanted] if wanted else served
    if wanted and wanted not in there:
        raise UserError(f"{repository} at {where} has no file {wanted!r}; it has {_some(sorted(there))}.")
    if not wanted and not any(n.endswith(".safetensors") for n in names):
        ggufs = [n for n in sorted(there) if n.endswith(".gguf")]
        hint = f"; name one of its GGUF files, such as hf://{repository}/{ggufs[0]}" if ggufs else ""
        raise UserError(f"{repository} at {where} has no safetensors{hint}.")

    headers = utils.build_hf_headers(token=token, library_name="weir")
    denied = f"{repository} at {where} may not be read: accept its terms there, and give a token that may read it as HF_TOKEN."

    def file(name: str) -> File:
        url = hub.hf_hub_url(repository, name, revision=info.sha, endpoint=where)
        told = (there[name].lfs or {}).get("sha256")
        # a file of a commit does not change, so its part may be gone on with as it is
        return _web(url, name, headers, denied, there[name].size, sha256 or told, tag=f"{info.sha}/{name}")

    return bool(wanted), [file(name) for name in names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def _asked(ask: Callable[[], Any], where: str, repository: str, revision: str) -> Any:
    """The Hub's answer. Its errors become one sentence for the user, or an interruption."""
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError:
        raise UserError(
            f"{repository} at {where} is gated: accept its terms there, and give a token that may read it as HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{where} has no repository {repository}, or it is private and HF_TOKEN holds no token that may read it."
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{repository} at {where} has no revision {revision!r}.") from None
    except errors.HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else 0
        if status in (401, 403):
            raise UserError(f"{where} does not let us read {repository} (status {status}): check HF_TOKEN.") from None
        raise Interrupted(f"{where} answers {status}") from None
    except errors.HFValidationError as e:
        raise UserError(f"{repository} is no name of a repository: {_line(e)}.") from None
    except Exception as e:  # its HTTP client's own, which are of no common kind
        raise Interrupted(f"{where}: {_line(e)}") from None


def _line(e: BaseException) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0][:300].rstrip(".")


# ---------------------------------------------------------------- S3

def _bucket(rest: str, endpoint: str | None, sha256: str | None) -> tuple[bool, list[File]]:
    bucket, _, key = rest.partition("/")
    denied = f"s3://{bucket}/{key} may not be read: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION."

    def ask(method: str, url: str) -> Any:
        return _open(url, method, s3.sign_now(method, url, {}), denied, f"There is no s3://{bucket}/{key}.")

    def file(found: s3.Object, name: str) -> File:
        url = s3.address(bucket, found.key, endpoint)
        whole = sha256 if found.key == key else None
        return _web(url, name, {"If-Match": found.tag}, denied, found.size, whole, found.tag, sign=s3.sign_now)

    if not key.endswith("/"):
        with ask("HEAD", s3.address(bucket, key, endpoint)) as head:
            found = s3.Object(key, int(head.headers["Content-Length"]), head.headers.get("ETag", ""))
        return True, [file(found, key.rsplit("/", 1)[-1])]
    objects = list(s3.listed(bucket, key, endpoint, lambda url: ask("GET", url).read()))
    if not objects:
        raise UserError(f"There is nothing below s3://{bucket}/{key}.")
    return False, [file(o, o.key[len(key):]) for o in objects]


def _guarded(stream: Iterator[bytes]) -> Iterator[bytes]:
    """A stream whose breaking off is an interruption."""
    try:
        yield from stream
    except (HTTPException, ConnectionError, TimeoutError) as e:
        raise Interrupted(f"broke off: {_line(e)}") from None


# ---------------------------------------------------------------- web server

class _KeepSecrets(urllib.request.HTTPRedirectHandler):
    """A redirect to another host does not get the token."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        fresh = super().redirect_request(req, fp, code, msg, headers, newurl)
        if fresh is not None and urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            fresh.remove_header("Authorization")
        return fresh


def _open(url: str, method: str, headers: dict[str, str], denied: str, missing: str = "") -> Any:
    """The answer. Raises UserError for what a second try would not change, else Interrupted."""
    request = urllib.request.Request(url, method=method, headers={"User-Agent": "weir", **headers})
    try:
        return urllib.request.build_opener(_KeepSecrets).open(request, timeout=SILENT_SECONDS)
    except urllib.error.HTTPError as e:
        if e.code in (401, 403):
            raise UserError(denied) from None
        if e.code in (404, 410):
            raise UserError(missing or f"There is no {url} (status {e.code}).") from None
        raise Interrupted(f"the server answers {e.code}") from None
    except (urllib.error.URLError, HTTPException, OSError) as e:
        raise Interrupted(_line(e)) from None


def _at(url: str, sha256: str | None) -> File:
    """A file by its address. What the server says of its version decides whether a part of it may be gone on with."""
    token = os.environ.get("BEARER_TOKEN")
    headers, denied = {"Authorization": f"Bearer {token}"} if token else {}, f"{url} may not be read: check BEARER_TOKEN."
    with _open(url, "HEAD", headers, denied) as head:
        tag = head.headers.get("ETag") or head.headers.get("Last-Modified") or ""
        size = int(head.headers["Content-Length"]) if head.headers.get("Content-Length") else None
    name = urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1]
    strong = "" if tag.startswith("W/") else tag
    return _web(url, name, headers, denied, size, sha256, strong, {"If-Range": strong})


def _web(
    url: str, name: str, headers: dict[str, str], denied: str, size: int | None, sha256: str | None, tag: str,
    resuming: dict[str, str] | None = None, sign: Callable[[str, str, dict[str, str]], dict[str, str]] = lambda _m, _u, h: h,
) -> File:
    """`headers` go along with every request, `resuming` with one for the rest of a file; `denied` is said for 401 and 403;
    `sign` adds what signs a request."""
    def save(target: Path, count: Count) -> None:
        def chunks(have: int) -> tuple[int, Iterator[bytes]]:
            partly = have and (size is None or have < size)
            rest = {"Range": f"bytes={have}-", **(resuming or {})} if partly else {}
            answer = _open(url, "GET", sign("GET", url, {**headers, **rest}), denied)
            return (have if answer.status == 206 else 0), _guarded(iter(lambda: answer.read(CHUNK), b""))

        _resumed(target, tag, size, chunks, count)

    return File(name, save, size, sha256)
