"""What may not be in a job, and that the error names the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lull.scheduler.requests import COMMAND_BYTES_MAX, JobRequest


def test_a_command_larger_than_an_order_may_be_is_refused() -> None:
    word = "x" * 100_000
    JobRequest(argv=(word,) * 5, env={"A": word, "B": word})
    with pytest.raises(ValidationError, match=f"argv and env are .* at most {COMMAND_BYTES_MAX}"):
        JobRequest(argv=(word,) * 5, env={str(number): word for number in range(6)})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a\x1b[2J"),
        ("name", "a\x00"),
        ("gpus", True),
        ("time_limit_seconds", True),
        ("name", "a\x9b"),
        ("project", "a\nb"),
        ("project", "\ud800"),
        ("env", {"A\nB": "1"}),
        ("env", {"A": "\x00"}),
        ("env", {"A": "\udcff"}),
        ("argv", ("a", "b\x00")),
        ("argv", ("\ud800",)),
        ("workdir", "/a\x00"),
    ],
)
def test_a_character_that_cannot_be_passed_on_or_shown_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate({"argv": ["true"], field: value})
    assert [error["loc"][0] for error in caught.value.errors()] == [field]


def test_what_a_program_may_be_given_passes() -> None:
    request = JobRequest(argv=("sh", "-c", "a\n\tb\x1b"), env={"Ä": "1\n2"}, name="ü — 名", project="p q")
    assert request.argv[2] == "a\n\tb\x1b"
