from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lull.cli.quantities import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("40GiB", 40 << 30),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2_000_000_000),
        ("4096", 4096),
        ("7B", 7),
        ("1TiB", 1 << 40),
        ("1PiB", 1 << 50),
        ("1024PiB", 1 << 60),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["40G", "40g", "1.5T"])
def test_a_size_that_two_people_read_differently_is_refused_with_both_spellings(text: str) -> None:
    with pytest.raises(ValueError, match=r"ambiguous; write [GT]iB .* or [GT]B"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "told"), [("0", "'0' has to be more than 0$"), ("1025PiB", "'1025PiB' has to be at most 1024PiB$")]
)
def test_a_size_out_of_its_bounds_is_told_which(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0GiB", "1e9", "1GiB extra", "1XB", "2000000PiB", "9" * 40])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit|more than 0|at most"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200.0), ("30m", 1800.0), ("90s", 90.0), ("1h30m", 5400.0), ("1d", 86400.0), ("45", 45.0), ("0.5s", 0.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "2 hours", "1h-", "-5s", "0", "0s", "1h30", "99999d", "\u0663h", "\u0663"])
def test_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|more than 0|ten years"):
        parse_duration(text)


@given(st.integers(min_value=1, max_value=1 << 59))
def test_a_formatted_size_is_read_again_within_its_precision(size_bytes: int) -> None:
    again = parse_size(format_size(size_bytes))
    assert abs(again - size_bytes) <= max(1, size_bytes // 20)


@given(st.floats(min_value=1e-3, max_value=1e7))
def test_a_formatted_duration_is_short(seconds: float) -> None:
    assert 0 < len(format_duration(seconds)) <= 8


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.35, "350ms"), (4.21, "4.2s"), (45, "45s"), (190, "3m10s"), (7200, "2h"), (7500, "2h5m"), (273600, "3d4h")],
)
def test_formatted_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
