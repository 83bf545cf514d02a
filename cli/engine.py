"""`lull engine list`, `show` and `restart`."""

from __future__ import annotations

from typing import Annotated

import typer

from .choosing import SelectorOption, SortOption, ordered, selected
from .context import Session, client_command
from .output import Column, Row, age, described, field, part_of, parts_of, text_of
from .plan_text import learned_text
from .quantities import format_duration, format_size

EngineArgument = Annotated[str, typer.Argument(metavar="ENGINE", help="Its name or id.")]


def _bytes(row: Row) -> str:
    held = part_of(row, "device_bytes")
    return format_size(sum(held.values())) if held else "-"


COLUMNS = (
    Column("ENGINE", field("name")),
    Column("KIND", field("kind")),
    Column("STATE", field("state")),
    Column("GATE", field("gate")),
    Column("VERIFIED", field("verified")),
    Column("MEMORY", _bytes),
    Column("DEVICES", lambda row: str(len(row.get("device_ids") or []))),
    Column("MODELS", field("models")),
    Column("ID", field("id"), wide=True),
    Column("NODE", field("node_id"), wide=True),
    Column("LOAN", field("loan_id"), wide=True),
    Column("ENDPOINT", field("endpoint"), wide=True),
)


def engine_names(session: Session) -> dict[str, str]:
    """By id, for what names engines by their ids alone."""
    return {engine.id: engine.name for engine in session.client.engines()}


@client_command
def list_engines(session: Session, selector: SelectorOption = None, sort_by: SortOption = None) -> None:
    """List engines."""
    session.out.rows(ordered(selected(session.client.engines(), selector), sort_by), COLUMNS)


@client_command
def show(session: Session, engine: EngineArgument) -> None:
    """Show one engine."""
    session.out.item(session.client.engine(engine), engine_lines)


@client_command
def restart(session: Session, engine: EngineArgument) -> None:
    """Restart a supervised engine. Refused while its devices are lent or it is parked.

    Asked again before its node has answered, nothing more is done.
    """
    found = session.client.restart_engine(engine)
    if session.out.for_people:
        session.out.print(f"engine {found.name}: is to be restarted")
    else:
        session.out.item(found, lambda _: [])


def _plan(plan: Row) -> str:
    tags = ", ".join(f"{text_of(tag)} {'/'.join(modes)}" for tag, modes in part_of(plan, "modes").items())
    return f"{text_of(plan['name'])} ({tags})"


def _parked(row: Row) -> str:
    asleep = part_of(row, "parked")
    if not asleep:
        return ""
    most = asleep.get("at_most_seconds")
    until = f", at most {format_duration(most)} in all" if most else ""
    wakes = "the next request wakes it" if asleep["wake_on_request"] else "no request wakes it"
    return f"without a job for {age(asleep['since'])}, by {asleep['wanted_by']}{until}; {wakes}"


def _last_wake(row: Row) -> str:
    wake = part_of(row, "last_wake")
    if not wake:
        return ""
    waited = format_duration(wake["first_byte_seconds"])
    return f"{age(wake['at'])} ago, by a request that got its first byte after {waited}"


def engine_lines(row: Row) -> list[str]:
    version, in_force = row["policy_version"], row["policy_version_in_force"]
    able = part_of(row, "capabilities")
    return described(
        [
            ("engine", text_of(row["name"])),
            ("id", text_of(row["id"])),
            ("kind", f"{text_of(row['kind'])}, {'supervised' if row['supervised'] else 'attached'}"),
            ("models", text_of(row["models"])),
            ("state", text_of(row["state"])),
            ("gate", text_of(row["gate"])),
            ("verified", text_of(row["verified"])),
            ("why", text_of(part_of(row, "reason").get("sentence"))),
            ("memory", _bytes(row)),
            ("devices", text_of(row["device_ids"])),
            ("node", text_of(row["node_id"])),
            ("loan", text_of(row.get("loan_id"))),
            ("parked", _parked(row)),
            ("last wake", _last_wake(row)),
            ("endpoint", text_of(row.get("endpoint"))),
            ("version", text_of(able.get("version"))),
            ("parks by", "" if able.get("unsupported") else "; ".join(_plan(plan) for plan in parts_of(able, "plans"))),
            ("learned", "; ".join(learned_text(way) for way in parts_of(part_of(row, "learned"), "ways"))),
            ("cannot", text_of(able.get("unsupported"))),
            ("fragile", text_of(able.get("fragile"))),
            ("notes", text_of(able.get("notes"))),
            ("policy", f"version {version}" + ("" if version == in_force else f" ({in_force} is in force)")),
            ("policy refused", text_of(row.get("policy_refused"))),
        ]
    )
