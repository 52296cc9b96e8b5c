"""Signatures as the service's own documentation has them: "Examples: Signature Calculations in AWS Signature Version 4"."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from weir_server.cli.s3 import Credentials, address, from_environment, listed, signed
from weir_server.link.errors import UserError

KEYS = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
THEN = datetime(2013, 5, 24, tzinfo=UTC)
HOST = "https://examplebucket.s3.amazonaws.com"


@pytest.mark.parametrize(("url", "headers", "signature"), [
    (f"{HOST}/test.txt", {"Range": "bytes=0-9"}, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
    (f"{HOST}/?max-keys=2&prefix=J", {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
])
def test_the_documented_examples(url: str, headers: dict[str, str], signature: str) -> None:
    made = signed("GET", url, headers, KEYS, THEN)
    assert made["Authorization"].endswith("Signature=" + signature)
    assert made["x-amz-date"] == "20130524T000000Z"


def test_without_credentials_nothing_is_signed_and_half_of_them_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert from_environment() is None
    assert signed("GET", HOST, {"a": "b"}, None, THEN) == {"a": "b"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    with pytest.raises(UserError, match="both, or neither"):
        from_environment()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "z")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    made = signed("GET", HOST, {}, from_environment(), THEN)
    assert made["x-amz-security-token"] == "z" and "/eu-north-1/s3/" in made["Authorization"]


@pytest.mark.parametrize(("bucket", "key", "endpoint", "url"), [
    ("models", "a b/m+1.gguf", None, "https://models.s3.us-east-1.amazonaws.com/a%20b/m%2B1.gguf"),
    ("my.models", "m", None, "https://s3.us-east-1.amazonaws.com/my.models/m"),
    ("models", "m", "http://minio:9000/", "http://minio:9000/models/m"),
])
def test_addresses(monkeypatch: pytest.MonkeyPatch, bucket: str, key: str, endpoint: str | None, url: str) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    assert address(bucket, key, endpoint) == url


def test_long_lists_come_page_by_page() -> None:
    def page(key: str, following: str) -> str:
        more = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
        row = f'<Contents><Key>{key}</Key><Size>3</Size><ETag>"e"</ETag></Contents><Contents><Key>p/</Key></Contents>'
        return f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{row}{more}</ListBucketResult>'

    asked: list[str] = []

    def ask(url: str) -> str:
        asked.append(url)
        return page("p/one", "t/1") if len(asked) == 1 else page("p/two", "")

    assert [o.key for o in listed("b", "p/", "http://s3", ask)] == ["p/one", "p/two"]
    assert asked[1].endswith("continuation-token=t%2F1&list-type=2&prefix=p%2F")
    with pytest.raises(UserError, match="is no S3 service"):
        list(listed("b", "p/", None, lambda _: "<html>"))
