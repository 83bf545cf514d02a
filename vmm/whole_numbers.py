"""A setting that is a number of bytes, threads or calls: whole, and within its bounds."""

from __future__ import annotations


def require_whole(value: object, name: str, least: int, most: int) -> int:
    """The value; ValueError names it and what it may be. True is no number."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")
