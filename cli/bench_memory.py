"""`lull bench memory`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..bench import memory
from ..vmm.errors import LullMemoryError
from .exits import ExitCode, fail, reported
from .options import OutputFormat
from .output import Column, Output, Row
from .quantities import format_duration, format_size, parse_size

_PARTS = ("first_park", "second_park", "resume")


def bench_memory(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the tables.")] = False,
    sizes: Annotated[list[str] | None, typer.Option("--size", help="How much to park; may be repeated.")] = None,
    attach: Annotated[str, typer.Option("--attach-size", metavar="SIZE", help="Weights to attach to.")] = "4GiB",
    threads: Annotated[list[int] | None, typer.Option("--threads", min=1, max=64, help="May be repeated.")] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", min=1, max=1000, help="Of each case.")] = 3,
) -> None:
    """Park and wake of host-device memory, beside plain copies and page faults of the same bytes on this machine.

    Exits with 1 if a target is missed. Times are judged from 1 GiB and 3 repetitions on, on a machine that does nothing
    else meanwhile; smaller runs only show them.
    """
    with reported():
        try:
            sizes_bytes = [parse_size(size) for size in sizes or ["2GiB"]]
            attach_bytes = parse_size(attach)
        except ValueError as error:
            fail(str(error), ExitCode.USAGE)
        try:
            document = memory.run(sizes_bytes, attach_bytes, repetitions, threads or [1, 2], _say)
        except (LullMemoryError, OSError) as error:
            fail(f"bench memory: {error}")
        if as_json:
            print(json.dumps(document, indent=2), flush=True)
        else:
            _print(document)
        if not document["targets_met"]:
            raise typer.Exit(ExitCode.ERROR)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _print(document: dict[str, Any]) -> None:
    rows = [
        {"case": case, "mode": mode, "seconds": seconds, "ratios": case["ratios"][mode]}
        for case in document["cases"]
        for mode, seconds in case["lull_seconds"].items()
    ]
    Output(OutputFormat.TABLE).table(
        rows,
        [
            Column("SIZE", lambda row: format_size(row["case"]["size_bytes"])),
            Column("PAGES", _pages),
            Column("THREADS", lambda row: str(row["case"]["threads"])),
            Column("MODE", lambda row: str(row["mode"])),
            *(Column(part.upper().replace("_", " "), _part_in(part)) for part in _PARTS),
        ],
    )
    attach = document["attach"]
    if "not_run" in attach:
        print(f"attach: not run, {attach['not_run']}")
    else:
        print(
            f"attach to {format_size(attach['size_bytes'])} of committed weights: "
            f"{format_duration(attach['attach_seconds'])}, read once after "
            f"{format_duration(attach['attach_and_read_once_seconds'])}; loaded from the page cache and read once: "
            f"{format_duration(attach['load_and_read_once_seconds'])}"
        )
    many = document["allocations"]
    print(
        f"{many['count']} small allocations: {format_duration(many['seconds'])}, "
        f"{format_duration(many['cpu_seconds'])} of processors, {many['written_bytes_each']:.0f} bytes written each"
    )
    for name, peer in document["peers"].items():
        print(f"{name}: {peer.get('seconds') or 'not run, ' + peer['not_run']}")
    checks = [check for case in [*document["cases"], attach] for check in case.get("targets", ())]
    missed = [check for check in checks if not check["met"]]
    print(f"{len(checks) - len(missed)} of {len(checks)} targets met")
    for check in missed:
        word = "MISSED" if check["judged"] else "missed, not judged"
        bound = f"at least {check['at_least']}" if "at_least" in check else f"at most {check['at_most']}"
        print(f"{word}: {check['name']}: {check['value']:.3g}, {bound}")


def _pages(row: Row) -> str:
    case = row["case"]
    granted = case["huge_pages_granted_bytes"] == case["size_bytes"]
    return f"{case['pages']}{'' if granted == (case['pages'] == 'huge') else ', not granted'}"


def _part_in(part: str) -> Callable[[Row], str]:
    """Seconds, and how they compare with the floor: above 1 is quicker than the machine's plain way."""
    return lambda row: f"{format_duration(row['seconds'][part])} ({row['ratios'][part]:.2f})"
