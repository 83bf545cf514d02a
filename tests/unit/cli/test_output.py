from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from lull.cli.options import OutputFormat
from lull.cli.output import Column, Output, age, described, field, text_of

ROWS = [{"id": "1", "name": "alpha", "n": 3}, {"id": "2", "name": None, "n": None}]
COLUMNS = (Column("NAME", field("name")), Column("N", field("n")), Column("ID", field("id"), wide=True))


def shown(form: str, *, no_headers: bool = False) -> str:
    stream = io.StringIO()
    Output(OutputFormat(form), no_headers, stream).rows(ROWS, COLUMNS)
    return stream.getvalue()


def test_a_table_is_aligned_and_has_a_dash_where_there_is_nothing() -> None:
    assert shown("table") == "NAME   N\nalpha  3\n-      -\n"


def test_a_wide_table_has_more_columns() -> None:
    assert shown("wide").splitlines()[0].split() == ["NAME", "N", "ID"]


def test_headers_can_be_left_out() -> None:
    assert shown("table", no_headers=True).splitlines()[0] == "alpha  3"


def test_json_is_what_came() -> None:
    assert json.loads(shown("json")) == ROWS


def test_jsonl_is_one_line_each() -> None:
    assert [json.loads(line) for line in shown("jsonl").splitlines()] == ROWS


def test_yaml_is_what_came() -> None:
    assert yaml.safe_load(shown("yaml")) == ROWS


def test_name_falls_back_to_the_id() -> None:
    assert shown("name") == "alpha\n2\n"


def test_an_empty_list_is_still_a_list() -> None:
    stream = io.StringIO()
    Output(OutputFormat.JSON, stream=stream).rows([], COLUMNS)
    assert json.loads(stream.getvalue()) == []


def test_a_cell_cannot_drive_the_terminal_or_break_the_line() -> None:
    assert text_of("a\x1b[2Jb\nc\td") == "ab c d"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (True, "yes"), ([], "-"), (["a", "b"], "a,b"), ({"k": 1}, "k=1")]
)
def test_cells(value: object, text: str) -> None:
    assert text_of(value) == text


def test_ages_are_relative_to_now() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert age((now - timedelta(minutes=3, seconds=10)).isoformat(), now) == "3m10s"
    assert age("2030-01-01T00:01:30Z", now) == "in 1m30s"
    assert age(None, now) == "-"


def test_a_description_leaves_out_what_is_not_there() -> None:
    assert described([("job", "1"), ("name", "-"), ("state", "queued")]) == ["job:   1", "state: queued"]
