"""What a check found: a status, what was seen, and the way out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"


_RANKS = {Status.NOT_APPLICABLE: 0, Status.OK: 1, Status.WARNING: 2, Status.FAILED: 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """``way_out``: the command or setting that mends it; empty where nothing is to be mended. ``subject``: the engine,
    device or file that it is about, where a check is about several."""

    status: Status
    seen: str
    way_out: str = ""
    subject: str = ""


def ok(seen: str, subject: str = "") -> Finding:
    return Finding(Status.OK, seen, "", subject)


def warning(seen: str, way_out: str, subject: str = "") -> Finding:
    return Finding(Status.WARNING, seen, way_out, subject)


def failed(seen: str, way_out: str, subject: str = "") -> Finding:
    return Finding(Status.FAILED, seen, way_out, subject)


def not_applicable(seen: str, subject: str = "") -> Finding:
    return Finding(Status.NOT_APPLICABLE, seen, "", subject)


def worst(statuses: Iterable[Status]) -> Status:
    return max(statuses, key=_RANKS.__getitem__, default=Status.NOT_APPLICABLE)


def in_mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 10 << 30 else f"{nbytes / (1 << 20):.0f} MiB"
