"""`lull bench restart`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ..bench import restart
from ..vmm.errors import LullMemoryError
from .exits import ExitCode, fail, reported
from .options import OutputFormat
from .output import Column, Output
from .quantities import format_duration, parse_size


def bench_restart(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    weights: Annotated[str, typer.Option("--weights", metavar="SIZE", help="The engine's weights.")] = "1GiB",
) -> None:
    """How soon a killed engine is ready again: weights loaded anew, or found in a memory service."""
    with reported():
        try:
            weights_bytes = parse_size(weights)
        except ValueError as error:
            fail(str(error), ExitCode.USAGE)
        try:
            document = restart.run(weights_bytes, lambda sentence: print(sentence, file=sys.stderr, flush=True))
        except (LullMemoryError, restart.EngineNotStarted, OSError) as error:
            fail(f"bench restart: {error}")
        if as_json:
            print(json.dumps(document, indent=2), flush=True)
            return
        columns = [
            Column("START", lambda row: str(row["start"])),
            Column("WEIGHTS", lambda row: str(row["weights"])),
            Column("WEIGHTS AFTER", lambda row: format_duration(row["weights_seconds"])),
            Column("READY AFTER", lambda row: format_duration(row["ready_seconds"])),
        ]
        Output(OutputFormat.TABLE).table(document["starts"], columns)
