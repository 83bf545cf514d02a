"""`lull doctor`: looks at this node and says what is wrong and how it is mended. Changes nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .context import output_format
from .exits import ExitCode, reported
from .options import GlobalOptions, OutputFormat, OutputOption, global_options
from .output import Column, Output, field

if TYPE_CHECKING:
    from ..agents.doctor.examine import Examined

_MARKS: Final = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "not_applicable": "-"}
_COLUMNS: Final = [Column(title, field(title.lower())) for title in ("STATUS", "GROUP", "CHECK", "SUBJECT", "SEEN")]


def doctor(
    context: typer.Context,
    config: Annotated[Path, typer.Option(metavar="FILE", help="The agent's TOML file.")] = Path("/etc/lull/agent.toml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, as -o json does.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as failures in the exit code.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also show what does not apply here.")] = False,
    public_url: Annotated[
        list[str] | None,
        typer.Option("--public-url", metavar="URL", help="Where clients reach your engines; may be given again."),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Look at this node: configuration, disk, memory, server, gateway, engines, GPUs. Changes nothing.

    Works without an agent and without a GPU. Exit code 1 if a check failed, else 0.
    """
    # Here, so that `lull --help` is quick and works without the [agent] extra.
    from ..agents.doctor.checks import CHECKS
    from ..agents.doctor.examine import examine
    from .up_given import filled_in

    with reported():
        given = global_options(context).under(GlobalOptions(output=output))
        form = OutputFormat.JSON if as_json else output_format(given, os.environ)
    found = examine(config, CHECKS, public_url or (), filled_in(config))
    _tell(Output(form), config, found, show_all)
    code = _exit_code(found, strict=strict)
    if found.hanging:
        # A thread that hangs in the kernel would keep the interpreter from its end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def _exit_code(found: Examined, *, strict: bool) -> ExitCode:
    bad = {"failed", "warning"} if strict else {"failed"}
    return ExitCode.ERROR if found.status in bad else ExitCode.OK


def _tell(out: Output, config: Path, found: Examined, show_all: bool) -> None:
    rows = [
        {
            "check": one.check,
            "group": one.group,
            "status": str(one.status),
            "subject": one.subject,
            "seen": one.seen,
            "way_out": one.way_out,
        }
        for one in found.told
    ]
    if out.form in (OutputFormat.JSON, OutputFormat.YAML):
        out.item({"status": str(found.status), "config": str(config), "checks": rows}, lambda row: [])
        return
    if not out.for_people:
        out.rows(rows, _COLUMNS, name="check")
        return
    for row in rows:
        if row["status"] == "not_applicable" and not (show_all or out.form is OutputFormat.WIDE):
            continue
        subject = f" {row['subject']}" if row["subject"] else ""
        out.print(f"{_MARKS[row['status']]:<8} {row['check']}{subject}: {row['seen']}")
        if row["way_out"]:
            out.print(f"{'':<8} -> {row['way_out']}")
    counts = [f"{sum(row['status'] == status for row in rows)} {status}" for status in ("failed", "warning", "ok")]
    out.print("\n" + ", ".join(counts))
