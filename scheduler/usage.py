"""Intervals into answers: cut to the time asked for, and honest about what nobody saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..agents.protocol.wire import OccupancyKind
from .model import Interval


@dataclass(frozen=True, slots=True)
class Sight:
    """How far a device's node has been seen."""

    last_seen_at: float
    silent: bool


def cut(
    intervals: Iterable[Interval], sights: Mapping[str, Sight], since: float, until: float, now: float
) -> list[Interval]:
    """Intervals within [since, until), in the order given. One that goes on ends at ``now`` at the latest unless
    ``until`` is later, then it stays open; after a silent node's last sign of life the device is `unknown`."""
    answer: list[Interval] = []
    for interval in intervals:
        sight = sights.get(interval.device_id)
        if interval.ended_at is not None or sight is None or not sight.silent:
            pieces = [interval]
        else:
            seen_until = max(interval.started_at, sight.last_seen_at)
            unknown = Interval(interval.device_id, seen_until, None, OccupancyKind.UNKNOWN, None, None)
            pieces = [replace(interval, ended_at=seen_until), unknown]
        answer.extend(piece for each in pieces if (piece := _clip(each, since, until, now)) is not None)
    return answer


def _clip(interval: Interval, since: float, until: float, now: float) -> Interval | None:
    started_at = max(interval.started_at, since)
    ended_at = interval.ended_at
    if ended_at is None and until <= now:
        ended_at = until
    elif ended_at is not None:
        ended_at = min(ended_at, until)
    if ended_at is not None and ended_at <= started_at:
        return None
    return replace(interval, started_at=started_at, ended_at=ended_at)
