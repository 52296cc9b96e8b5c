"""Quantities and durations: every legal spelling, and nothing else (stackabletech/operator-rs#617)."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir_operator.api.quantity import parse_bytes, parse_duration, parse_quantity

CHUNK = 737_280


@pytest.mark.parametrize(("text", "chunks"), [
    ("129e6", 174), ("0.5Gi", 728), ("268435456", 364), ("524288Ki", 728), ("1G", 1356), ("128974848000m", 174), ("1.5G", 2034),
    ("129E6", 174), (".5Gi", 728), ("512.Mi", 728), ("+512Mi", 728), ("1Ti", 1_491_308), ("1e9", 1356),
])
def test_bytes_become_whole_chunks(text: str, chunks: int) -> None:
    assert parse_bytes(text) // CHUNK == chunks


MALFORMED = ["1GB", "1gi", "-1Gi", "", "1 Gi", "Gi", "1e", "0x10", "1Ki5", "NaN", "0", "1m", "1,5G", "１Gi"]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_or_not_positive_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_bytes(text)


def test_suffixes_that_look_alike_differ() -> None:
    assert parse_bytes("1Gi") > parse_bytes("1G")
    assert parse_quantity("1E") == Decimal(10) ** 18
    assert parse_quantity("1E3") == 1000
    assert parse_quantity("1m") == Decimal("0.001")


@given(st.integers(1, 10**24), st.sampled_from(["", "k", "Ki", "M", "Mi", "G", "Gi"]))
def test_integers_are_exact(number: int, suffix: str) -> None:
    scale = {"": 1, "k": 10**3, "Ki": 2**10, "M": 10**6, "Mi": 2**20, "G": 10**9, "Gi": 2**30}[suffix]
    assert parse_bytes(f"{number}{suffix}") == number * scale


@pytest.mark.parametrize(("text", "seconds"), [
    ("2s", 2), ("80ms", 0.08), ("1m30s", 90), ("1.5h", 5400), ("250us", 0.00025), ("250µs", 0.00025), (".5s", 0.5), ("1.s", 1),
    ("2000ms", 2),
])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["2", "2 s", "-2s", "0s", "", "s", "1d", "2S", "1m 30s", "0ms"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)
