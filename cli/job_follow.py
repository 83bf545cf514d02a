"""Waiting for a job and printing its output: what `submit --wait`, `submit --follow`, `wait` and `logs` share."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Literal, NoReturn, TextIO

import typer

from .context import Session, token_of
from .exits import code_for_ended_job, reported
from .terminal import EscapeFilter

if TYPE_CHECKING:
    from ..api.client import Client
    from ..api.schemas import Job

Stream = Literal["stdout", "stderr"]
ENDED = frozenset({"succeeded", "failed", "cancelled", "timed_out"})

_NEXT_ATTEMPT_LOOK_SECONDS = 1.0


def exit_as(job: Job) -> NoReturn:
    """End this command as the job ended."""
    code = code_for_ended_job(job.state, job.exit_code, job.signal, job.failure_reason)
    if code:
        reason = f" ({job.failure_reason})" if job.failure_reason else ""
        print(f"lull: job {job.id} {job.state}{reason}", file=sys.stderr)
    raise typer.Exit(code)


def wait_to_end(session: Session, job_id: str, timeout_seconds: float | None) -> NoReturn:
    with reported(waiting=True):
        job = session.client.wait(job_id, timeout_seconds)
    exit_as(job)


def follow_to_end(session: Session, job_id: str) -> NoReturn:
    """Both streams as they come, over every attempt, then the job's own exit code."""
    with reported(waiting=True):
        while True:
            _print_both_streams(session, job_id)
            job = session.client.job(job_id)
            while job.state not in ENDED and not _has_newer_attempt(session.client, job):
                job = _look_again(session.client, job_id)
            if job.state in ENDED:
                break
    exit_as(job)


def _has_newer_attempt(client: Client, seen: Job) -> bool:
    return client.job(seen.id).attempt_no > seen.attempt_no


def _look_again(client: Client, job_id: str) -> Job:
    """The job after a moment, or as soon as it has ended."""
    from ..api.client import WaitTimeout

    try:
        return client.wait(job_id, _NEXT_ATTEMPT_LOOK_SECONDS)
    except WaitTimeout as still:
        return still.job


def _print_both_streams(session: Session, job_id: str) -> None:
    """Until the attempt's end. Each stream has a connection of its own: a client is not shared between threads."""
    from ..api.client import Client, ClientError

    failed: list[ClientError] = []

    def print_errors() -> None:
        try:
            with Client(session.target.server, token_of(session.target)) as other:
                print_log(other, job_id, "stderr", follow=True)
        except ClientError as error:
            failed.append(error)

    thread = threading.Thread(target=print_errors, name="stderr", daemon=True)
    thread.start()
    print_log(session.client, job_id, "stdout", follow=True)
    thread.join()
    if failed:
        raise failed[0]


def print_log(
    client: Client,
    job_id: str,
    stream: Stream,
    *,
    follow: bool,
    attempt: int | None = None,
    offset: int = 0,
    raw: bool = False,
    to: TextIO | None = None,
) -> None:
    """A stream of a job on ours: stdout on stdout, stderr on stderr, or `to`; `raw` leaves the bytes as they are."""
    target = to or (sys.stdout if stream == "stdout" else sys.stderr)
    escapes = EscapeFilter()
    for chunk in client.logs(job_id, stream=stream, offset=offset, follow=follow, attempt=attempt):
        if raw:
            target.buffer.write(chunk)
            target.buffer.flush()
        else:
            target.write(escapes.feed(chunk))
            target.flush()
    target.write(escapes.finish())
    target.flush()
