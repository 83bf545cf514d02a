"""`lull engine plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from .context import Session, client_command
from .engine import EngineArgument, engine_names
from .exits import ExitCode, fail
from .options import OutputFormat
from .output import Output, Row, described, part_of, parts_of, text_of
from .plan_text import device_lines, way_text
from .quantities import format_size, parse_size


@client_command
def plan(
    session: Session,
    engine: EngineArgument,
    hbm: Annotated[str, typer.Option("--hbm", metavar="SIZE", help="What a job needs on each device, as 20GiB.")],
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="On so many devices. [default: all of the engine's]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, as -o json does.")] = False,
) -> None:
    """Show what a loan would release of an engine for a need: the cheapest tags that suffice, and what else there is.

    Nothing is done. Bytes and seconds are what parks were seen to do; see trial_park in the agent's file.
    """
    try:
        need_bytes = parse_size(hbm)
    except ValueError as error:
        fail(f"--hbm: {error}", ExitCode.USAGE)
    out = Output(OutputFormat.JSON) if as_json else session.out
    found = session.client.engine_plan(engine, need_bytes, gpus=gpus)
    out.item(found, lambda row: plan_lines(row, engine_names(session)), name="engine_id")


def plan_lines(row: Row, names: Mapping[str, str]) -> list[str]:
    chosen = part_of(row, "plan")
    lines = described(
        [
            ("engine", text_of(row["engine"])),
            ("need", f"{format_size(row['need_bytes'])} on {row['gpus']} device{'s' if row['gpus'] > 1 else ''}"),
            ("plan", way_text(chosen, names) if chosen else f"none: {text_of(row['nothing_suffices'])}"),
            ("not now", text_of(part_of(row, "not_now").get("sentence"))),
        ]
    )
    lines += device_lines(chosen) if chosen else []
    others = parts_of(row, "alternatives")
    if others:
        lines.append("not chosen:")
    for other in others:
        lines.append(f"  {way_text(other, names)}: {text_of(other['why_not'])}")
    return lines
