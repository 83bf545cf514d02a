"""`lull job …`: list, show, explain, cancel, hold, release, retry, resolve, wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from .choosing import SelectorOption, SortOption, ordered, selected
from .context import Session, client_command
from .exits import ExitCode, fail, reported
from .job_follow import wait_to_end
from .output import Column, Row, age, described, field, part_of, parts_of, plain, text_of
from .quantities import format_duration, format_size, parse_duration

if TYPE_CHECKING:
    from ..api.schemas import Job

LIST_ROWS_DEFAULT = 100


class Outcome(StrEnum):
    FAILED = "failed"
    REQUEUE = "requeue"


JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


def _memory(row: Row) -> str:
    return format_size(row["hbm_bytes"]) if row.get("hbm_bytes") else "whole"


def _why(row: Row) -> str:
    """The first reason of a waiting job, or how an ended one ended."""
    reasons = parts_of(row, "reasons")
    if reasons:
        return text_of(reasons[0].get("code"))
    return ended_how(row)


def ended_how(row: Row) -> str:
    if row.get("signal"):
        return f"signal {row['signal']}"
    if row.get("exit_code"):
        return f"exit {row['exit_code']}"
    return text_of(row.get("failure_reason"))


COLUMNS = (
    Column("JOB", field("id")),
    Column("NAME", field("name")),
    Column("STATE", field("state")),
    Column("GPUS", field("gpus")),
    Column("HBM", _memory),
    Column("PRIO", field("priority")),
    Column("AGE", lambda row: age(row.get("created_at"))),
    Column("WHY", _why),
    Column("PROJECT", field("project"), wide=True),
    Column("BY", field("submitted_by"), wide=True),
    Column("LOAN", field("loan_id"), wide=True),
    Column("COMMAND", lambda row: " ".join(text_of(word) for word in row.get("argv", [])), wide=True),
)


@client_command
def list_jobs(
    session: Session,
    state: Annotated[str | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Only jobs of this project.")] = None,
    selector: SelectorOption = None,
    sort_by: SortOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, newest first.")] = LIST_ROWS_DEFAULT,
) -> None:
    """List jobs, newest first."""
    jobs: Iterator[Job] = selected(session.client.all_jobs(state=state, project=project), selector)
    session.out.rows(ordered(itertools.islice(jobs, limit), sort_by), COLUMNS, name="id")


@client_command
def show(session: Session, job: JobArgument) -> None:
    """Show one job, its attempts and why it waits."""
    session.out.item(session.client.job(job), job_lines, name="id")


def job_lines(row: Row) -> list[str]:
    limit = row.get("time_limit_seconds")
    lines = described(
        [
            ("job", text_of(row["id"])),
            ("name", text_of(row.get("name"))),
            ("state", text_of(row["state"])),
            ("result", ended_how(row)),
            ("command", " ".join(text_of(word) for word in row["argv"])),
            ("directory", text_of(row.get("workdir"))),
            ("needs", f"{row['gpus']} device(s), {_memory(row)} of memory on each"),
            ("time limit", format_duration(limit) if limit else "-"),
            ("priority", text_of(row.get("priority"))),
            ("project", text_of(row.get("project"))),
            ("submitted", f"{age(row['created_at'])} ago by {text_of(row.get('submitted_by'))}"),
            ("started", _ago(row.get("started_at"))),
            ("ended", _ago(row.get("ended_at"))),
            ("loan", text_of(row.get("loan_id"))),
            ("clean-up", text_of(part_of(row, "cleanup_state").get("sentence"))),
            ("engine", text_of(row.get("engine_restore_state"))),
        ]
    )
    for attempt in parts_of(row, "attempts"):
        lines.append(f"attempt {attempt['no']}: {_attempt_words(attempt)}")
    return lines + reason_lines(row)


def _ago(stamp: str | None) -> str:
    return "-" if stamp is None else f"{age(stamp)} ago"


def _attempt_words(attempt: Row) -> str:
    words = [text_of(attempt["state"])]
    if attempt.get("end"):
        words.append(text_of(attempt["end"]))
    words += [how for how in (ended_how(attempt),) if how != "-"]
    words.append(f"on node {text_of(attempt['node_id'])}")
    for key in ("reason", "cleanup"):
        if attempt.get(key):
            words.append(text_of(part_of(attempt, key).get("sentence")))
    return ", ".join(words)


def reason_lines(row: Row) -> list[str]:
    lines: list[str] = []
    for reason in parts_of(row, "reasons"):
        since = f" (for {age(reason['since'])})" if reason.get("since") else ""
        again = f", looked at again in {age(reason['next_check'])}" if reason.get("next_check") else ""
        lines.append(f"waits: {text_of(reason['sentence'])} [{text_of(reason['code'])}]{since}{again}")
    return lines


@client_command
def explain(session: Session, job: JobArgument) -> None:
    """Say why a job waits."""
    found = session.client.job(job)
    if session.out.for_people:
        lines = reason_lines(plain(found)) or [f"job {found.id} is {found.state}: it does not wait"]
        for text in lines:
            session.out.print(text)
    else:
        session.out.item(
            {"id": found.id, "state": found.state, "reasons": plain(found.reasons)}, lambda _: [], name="id"
        )


JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids.")]


@client_command
def cancel(session: Session, jobs: JobsArgument) -> None:
    """Cancel jobs. A running one gets SIGTERM, and SIGKILL after its grace."""
    for job in jobs:
        _print_state(session, session.client.cancel(job))


@client_command
def hold(session: Session, jobs: JobsArgument) -> None:
    """Keep queued jobs from being started until they are released."""
    for job in jobs:
        _print_state(session, session.client.hold(job))


@client_command
def release(session: Session, jobs: JobsArgument) -> None:
    """Let held jobs be started."""
    for job in jobs:
        _print_state(session, session.client.release(job))


@client_command
def retry(
    session: Session,
    jobs: JobsArgument,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only the new ids.")] = False,
) -> None:
    """Submit anew what jobs asked for that have ended without success; their results stay.

    Asked again within a day, it names the job that was made so, as long as that has not ended.
    """
    for job in jobs:
        new = session.client.retry(job)
        if quiet:
            session.out.print(new.id)
        else:
            _print_state(session, new)


@client_command
def resolve(
    session: Session,
    job: JobArgument,
    outcome: Annotated[
        Outcome, typer.Option("--as", help="failed: the job has failed, it is lost. requeue: start it anew.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="It may then run twice at once: I know that it does not.")] = False,
) -> None:
    """Decide what became of a job whose node is silent or cannot say."""
    from ..api.client import ProblemError

    found = session.client.job(job)
    if not found.attempts:
        fail(f"job {found.id} is {found.state} and has no attempt to resolve", ExitCode.CONFLICT)
    attempt = found.attempts[-1]
    try:
        session.client.resolve(attempt.id, outcome.value, confirm=yes)
    except ProblemError as problem:
        # The server looks at the state first: only where a second one could run is there anything to be sure of.
        if all(error.get("field") != "confirm" for error in problem.document.get("errors", ())):
            raise
        fail(
            f"nobody knows whether attempt {attempt.no} of job {found.id} still runs on node {attempt.node_id},"
            " and the job would be started a second time; make sure that it does not run, then add --yes",
            ExitCode.USAGE,
        )
    _print_state(session, session.client.job(job))


def _print_state(session: Session, job: Job) -> None:
    if session.out.for_people:
        session.out.print(f"job {job.id}: {job.state}")
    else:
        session.out.item(job, lambda _: [], name="id")


@client_command
def wait(
    session: Session,
    job: JobArgument,
    timeout: Annotated[str | None, typer.Option("--timeout", metavar="DURATION", help="At most so long.")] = None,
) -> None:
    """Wait until a job has ended; the exit code is the job's own (124: still running)."""
    with reported(waiting=True):
        try:
            seconds = None if timeout is None else parse_duration(timeout)
        except ValueError as error:
            fail(f"--timeout: {error}", ExitCode.USAGE)
    wait_to_end(session, job, seconds)
