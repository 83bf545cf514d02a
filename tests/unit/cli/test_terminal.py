from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lull.cli.terminal import EscapeFilter, strip_escapes


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("back\x08space", "backspace"),
        ("bell\x07", "bell"),
        ("10 %\r20 %", "10 %\r20 %"),
        ("\x9b31mC1", "31mC1"),
        ("\x1bcreset", "creset"),
        ("ümläut 漢字", "ümläut 漢字"),
    ],
)
def test_what_drives_a_terminal_is_taken_out(text: str, safe: str) -> None:
    assert strip_escapes(text) == safe


@given(st.text())
def test_no_escape_survives(text: str) -> None:
    assert "\x1b" not in strip_escapes(text)


@given(
    st.lists(st.sampled_from(["text ", "\x1b[1;31m", "\x1b[0m", "é", "漢", "\n", "\x1b]0;t\x07"])), st.integers(1, 5)
)
def test_a_stream_is_filtered_alike_however_it_is_cut(parts: list[str], size: int) -> None:
    content = "".join(parts).encode()
    escapes = EscapeFilter()
    shown = "".join(escapes.feed(content[start : start + size]) for start in range(0, len(content), size))
    assert shown + escapes.finish() == strip_escapes("".join(parts))


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert EscapeFilter().feed(b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"


def test_an_escape_that_never_ends_does_not_hold_back_the_log_for_ever() -> None:
    escapes = EscapeFilter()
    escapes.feed(b"\x1b]" + b"x" * 300)
    assert "later" in escapes.feed(b"\x07later")
