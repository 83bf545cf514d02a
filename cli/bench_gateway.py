"""`lull bench gateway`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from ..bench import gateway
from ..bench.gateway_peers import PEERS, NotRun
from .exits import ExitCode, fail, reported
from .options import OutputFormat
from .output import Column, Output, Row
from .quantities import format_size


def bench_gateway(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=0.2, max=60, help="For one measurement.")] = 2.0,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, max=100, help="Medians count.")] = 3,
    columns: Annotated[list[str] | None, typer.Option("--column", help=f"Of {', '.join(PEERS)}; may repeat.")] = None,
) -> None:
    """The gateway beside a direct connection, a bare proxy on its library, HAProxy, nginx and LiteLLM, in one run.

    What is not installed is left out. Exits with 1 if a target is missed; only a machine that does nothing else tells.
    """
    with reported():
        unknown = sorted(set(columns or ()) - set(PEERS))
        if unknown:
            fail(f"--column: {unknown[0]!r} is not one of {', '.join(PEERS)}", ExitCode.USAGE)
        try:
            document = gateway.run(seconds, repetitions, columns, _say)
        except (NotRun, OSError) as error:
            fail(f"bench gateway: {error}")
        if as_json:
            print(json.dumps(document, indent=2), flush=True)
        else:
            _print(document)
        if not document["targets_met"]:
            raise typer.Exit(ExitCode.ERROR)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _number(row: Row, key: str, scale: float, digits: int) -> str:
    value = row.get(key)
    return "" if value is None else f"{value * scale:,.{digits}f}"


def _print(document: dict[str, Any]) -> None:
    rows = [{"name": name, **column} for name, column in document["columns"].items() if "not_run" not in column]
    Output(OutputFormat.TABLE).table(
        rows,
        [
            Column("PROXY", lambda row: str(row["name"])),
            Column("REQUESTS/S", lambda row: _number(row, "requests_per_second", 1, 0)),
            Column("CPU US", lambda row: _number(row, "cpu_seconds_per_request", 1e6, 1)),
            Column("ADDED P50 MS", lambda row: _number(row, "added_p50_seconds_at_200_per_second", 1e3, 2)),
            Column("CHUNKS/S", lambda row: _number(row, "chunks_per_second", 1, 0)),
            Column("ADDED FIRST MS", lambda row: _number(row, "added_first_chunk_p50_seconds", 1e3, 2)),
            Column("P99 MS", lambda row: _number(row, "added_first_chunk_p99_seconds", 1e3, 2)),
            Column("MEMORY", lambda row: "" if row["resident_bytes"] is None else format_size(row["resident_bytes"])),
        ],
    )
    for name, column in document["columns"].items():
        if "not_run" in column:
            print(f"{name}: not run, {column['not_run']}")
        elif column["errors"]:
            print(f"{name}: errors {column['errors']} {column['said'][:200]!r}")
    if not document["proxy_has_a_core_of_its_own"]:
        print("one CPU: the proxy shared it with clients and back end")
    print(f"load average {', '.join(f'{value:.2f}' for value in document['load_average'])}")
    for check in document["targets"]:
        bound = f"at least {check['at_least']:g}" if "at_least" in check else f"at most {check['at_most']:g}"
        print(f"{'met' if check['met'] else 'MISSED'}: {check['name']}: {check['value']:.3g}, {bound}")
