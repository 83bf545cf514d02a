"""How the flags of an engine are read from its words: every spelling that its own parser takes."""

from __future__ import annotations

import pytest

from lull.agents.command_flags import flag


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("serve --tensor-parallel-size 2 --other", "2"),
        ("serve --tensor-parallel-size=2", "2"),
        ("serve --tensor_parallel_size 2", "2"),
        ("serve --tensor_parallel-size=a_b", "a_b"),  # of the name only
        ("serve --tensor-par 2", "2"),
        ("serve -tp 2", "2"),
        ("serve -tp=2", "2"),
        ("serve -tp 1 --tensor-parallel-size 2", "2"),
        ("serve --tensor-parallel-size.key 2", ""),  # a part of it
        ("serve --tensor-parallel-size --other", ""),
        ("serve --tensor-parallel-size -x", ""),
        ("serve --tensor-parallel-size -1", "-1"),
        ("serve --tensor-parallel-size", ""),
        ("serve --tensor-parallel-sizes 2", None),
        ("serve --no-tensor-parallel-size", None),
        ("serve -t 2", None),
        ("serve -- tensor-parallel-size", None),
        ("serve tp 2", None),
        ("", None),
    ],
)
def test_every_spelling(words: str, value: str | None) -> None:
    assert flag(words.split(), "--tensor-parallel-size", "-tp") == value
