from __future__ import annotations

import pytest
import typer

from lull.api.client import ProblemError, ServerUnreachable
from lull.cli.exits import CliError, ExitCode, code_for_ended_job, code_for_problem, reported


@pytest.mark.parametrize(
    ("state", "exit_code", "signal", "reason", "code"),
    [
        ("succeeded", 0, None, None, 0),
        ("failed", 3, None, "exit_code", 3),
        ("failed", None, 9, "signal", 137),
        ("failed", None, None, "runner_lost", 75),
        ("failed", None, None, "node_rebooted", 75),
        ("failed", None, None, "spawn_failed", 1),
        ("cancelled", None, 15, None, 130),
        ("timed_out", None, 15, None, 143),
        ("timed_out", None, None, None, 124),
    ],
)
def test_an_ended_jobs_code(
    state: str, exit_code: int | None, signal: int | None, reason: str | None, code: int
) -> None:
    assert code_for_ended_job(state, exit_code, signal, reason) == code


@pytest.mark.parametrize(
    ("status", "code", "waiting", "exit_code"),
    [
        (401, "unauthorized", False, 3),
        (403, "forbidden", False, 3),
        (404, "not_found", False, 4),
        (409, "conflict", False, 5),
        (412, "version_conflict", False, 5),
        (422, "invalid", False, 1),
        (422, "unsatisfiable", False, 1),
        (422, "unsatisfiable", True, 6),
        (500, "internal", False, 1),
    ],
)
def test_a_problems_code(status: int, code: str, waiting: bool, exit_code: int) -> None:
    assert code_for_problem(status, code, waiting=waiting) == exit_code


def ended_with(error: BaseException, *, waiting: bool = False) -> int:
    with pytest.raises(typer.Exit) as ended, reported(waiting=waiting):
        raise error
    return ended.value.exit_code


def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_with(CliError("--hbm: wrong", ExitCode.USAGE)) == 2
    assert capsys.readouterr().err == "lull: --hbm: wrong\n"


def test_a_problem_names_the_refused_fields(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"errors": [{"field": "gpus", "message": "at least 1"}]}
    assert ended_with(ProblemError(422, "invalid", "the job was refused", document)) == 1
    assert capsys.readouterr().err == "lull: the job was refused; gpus: at least 1 (invalid)\n"


def test_an_absent_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_with(ServerUnreachable("http://127.0.0.1:1: refused")) == 1
    assert "lull up" in capsys.readouterr().err


def test_an_interrupt_is_130() -> None:
    assert ended_with(KeyboardInterrupt()) == 130


def test_lulls_own_codes_can_be_moved_out_of_the_jobs_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LULL_EXIT_ERROR", "99")
    assert ended_with(ServerUnreachable("x"), waiting=True) == 99
    assert ended_with(ServerUnreachable("x")) == 1
    monkeypatch.setenv("LULL_EXIT_ERROR", "0")
    assert ended_with(ServerUnreachable("x"), waiting=True) == 1
    assert "LULL_EXIT_ERROR" in capsys.readouterr().err
