"""docs/memory-faults.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tests.doc_examples import DOCS

TESTS = Path(__file__).resolve().parents[2]


def test_every_test_of_the_page_exists() -> None:
    page = (DOCS / "memory-faults.md").read_text()
    sources = {path.stem: path.read_text() for path in TESTS.rglob("test_*.py")}
    named = re.findall(r"`(test_\w+)::(\w+)`", page)
    missing = [
        f"{module}::{name}"
        for module, name in named
        if not re.search(rf"^(async )?def test_{name}\(|^class {name}\(", sources.get(module, ""), re.MULTILINE)
    ]
    assert missing == []
    assert len(named) >= 100


def test_every_case_has_a_test_or_a_reason() -> None:
    covered, _, left_out = (DOCS / "memory-faults.md").read_text().partition("## Not covered")
    rows = [row for row in re.findall(r"^\| (.+) \| (.+) \|$", covered, re.MULTILINE) if row[0] != "case"]
    assert [case for case, test in rows if "::" not in test] == []
    reasons = [row for row in re.findall(r"^\| (.+) \| (.+) \|$", left_out, re.MULTILINE) if row[0] != "case"]
    assert all(len(why) > 20 for _, why in reasons)
