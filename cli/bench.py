"""`lull bench …`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..api.client import ClientError
from ..bench import loan
from ..bench.box import BoxError
from ..bench.loan_parts import MissingStamp
from .exits import ExitCode, fail, reported
from .options import OutputFormat
from .output import Column, Output, Row
from .quantities import format_duration, parse_duration, parse_size


def bench_loan(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    loans: Annotated[int, typer.Option("--loans", min=1, max=10_000, help="How many loans.")] = 20,
    weights: Annotated[str, typer.Option("--weights", metavar="SIZE", help="The engine's weights.")] = "1GiB",
    timeout: Annotated[str, typer.Option("--timeout", metavar="DURATION", help="At most so long.")] = "20m",
) -> None:
    """How much of a loan is Lull's own time: without the copies, the settle samples, the job and the canaries.

    Lends an idle engine of this machine again and again and takes the differences of its journal's stamps.
    """
    with reported():
        try:
            weights_bytes, seconds = parse_size(weights), parse_duration(timeout)
        except ValueError as error:
            fail(str(error), ExitCode.USAGE)
        trouble: list[str] = []
        before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        try:
            document = loan.run(loans, weights_bytes, seconds, _say, trouble.append)
        except (BoxError, ClientError, MissingStamp) as error:
            fail(f"bench loan: {error}")
        finally:
            signal.signal(signal.SIGTERM, before)
            for sentence in trouble:
                _say(sentence)
        _print(document, as_json)
        if trouble:
            raise typer.Exit(ExitCode.ERROR)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _duration_in(key: str) -> Callable[[Row], str]:
    return lambda row: format_duration(row[key])


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, indent=2), flush=True)
        return
    columns = [
        Column("PART", lambda row: str(row["name"])),
        Column("COUNTED AS", lambda row: str(row["counted_as"])),
        *(Column(key.upper(), _duration_in(key)) for key in ("p50", "p95", "max")),
    ]
    Output(OutputFormat.TABLE).table(document["parts_seconds"], columns)
    own = document["own_seconds"]
    verdict = "within" if document["within_target"] else "ABOVE"
    print(
        f"Lull's own: p50 {format_duration(own['p50'])}, p95 {format_duration(own['p95'])}"
        f" over {document['loans']} loans, {verdict} the target of {format_duration(document['target_seconds'])}"
    )
