"""The canary fails closed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lull.agents.canary import difference, from_json, to_json
from lull.agents.engines.base import Answer

GOLDEN = Answer("fox", (1, 2, 3), (-0.1, -0.2, -0.3))


def test_the_same_answer_is_no_difference() -> None:
    assert difference(GOLDEN, GOLDEN, 1e-3) is None
    assert difference(GOLDEN, Answer("fox", (1, 2, 3), (-0.1005, -0.2, -0.3)), 1e-3) is None


@pytest.mark.parametrize(
    "now",
    [
        Answer("dog", (1, 2, 3), (-0.1, -0.2, -0.3)),
        Answer("fox", (1, 2, 4), (-0.1, -0.2, -0.3)),
        Answer("fox", None, (-0.1, -0.2, -0.3)),
        Answer("fox", (1, 2, 3), None),
        Answer("fox", (1, 2, 3), (-0.1, -0.2)),
        Answer("fox", (1, 2, 3), (-0.1, -0.2, -0.302)),
        Answer("fox", (1, 2, 3), (-0.1, -0.2, float("nan"))),
        Answer("", None, None),
    ],
)
def test_anything_else_is_one(now: Answer) -> None:
    assert difference(GOLDEN, now, 1e-3) is not None


@given(
    st.builds(
        Answer,
        st.text(),
        st.none() | st.lists(st.integers(0, 300)).map(tuple),
        st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
    )
)
def test_a_golden_answer_survives_the_journal(answer: Answer) -> None:
    assert from_json(to_json(answer)) == answer
