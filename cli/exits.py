"""Exit codes, and which failure ends with which. Scripts depend on them: they are part of the interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NoReturn

import typer


class ExitCode(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    AUTHENTICATION = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNPLACEABLE = 6
    INFRASTRUCTURE = 75
    WAIT_TIMEOUT = 124
    CANCELLED = 130


SIGNAL_BASE = 128
# Job failures that are the machinery's, not the job's.
INFRASTRUCTURE_REASONS = frozenset({"runner_lost", "node_rebooted", "gpu_lost", "lost"})
UNPLACEABLE_CODES = frozenset({"unsatisfiable"})


class CliError(Exception):
    """Ends the command with one line on stderr and `code`."""

    def __init__(self, sentence: str, code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(sentence)
        self.code = code


def fail(sentence: str, code: ExitCode = ExitCode.ERROR) -> NoReturn:
    raise CliError(sentence, code)


def code_for_problem(status: int, code: str, *, waiting: bool = False) -> ExitCode:
    """The exit code for an answer of the API that is not a success."""
    if code in UNPLACEABLE_CODES:
        return ExitCode.UNPLACEABLE if waiting else ExitCode.ERROR
    match status:
        case 401 | 403:
            return ExitCode.AUTHENTICATION
        case 404:
            return ExitCode.NOT_FOUND
        case 409 | 412:
            return ExitCode.CONFLICT
        case _:
            return ExitCode.ERROR


def code_for_ended_job(state: str, exit_code: int | None, signal: int | None, failure_reason: str | None) -> int:
    """What `--wait`, `--follow` and `lull wait` end with: the job's own code where it has one."""
    if state == "succeeded":
        return ExitCode.OK
    if state == "cancelled":
        return ExitCode.CANCELLED
    if failure_reason in INFRASTRUCTURE_REASONS:
        return ExitCode.INFRASTRUCTURE
    if signal:
        return SIGNAL_BASE + signal
    if exit_code:
        return exit_code
    # Its own time limit ended it although it left no signal behind: as timeout(1) would have it.
    return ExitCode.WAIT_TIMEOUT if state == "timed_out" else ExitCode.ERROR


def own_exit_code(code: int) -> int:
    """`LULL_EXIT_ERROR` replaces every code of Lull's own, so that none can be mistaken for the job's."""
    wanted = os.environ.get("LULL_EXIT_ERROR", "")
    if not wanted:
        return code
    if not wanted.isdecimal() or not 1 <= int(wanted) <= 255:
        print(f"lull: LULL_EXIT_ERROR: {wanted!r} is no number from 1 to 255; ignored", file=sys.stderr)
        return code
    return int(wanted)


@contextmanager
def reported(*, waiting: bool = False) -> Generator[None]:
    """Turns what goes wrong inside into one line on stderr and the right exit code.

    With `waiting` the job's own code may come out of the same command, so Lull's codes can be moved out of its way.
    """
    from ..api.client import ClientError, ProblemError, ServerUnreachable, WaitTimeout

    try:
        yield
    except CliError as error:
        sentence, code = str(error), error.code
    except ProblemError as problem:
        sentence = problem_sentence(problem.detail, problem.code, problem.document)
        code = code_for_problem(problem.status, problem.code, waiting=waiting)
    except WaitTimeout as error:
        sentence, code = str(error), ExitCode.WAIT_TIMEOUT
    except ServerUnreachable as error:
        sentence = f"cannot reach the server at {error}.  Is it running?  Start one with: lull up"
        code = ExitCode.ERROR
    except ClientError as error:
        sentence, code = str(error), ExitCode.ERROR
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.CANCELLED) from None
    else:
        return
    print(f"lull: {sentence}", file=sys.stderr)
    raise typer.Exit(own_exit_code(code) if waiting else code)


def problem_sentence(detail: str, code: str, document: Mapping[str, Any]) -> str:
    """What the server said, with each refused field by name."""
    fields = [f"{error.get('field')}: {error.get('message')}" for error in document.get("errors", [])]
    text = "; ".join([detail, *(field for field in fields if field not in detail)])
    return f"{text} ({code})"
