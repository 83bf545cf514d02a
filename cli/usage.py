"""`lull usage`: who held each device, interval by interval."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from .context import Session, client_command
from .exits import ExitCode, fail
from .output import Column, Row, age, field, parse_time
from .quantities import format_duration, parse_duration


def _length(row: Row) -> str:
    until = parse_time(row["ended_at"]) if row.get("ended_at") else datetime.now(UTC)
    return format_duration(max(0.0, (until - parse_time(row["started_at"])).total_seconds()))


COLUMNS = (
    Column("DEVICE", field("device_id")),
    Column("FOR", field("kind")),
    Column("LENGTH", _length),
    Column("BEGAN", lambda row: age(row["started_at"])),
    Column("OWNER", field("owner_id")),
    Column("LOAN", field("loan_id"), wide=True),
)


@client_command
def usage(
    session: Session,
    since: Annotated[str | None, typer.Option("--since", help="A duration back (2h), or an ISO 8601 time.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="The same; default: now.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Only this device.")] = None,
) -> None:
    """Who held each device, interval by interval."""
    found = session.client.usage(since=_time("--since", since), until=_time("--until", until), device=device)
    if session.out.for_people:
        session.out.rows(found.items, COLUMNS, name="device_id")
    else:
        session.out.item(found, lambda _: [], name="since")


def _time(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text))
    except ValueError:
        pass
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError:
        fail(f"{option}: {text!r} is neither a duration (2h) nor an ISO 8601 time", ExitCode.USAGE)
    return stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
