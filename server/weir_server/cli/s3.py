"""Requests to S3, signed: no more of it than a download needs.

Signature Version 4 as https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html has it, held to that page's
own examples. Credentials come from the environment alone; without any, requests are not signed (a public bucket).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlsplit

from weir_server.link.errors import UserError

EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Credentials:
    key_id: str
    secret: str
    session: str = ""
    region: str = "us-east-1"


def from_environment() -> Credentials | None:
    """Raises UserError where only half of them is there."""
    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if bool(key_id) != bool(secret):
        raise UserError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must be given both, or neither.")
    return Credentials(key_id, secret, os.environ.get("AWS_SESSION_TOKEN", ""), region()) if key_id else None


def region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def address(bucket: str, key: str, endpoint: str | None, query: Mapping[str, str] | None = None) -> str:
    """The URL of an object, or of the bucket with an empty key. A bucket with dots fits no certificate as a host's name."""
    service = endpoint.rstrip("/") if endpoint else f"https://s3.{region()}.amazonaws.com"
    root = f"{service}/{bucket}" if endpoint or "." in bucket else service.replace("://", f"://{bucket}.", 1)
    return f"{root}/{_quoted(key)}" + (f"?{_joined(query)}" if query else "")


def _quoted(key: str) -> str:
    return quote(key, safe="/-_.~")


def _joined(query: Mapping[str, str]) -> str:
    return "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query.items()))


def signed(method: str, url: str, headers: Mapping[str, str], credentials: Credentials | None, now: datetime) -> dict[str, str]:
    """`headers` with those that sign the request, itself without a body. `now` is in UTC."""
    if credentials is None:
        return dict(headers)
    parts, when = urlsplit(url), now.strftime("%Y%m%dT%H%M%SZ")
    out = {**headers, "x-amz-date": when, "x-amz-content-sha256": EMPTY}
    if credentials.session:
        out["x-amz-security-token"] = credentials.session
    told = {**{k.lower(): v.strip() for k, v in out.items()}, "host": parts.netloc}
    names = ";".join(sorted(told))
    lines = "".join(f"{name}:{told[name]}\n" for name in sorted(told))
    request = "\n".join((method, parts.path or "/", parts.query, lines, names, EMPTY))
    scope = f"{when[:8]}/{credentials.region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", when, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    out["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{scope},SignedHeaders={names},Signature={signature}"
    )
    return out


def sign_now(method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
    return signed(method, url, headers, from_environment(), datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class Object:
    key: str
    size: int
    tag: str


def listed(bucket: str, prefix: str, endpoint: str | None, ask: Callable[[str], Any]) -> Iterator[Object]:
    """The objects below `prefix`, folders' own entries aside, page by page. `ask(url)` gives a page's text."""
    query = {"list-type": "2", "prefix": prefix}
    while True:
        try:
            page = xml.fromstring(ask(address(bucket, "", endpoint, query)))
        except xml.ParseError:
            raise UserError(f"What answers for s3://{bucket} is no S3 service.") from None
        for item in page.iterfind("{*}Contents"):
            if not (key := item.findtext("{*}Key", "")).endswith("/"):
                yield Object(key, int(item.findtext("{*}Size", "0")), item.findtext("{*}ETag", ""))
        following = page.findtext("{*}NextContinuationToken", "")
        if not following:
            return
        query["continuation-token"] = following
