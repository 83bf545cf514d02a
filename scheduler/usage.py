"""What nodes say of their devices becomes intervals, and intervals become answers: cut to the time asked for, and
honest about what nobody saw.

A device's last intervals (`Span`) change in two ways. A node says who holds the device from a moment on. Or its node
is lost sight of: from its last sign of life on nobody sees the device. What the node says later, of that very time, is
exact and wins: its agent went on watching while nobody listened. Only where one process of the agent ended and
another began does the gap stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..agents.protocol.wire import OccupancyKind
from .model import Interval


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of one device. ``start_id`` and ``report_no``: whose word it is, the newest that said so; without
    a ``start_id`` an unknown span is the scheduler's own, of a time that nobody saw."""

    started_at: float
    ended_at: float | None
    kind: OccupancyKind
    owner_id: str | None = None
    loan_id: str | None = None
    start_id: str = ""
    report_no: int = 0

    @property
    def is_unseen(self) -> bool:
        return self.kind is OccupancyKind.UNKNOWN and not self.start_id


def told(tail: Sequence[Span], said: Span, *, live: bool) -> list[Span]:
    """The last spans of a device (two are enough, oldest first) after its node said ``said``, which is open.

    ``live``: the process that said it is the one that is registered. The word of an earlier one, which comes late,
    says what was up to then and nothing of what came after it.
    """
    spans = list(tail)
    unseen = spans.pop() if spans and spans[-1].is_unseen else None
    if unseen is not None:
        before = spans[-1] if spans else None
        if before is not None and (_follows(before, said) or said.started_at <= unseen.started_at):
            spans[-1] = replace(before, ended_at=None)
        else:
            spans.append(unseen)
    if spans and _skips(spans[-1], said):
        spans = lost_sight(spans, spans[-1].started_at)
    spans = _with(spans, said)
    if unseen is not None and not live:
        spans = lost_sight(spans, unseen.started_at)
    return spans


def lost_sight(tail: Sequence[Span], at: float) -> list[Span]:
    """The last spans of a device whose node was last heard ``at``."""
    spans = list(tail)
    if not spans or spans[-1].is_unseen:
        return spans
    until = max(spans[-1].started_at, at)
    spans[-1] = replace(spans[-1], ended_at=until)
    return [*spans, Span(until, None, OccupancyKind.UNKNOWN)]


def _follows(before: Span, said: Span) -> bool:
    """By the same process, and nothing that it said in between is missing."""
    return bool(said.start_id) and (before.start_id, before.report_no + 1) == (said.start_id, said.report_no)


def _skips(before: Span, said: Span) -> bool:
    """By the same process, which has said something in between that never came: what was until then is not known."""
    return bool(said.start_id) and before.start_id == said.start_id and said.report_no > before.report_no + 1


def _with(spans: list[Span], said: Span) -> list[Span]:
    """The open span ends where the new one starts. A clock that went back cannot make one overlap another: the new
    one then starts where the open one did, in its place."""
    if not spans:
        return [said]
    last = spans[-1]
    if (last.kind, last.owner_id, last.loan_id, last.is_unseen) == (said.kind, said.owner_id, said.loan_id, False):
        return [*spans[:-1], replace(last, start_id=said.start_id, report_no=said.report_no)]
    if said.started_at <= last.started_at:
        return [*spans[:-1], replace(said, started_at=last.started_at)]
    return [*spans[:-1], replace(last, ended_at=said.started_at), said]


HEARD_SECONDS: Final = 45.0  # a node that lives is heard every 10 s; no leader may be there to call it silent


@dataclass(frozen=True, slots=True)
class Sight:
    """How far a device's node has been seen."""

    last_seen_at: float
    silent: bool

    def is_lost(self, now: float) -> bool:
        return self.silent or now - self.last_seen_at > HEARD_SECONDS


def cut(
    intervals: Iterable[Interval], sights: Mapping[str, Sight], since: float, until: float, now: float
) -> list[Interval]:
    """Intervals within [since, until), in the order given. One that goes on ends at ``now`` at the latest unless
    ``until`` is later, then it stays open; after a silent node's last sign of life the device is `unknown`."""
    answer: list[Interval] = []
    for interval in intervals:
        sight = sights.get(interval.device_id)
        if interval.ended_at is not None or sight is None or not sight.is_lost(now):
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
