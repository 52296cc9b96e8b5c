"""docs/seed-map.md is the project's promise list: every row is answered, and every test that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+\.\d+) \| (.+?) \| (.+?) \| (.+?) \|$")


def rows() -> list[tuple[str, str]]:
    lines = (ROOT / "docs/seed-map.md").read_text().splitlines()
    return [(m[1], m[4]) for m in map(ROW.match, lines) if m]


def test_every_table_line_is_a_row() -> None:
    lines = (ROOT / "docs/seed-map.md").read_text().splitlines()
    table = [x for x in lines if x.startswith("|") and not x.startswith(("| # ", "|---"))]
    assert len(rows()) == len(table) > 80
    assert len({i for i, _ in rows()}) == len(table), "row numbers are unique"


@pytest.mark.parametrize(("number", "answer"), rows())
def test_the_answer_is_a_test_or_a_program_that_exists_or_a_reason(number: str, answer: str) -> None:
    if answer.startswith(("later: ", "not ours: ")):
        return
    names, programs = re.findall(r"`([^`]+\.py)::(\w+)`", answer), re.findall(r"measured by `([^`]+)`", answer)
    assert names or programs, f"row {number}: {answer!r} is neither a test nor a reason"
    assert [p for p in programs if not (ROOT / p).is_file()] == []
    for file, test in names:
        assert re.search(rf"def {test}\b", (ROOT / "tests" / file).read_text()), f"row {number}: no {test} in {file}"
