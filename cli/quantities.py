"""Sizes and durations as people write them, both ways. Pure."""

from __future__ import annotations

import re
from typing import Final

from ..agents.protocol import sizes

_DURATION_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(d|h|m|s)")
_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
DURATION_SECONDS_MAX: Final = 10 * 365 * 86400.0


def parse_size(text: str) -> int:
    """As in TOML, but a size that somebody asks for is more than 0."""
    size_bytes = sizes.parse_size(text)
    if size_bytes == 0:
        raise ValueError(f"{text!r} has to be more than 0")
    return size_bytes


def parse_duration(text: str) -> float:
    """Seconds of `2h`, `30m`, `90s`, `1h30m`, `1d`, `45` (seconds). ValueError says what is wrong."""
    cleaned = text.strip().lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", cleaned):
        seconds = float(cleaned)
    else:
        parts = _DURATION_PART.findall(cleaned)
        if not parts or "".join(number + unit for number, unit in parts) != cleaned:
            raise ValueError(f"{text!r} is no duration; write for example 2h, 30m, 90s or 1h30m")
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds == 0:
        raise ValueError(f"{text!r} has to be more than 0")
    if seconds > DURATION_SECONDS_MAX:
        raise ValueError(f"{text!r} is more than ten years")
    return seconds


def format_size(size_bytes: int) -> str:
    for unit, factor in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= factor:
            value = size_bytes / factor
            return f"{value:.0f}{unit}" if value == int(value) else f"{value:.1f}{unit}"
    return f"{size_bytes}B"


def format_duration(seconds: float) -> str:
    """Two places at most: `350ms`, `4.2s`, `3m10s`, `2h5m`, `3d4h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for (unit, size), (lesser, lesser_size) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("m", 60)),
        (("m", 60), ("s", 1)),
    ):
        if whole >= size:
            rest = whole % size // lesser_size
            return f"{whole // size}{unit}{rest}{lesser}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"
