"""`lull loan list`, `show`, `recall` and `give-up`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from .choosing import SelectorOption, SortOption, ordered, selected
from .context import Session, client_command
from .engine import engine_names
from .output import Column, Row, age, described, field, part_of, parts_of, text_of
from .plan_text import loan_plan_lines
from .quantities import format_duration, format_size

LIST_ROWS_DEFAULT = 50
COLUMNS = (
    Column("LOAN", field("id")),
    Column("STATE", field("state")),
    Column("DEVICES", lambda row: str(len(row["device_ids"]))),
    Column("ENGINES", lambda row: str(len(row["engine_ids"]))),
    Column("ATTEMPTS", lambda row: str(len(row.get("attempt_ids") or []))),
    Column("NEED", lambda row: format_size(row["need_bytes"])),
    Column("OPENED", lambda row: age(row["opened_at"])),
    Column("CLOSED", lambda row: age(row.get("closed_at"))),
    Column("WHY", lambda row: text_of(part_of(row, "reason").get("code"))),
    Column("NODE", field("node_id"), wide=True),
)


@client_command
def list_loans(
    session: Session,
    open_only: Annotated[bool, typer.Option("--open", help="Only loans that are not closed.")] = False,
    selector: SelectorOption = None,
    sort_by: SortOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many.")] = LIST_ROWS_DEFAULT,
) -> None:
    """List loans, newest first."""
    newest = session.client.loans(open_only=open_only, limit=limit).items
    session.out.rows(ordered(selected(newest, selector), sort_by), COLUMNS, name="id")


LoanArgument = Annotated[str, typer.Argument(metavar="LOAN", help="Its id.")]


@client_command
def show(session: Session, loan: LoanArgument) -> None:
    """Show one loan, step by step."""
    session.out.item(session.client.loan(loan), lambda row: loan_lines(row, engine_names(session)), name="id")


@client_command
def recall(session: Session, loan: LoanArgument) -> None:
    """End a loan early: its jobs are preempted and queued again, its engines are woken.

    Where nothing else takes its place, a job that was preempted so may get the same devices again: hold or cancel it
    first if the engine is to stay awake.
    """
    found = session.client.recall_loan(loan)
    if session.out.for_people:
        session.out.print(f"loan {found.id}: {found.state}, is to end")
    else:
        session.out.item(found, lambda _: [], name="id")


@client_command
def give_up(session: Session, loan: LoanArgument) -> None:
    """Close a faulted loan as it is: its engines' gates stay closed until they are restarted by hand."""
    found = session.client.give_up_loan(loan)
    if session.out.for_people:
        state = "given up" if found.state == "closed" else f"{found.state}, is to be given up"
        session.out.print(f"loan {found.id}: {state}")
    else:
        session.out.item(found, lambda _: [], name="id")


def loan_lines(row: Row, names: Mapping[str, str]) -> list[str]:
    lines = described(
        [
            ("loan", text_of(row["id"])),
            ("state", text_of(row["state"]) + (" (its engine is lost)" if row["engine_lost"] else "")),
            ("why", text_of(part_of(row, "reason").get("sentence"))),
            ("node", text_of(row["node_id"])),
            ("devices", text_of(row["device_ids"])),
            ("engines", text_of([names.get(each, each) for each in row["engine_ids"]])),
            ("attempts", text_of(row.get("attempt_ids"))),
            ("need", f"{format_size(row['need_bytes'])} on each device"),
            ("opened", f"{age(row['opened_at'])} ago"),
            ("closed", f"{age(row['closed_at'])} ago" if row.get("closed_at") else "-"),
            ("sleeps", _sleep(row)),
            ("first byte", _first_byte(row)),
            ("at most", format_duration(row["restore_by_seconds"]) if row.get("restore_by_seconds") else "-"),
        ]
    )
    return lines + loan_plan_lines(row, names) + step_lines(parts_of(row, "steps"))


def _sleep(row: Row) -> str:
    """Why there is no job in it."""
    wish = part_of(row, "without_job")
    if not wish:
        return ""
    until = wish.get("until_seconds")
    most = f", for {format_duration(until)}" if until else ""
    return f"without a job, by {wish['wanted_by']}{most}" + ("" if wish["wake_on_request"] else ", no request wakes it")


def _first_byte(row: Row) -> str:
    seconds = row.get("first_byte_seconds")
    return "" if seconds is None else f"{format_duration(seconds)} after the request came that woke it"


def step_lines(steps: Sequence[Row]) -> list[str]:
    """Each step with the time since the loan's first one and since the step before."""
    lines: list[str] = []
    first = before = steps[0]["monotonic_seconds"] if steps else 0.0
    for step in steps:
        now = step["monotonic_seconds"]
        took = format_duration(max(0.0, now - before))
        lines.append(f"  {now - first:9.3f}s  +{took:<7} {text_of(step['step'])}")
        before = now
    return lines
