"""`lull logs`: a job's output, once or as it comes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .context import Session, client_command
from .exits import ExitCode, fail
from .job_follow import Stream, print_log


@client_command
def logs(
    session: Session,
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    stderr: Annotated[
        bool, typer.Option("--stderr", help="Its standard error instead of its standard output.")
    ] = False,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Begin at this byte of the stream.")] = 0,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt; default: the newest.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Leave terminal escapes in, if the output is a terminal.")] = False,
) -> None:
    """Print a job's output. Escape sequences are taken out, but with --raw on a terminal."""
    stream: Stream = "stderr" if stderr else "stdout"
    if raw and not sys.stdout.isatty():
        fail("--raw: the output is no terminal; leave it out", ExitCode.USAGE)
    # A job's stderr comes on our stdout here, so that it can be piped.
    print_log(session.client, job, stream, follow=follow, attempt=attempt, offset=offset, raw=raw, to=sys.stdout)
