"""Sizes: read as people write them, and said in sentences, exactly."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

_UNITS: Final = (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_FACTORS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    **{unit.lower(): factor for unit, factor in _UNITS},
}
# Nineteen digits write any size there is; more are a slip.
_SIZE: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]*)")
SIZE_BYTES_MAX: Final = 2**60


def parse_size(text: str) -> int:
    """Bytes of `40GiB`, `512 MiB`, `1.5GiB`, `2GB` (10^9), `4096`. ValueError says what is wrong.

    A bare `G` is refused: half of the world reads it as 2^30, the other half as 10^9.
    """
    shown = repr(text if len(text) <= 40 else f"{text[:40]}…")
    matched = _SIZE.fullmatch(text.strip())
    if matched is None:
        raise ValueError(f"{shown} is not a size; write for example 40GiB, 512MiB or a number of bytes")
    unit = matched[2].lower()
    if unit in ("k", "m", "g", "t", "p"):
        letter = unit.upper()
        raise ValueError(f"{shown} is ambiguous; write {letter}iB (powers of 1024) or {letter}B (powers of 1000)")
    if unit not in _FACTORS:
        raise ValueError(
            f"{shown} is not a size: unknown unit {matched[2]!r}; use KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB or PB"
        )
    size_bytes = int(Decimal(matched[1]) * _FACTORS[unit])
    if size_bytes > SIZE_BYTES_MAX:
        raise ValueError(f"{shown} has to be at most 1024PiB")
    return size_bytes


def parse_bytes(value: Any) -> int:
    """``1610612736``, ``"1.5GiB"`` or ``"512 MiB"`` as a number of bytes. ValueError says what is wrong."""
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a size; write for example 1.5GiB")
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=SIZE_BYTES_MAX)]


def in_words(nbytes: int) -> str:
    """``1.5 GiB (1610612736 bytes)``; below a KiB just the bytes."""
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{f'{nbytes / factor:.1f}'.removesuffix('.0')} {unit} ({nbytes} bytes)"
    return f"{nbytes} bytes"
