"""Sizes in sentences: as people say them, and exactly."""

from __future__ import annotations

from typing import Final

_UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def in_words(nbytes: int) -> str:
    """``1.5 GiB (1610612736 bytes)``; below a KiB just the bytes."""
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{f'{nbytes / factor:.1f}'.removesuffix('.0')} {unit} ({nbytes} bytes)"
    return f"{nbytes} bytes"
