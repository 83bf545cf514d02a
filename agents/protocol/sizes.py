"""Sizes: read as people write them, and said in sentences, exactly."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

_UNITS: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_FACTORS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    **{unit.lower(): factor for unit, factor in _UNITS},
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: Any) -> int:
    """``1610612736``, ``"1.5GiB"`` or ``"512 MiB"`` as a number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write for example 1.5GiB")
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    if not match or match.group(2).lower() not in _FACTORS:
        raise ValueError(f"{value!r} is not a size; write for example 1.5GiB, 512MiB or a number of bytes")
    return int(float(match.group(1)) * _FACTORS[match.group(2).lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]


def in_words(nbytes: int) -> str:
    """``1.5 GiB (1610612736 bytes)``; below a KiB just the bytes."""
    for unit, factor in _UNITS:
        if nbytes >= factor:
            return f"{f'{nbytes / factor:.1f}'.removesuffix('.0')} {unit} ({nbytes} bytes)"
    return f"{nbytes} bytes"
