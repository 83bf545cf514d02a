"""`lull events`: what happened, once or as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .context import Session, client_command
from .options import OutputFormat
from .output import Row, plain, text_of

if TYPE_CHECKING:
    from ..api.schemas import Event

PAGE_ROWS = 1000
# What an event may be about, the nearest first.
_ABOUT = ("job_id", "loan_id", "engine_id", "device_id", "attempt_id", "node_id")


@client_command
def events(
    session: Session,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as they happen.")] = False,
    since: Annotated[int, typer.Option("--since", min=0, metavar="SEQ", help="Only events after this one.")] = 0,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only this type; may be repeated.")] = None,
) -> None:
    """Print events; -f follows them. JSON is one event a line."""
    while True:
        page = session.client.events_page(since=since, types=types or (), limit=PAGE_ROWS)
        for event in page.items:
            _print(session, event)
        since = page.next_seq
        if len(page.items) < PAGE_ROWS:
            break
    if follow:
        for event in session.client.events(since=since, types=types or ()):
            _print(session, event)


def _print(session: Session, event: Event) -> None:
    match session.out.form:
        case OutputFormat.TABLE | OutputFormat.WIDE:
            session.out.print(event_line(plain(event), wide=session.out.form is OutputFormat.WIDE))
        case OutputFormat.NAME:
            session.out.print(str(event.seq))
        case OutputFormat.YAML:
            session.out.item([plain(event)], lambda _: [])
        case _:
            session.out.line(event)


def event_line(row: Row, *, wide: bool = False) -> str:
    """Time, what it is about, and the sentence; wide: with all ids."""
    words = [str(row["seq"]), str(row["at"]), text_of(row["type"])]
    if row.get("severity") not in (None, "info"):
        words.append(text_of(row["severity"]).upper())
    words.append(text_of(row["sentence"]))
    ids = {key: row[key] for key in _ABOUT if row.get(key)}
    if not wide:
        ids = dict(list(ids.items())[:1])
    return "  ".join([*words, text_of(ids)] if ids else words)
