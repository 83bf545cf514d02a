from __future__ import annotations

import pytest

from lull.agents.protocol.sizes import in_words


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB (1024 bytes)"),
        (3 << 29, "1.5 GiB (1610612736 bytes)"),
        (80 << 30, "80 GiB (85899345920 bytes)"),
        ((1 << 40) + 1, "1 TiB (1099511627777 bytes)"),
    ],
)
def test_a_size_in_words_is_exact_as_well(nbytes: int, words: str) -> None:
    assert in_words(nbytes) == words
