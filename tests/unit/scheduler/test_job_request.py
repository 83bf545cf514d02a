"""What may not be in a job, and that the error names the field."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lull.scheduler.requests import COMMAND_BYTES_MAX, JobRequest


def test_a_command_larger_than_an_order_may_be_is_refused() -> None:
    word = "x" * 100_000
    JobRequest(argv=(word,) * 5, env={"A": word, "B": word})
    with pytest.raises(ValidationError, match=f"argv and env are .* at most {COMMAND_BYTES_MAX}"):
        JobRequest(argv=(word,) * 5, env={str(number): word for number in range(6)})
