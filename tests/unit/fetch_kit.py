"""A Hub, a bucket and a web server in one, on loopback: the parts of their APIs that a download uses, and their faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Shelf:
    """`files`: name → content. `cut`: how often a body is cut off in the middle. `down`: how often anything answers 503.
    `token`: what must be shown. `lies`: names whose content is not what the listing's checksum says."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.cut, self.down, self.token, self.lies = files, 0, 0, "", set[str]()
        self.gated = False
        self.asked: list[tuple[str, str, str]] = []  # method, path, Range
        self.sent = 0
        self.redirect = ""
        self.authorizations: list[str] = []
        self.url = ""


def _handler(shelf: Shelf) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._any()

        def do_GET(self) -> None:
            self._any()

        def _any(self) -> None:
            where = unquote(urlsplit(self.path).path)
            shelf.asked.append((self.command, where, self.headers.get("Range", "")))
            shelf.authorizations.append(self.headers.get("Authorization", ""))
            if shelf.down:
                shelf.down -= 1
                return self._plain(503, b"busy")
            if shelf.token and shelf.token not in self.headers.get("Authorization", ""):
                return self._plain(401, b"", {"X-Error-Code": "GatedRepo"} if shelf.gated else {})
            if shelf.redirect:
                return self._plain(302, b"", {"Location": shelf.redirect + self.path})
            if where.startswith("/api/models/"):
                return self._listing(where.removeprefix("/api/models/"))
            if "list-type" in parse_qs(urlsplit(self.path).query):
                return self._objects(where)
            name = re.sub(r"^/acme/tiny/resolve/[^/]+/|^/bucket/|^/", "", where)
            if name not in shelf.files:
                hub = {"X-Error-Code": "EntryNotFound"} if "/resolve/" in where else {}
                return self._plain(404, b"<Error><Code>NoSuchKey</Code></Error>", hub)
            return self._file(name)

        def _listing(self, where: str) -> None:
            repository, _, revision = where.partition("/revision/")
            if repository != "acme/tiny":
                return self._plain(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if revision not in ("", "main", "v1"):
                return self._plain(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            siblings = [
                {"rfilename": name, "size": len(body), "blobId": "x", "lfs": {
                    "sha256": hashlib.sha256(b"lie" if name in shelf.lies else body).hexdigest(), "size": len(body),
                    "pointerSize": 1,
                }}
                for name, body in shelf.files.items()
            ]
            answer = {"id": "acme/tiny", "modelId": "acme/tiny", "sha": COMMIT, "siblings": siblings, "private": False,
                      "tags": [], "downloads": 0, "likes": 0}
            return self._plain(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _objects(self, where: str) -> None:
            prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
            rows = "".join(
                f"<Contents><Key>{n}</Key><Size>{len(b)}</Size><ETag>&quot;{hash(b) & 0xffffff:x}&quot;</ETag></Contents>"
                for n, b in shelf.files.items() if n.startswith(prefix)
            )
            body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
            return self._plain(200, body.encode(), {"Content-Type": "application/xml"})

        def _file(self, name: str) -> None:
            body, asked = shelf.files[name], self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            tag = f'"{hash(body) & 0xffffff:x}"'
            if (wanted := self.headers.get("If-Range")) and wanted != tag:
                start = 0
            rest = body[start:]
            headers = {"ETag": tag, "Accept-Ranges": "bytes", "X-Repo-Commit": COMMIT}
            if asked and start:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            if self.command == "GET" and shelf.cut:
                shelf.cut -= 1
                return self._plain(206 if start else 200, rest, headers, len(rest) // 2)
            return self._plain(206 if asked and start else 200, rest, headers)

        def _plain(self, status: int, body: bytes, headers: dict[str, str] | None = None, only: int | None = None) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                part = body if only is None else body[:only]
                shelf.sent += len(part)
                self.wfile.write(part)
                if only is not None:
                    self.wfile.flush()
                    self.close_connection = True

    return Handler


@contextmanager
def serving(files: dict[str, bytes], host: str = "127.0.0.1", port: int = 0) -> Iterator[Shelf]:
    shelf = Shelf(files)
    server = ThreadingHTTPServer((host, port), _handler(shelf))
    server.daemon_threads = True
    shelf.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield shelf
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
