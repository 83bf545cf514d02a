"""`lull engine park` and `resume`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from .context import Session, client_command
from .engine import EngineArgument
from .exits import ExitCode, fail
from .output import Row, described, part_of, text_of
from .quantities import parse_duration

if TYPE_CHECKING:
    from ..api.schemas import Operation

_POLL_SECONDS = 20.0

WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until it is done; exit code 1 if it fails.")]
TimeoutOption = Annotated[
    str | None, typer.Option("--timeout", metavar="TIME", help="With --wait: exit with 124 after this long.")
]


@client_command
def park(
    session: Session,
    engine: EngineArgument,
    for_: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="Wake it after this long, for example 2h. Never past its policy."),
    ] = None,
    no_wake_on_request: Annotated[
        bool,
        typer.Option("--no-wake-on-request", help="Requests wait or are refused, by its policy, until it is woken."),
    ] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Park an engine without a job: its memory is free until somebody wants it.

    The next request is held at the gate, wakes the engine and is answered. So do the end of --for, of the policy's
    park_seconds_max, and `lull engine resume`. Asked again with the same terms, nothing more is done.
    """
    seconds = None if for_ is None else _duration(for_, "--for")
    wait_seconds = _wait_seconds(wait, timeout)
    operation = session.client.park_engine(engine, for_seconds=seconds, wake_on_request=not no_wake_on_request)
    _tell(session, engine, operation, wait, wait_seconds, "is parked")


@client_command
def resume(session: Session, engine: EngineArgument, wait: WaitOption = False, timeout: TimeoutOption = None) -> None:
    """Wake an engine that is parked without a job. Refused while a job holds its devices: recall that loan."""
    wait_seconds = _wait_seconds(wait, timeout)
    _tell(session, engine, session.client.resume_engine(engine), wait, wait_seconds, "serves again")


def _wait_seconds(wait: bool, timeout: str | None) -> float | None:
    """Asked before anything is ordered: wrong usage does nothing."""
    if timeout is not None and not wait:
        fail("--timeout: only with --wait", ExitCode.USAGE)
    return None if timeout is None else _duration(timeout, "--timeout")


def _tell(session: Session, engine: str, operation: Operation, wait: bool, seconds: float | None, done: str) -> None:
    if wait:
        operation = _wait(session, operation, seconds)
    if not session.out.for_people:
        session.out.item(operation, operation_lines, name="id")
    elif operation.state != "failed":
        session.out.print(f"engine {engine}: {done if operation.state == 'succeeded' else operation.kind + ' ordered'}")
    if operation.state == "failed":
        why = operation.reason.sentence if operation.reason else f"its loan is {operation.loan_state}"
        fail(f"engine {engine}: {operation.kind} failed: {why}; see: lull loan show {operation.loan_id}")


def _wait(session: Session, operation: Operation, seconds: float | None) -> Operation:
    deadline = None if seconds is None else time.monotonic() + seconds
    told = False
    while operation.state == "running":
        left = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, deadline - time.monotonic())
        if left <= 0:
            fail(f"{operation.kind} is still running, its loan is {operation.loan_state}", ExitCode.WAIT_TIMEOUT)
        operation = session.client.operation(operation.id, wait_seconds=left)
        if operation.reason is not None and operation.state == "running" and not told:
            told = True
            print(f"lull: still waiting: {operation.reason.sentence}", file=sys.stderr)
    return operation


def _duration(text: str, option: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        fail(f"{option}: {error}", ExitCode.USAGE)


def operation_lines(row: Row) -> list[str]:
    return described(
        [
            ("operation", text_of(row["id"])),
            ("kind", text_of(row["kind"])),
            ("state", text_of(row["state"])),
            ("why", text_of(part_of(row, "reason").get("sentence"))),
            ("loan", text_of(row["loan_id"])),
        ]
    )
