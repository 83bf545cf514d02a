"""`lull node list` and `show`."""

from __future__ import annotations

from typing import Annotated

import typer

from .choosing import SelectorOption, SortOption, ordered, selected
from .context import Session, client_command
from .output import Column, Row, age, described, field, part_of, parts_of, text_of
from .quantities import format_size

COLUMNS = (
    Column("NODE", field("name")),
    Column("STATE", field("state")),
    Column("DEVICES", lambda row: str(len(row.get("devices") or []))),
    Column("FREE", lambda row: _sum(row, "free_bytes")),
    Column("CAPACITY", lambda row: _sum(row, "capacity_bytes")),
    Column("ENGINES", lambda row: str(len(row.get("engine_ids") or []))),
    Column("SEEN", lambda row: age(row.get("last_seen_at"))),
    Column("ID", field("id"), wide=True),
    Column("VERSION", field("version"), wide=True),
)
DEVICE_COLUMNS = (
    Column("DEVICE", field("id")),
    Column("KIND", field("kind")),
    Column("CAPACITY", lambda row: format_size(row["capacity_bytes"])),
    Column("FREE", lambda row: format_size(row["free_bytes"])),
    Column("IN USE FOR", field("occupancy")),
    Column("LOAN", field("loan_id")),
    Column("QUARANTINED", lambda row: text_of(part_of(row, "quarantined").get("sentence"))),
)


def _sum(row: Row, key: str) -> str:
    return format_size(sum(device[key] for device in parts_of(row, "devices")))


@client_command
def list_nodes(session: Session, selector: SelectorOption = None, sort_by: SortOption = None) -> None:
    """List nodes."""
    session.out.rows(ordered(selected(session.client.nodes(), selector), sort_by), COLUMNS)


@client_command
def show(session: Session, node: Annotated[str, typer.Argument(metavar="NODE", help="Its name or id.")]) -> None:
    """Show one node and its devices."""
    found = session.client.node(node)
    session.out.item(found, node_lines)
    if session.out.for_people and found.devices:
        session.out.print("")
        session.out.rows(found.devices, DEVICE_COLUMNS, name="id")


def node_lines(row: Row) -> list[str]:
    return described(
        [
            ("node", text_of(row["name"])),
            ("id", text_of(row["id"])),
            ("state", text_of(row["state"])),
            ("version", text_of(row.get("version"))),
            ("seen", f"{age(row['last_seen_at'])} ago" if row.get("last_seen_at") else "-"),
            ("engines", str(len(row.get("engine_ids") or []))),
        ]
    )
