"""Which rows of a list are shown, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from lull.cli.choosing import ordered, selected
from lull.cli.exits import CliError

ROWS: list[dict[str, Any]] = [
    {"id": "a", "state": "queued", "priority": 10, "project": None, "devices": ["x"]},
    {"id": "b", "state": "running", "priority": 9, "project": "p", "devices": ["x", "y"]},
    {"id": "c", "state": "queued", "priority": -1, "project": "o", "devices": []},
]


def ids(rows: Any) -> str:
    return "".join(row["id"] for row in rows)


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (None, "abc"),
        (["state=queued"], "ac"),
        (["state=queued", "priority=10"], "a"),
        (["project="], "a"),
        (["devices=y"], "b"),
        (["state=nonesuch"], ""),
    ],
)
def test_rows_are_selected_by_their_fields(selectors: list[str] | None, expected: str) -> None:
    assert ids(selected(ROWS, selectors)) == expected


@pytest.mark.parametrize(
    ("sort_by", "expected"),
    [(None, "abc"), ("priority", "cba"), ("-priority", "abc"), ("project", "cba"), ("-project", "bca"), ("-id", "cba")],
)
def test_rows_are_sorted_as_numbers_or_text_and_those_without_come_last(sort_by: str | None, expected: str) -> None:
    assert ids(ordered(ROWS, sort_by)) == expected


def test_what_cannot_be_chosen_by_is_named_with_what_can() -> None:
    with pytest.raises(CliError, match="FIELD=VALUE"):
        list(selected(ROWS, ["state"]))
    with pytest.raises(CliError, match="no field 'nope'; there are devices, id"):
        list(selected(ROWS, ["nope=1"]))
    with pytest.raises(CliError, match="--sort-by"):
        ordered(ROWS, "-nope")
