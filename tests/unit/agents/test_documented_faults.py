"""The audit of reported faults in docs/engines.md: every row is a test that exists, or says why there is none."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
WITHOUT_TEST = ("out of reach", "advice:", "note only")


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "engines.md").read_text()
    table = text.split("## Every fault that users reported")[1].split("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [row for row in found[2:] if len(row) == 3]


def test_every_group_is_there() -> None:
    assert [row[0][:2] for row in rows() if row[0]] == [f"{letter}." for letter in "ABCDEFGHIJKLMN"]


def test_what_is_named_as_a_test_is_one() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    known = {file.name for file in files}
    for file in files:
        known |= set(re.findall(r"def (test_\w+)", file.read_text()))
    named = {name for row in rows() for name in re.findall(r"`(test_\w+(?:\.py)?)`", row[2])}
    assert sorted(named - known) == []


def test_every_report_has_a_test_or_a_reason() -> None:
    for group, reports, shown in rows():
        assert "`test_" in shown or any(words in shown for words in WITHOUT_TEST), (group, reports)
        assert re.search(r"#\d+|dynamo|RFC", reports), reports
