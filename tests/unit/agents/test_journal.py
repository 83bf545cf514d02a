"""What was written is there for the next agent, and the scheduler hears of it in order."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from lull.agents.errors import JournalCorrupt, JournalTooNew, JournalUnavailable
from lull.agents.journal import Journal
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptChanged, AttemptEnd, AttemptSpec, AttemptState, OpenLoan, Reason

SPEC = AttemptSpec(attempt_id="a1", job_id="j1", attempt_no=1, argv=["true"], device_ids=["d"], hbm_bytes=1)
ORDER = OpenLoan(
    loan_id="l1",
    epoch=3,
    device_ids=["d"],
    engine_ids=["e"],
    need_bytes=1,
    restore_by_seconds=60,
    policies={"e": EnginePolicy()},
    attempts=[SPEC],
)
ENDED = AttemptChanged(
    attempt_id="a1", job_id="j1", loan_id="l1", state=AttemptState.ENDED, end=AttemptEnd.EXITED, exit_code=0
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def accept(journal: Journal) -> None:
    journal.accept_loan(ORDER, boot_id="b", state=LoanState.DRAINING, restore_by=12.5)


def test_a_loan_is_there_for_the_next_agent(path: Path) -> None:
    journal = Journal(path)
    accept(journal)
    journal.write_step("l1", LoanStep.PARK_SENT, engine_id="e", data={"tags": ["kv_cache"]})
    journal.set_loan("l1", state=LoanState.PARKING, recalled="because", engine_lost=frozenset({"e"}))
    journal.close()
    again = Journal(path)
    (row,) = again.open_loans()
    assert (row.order, row.state, row.recalled, row.engine_lost) == (ORDER, LoanState.PARKING, "because", {"e"})
    assert row.restore_by_boottime == 12.5
    (step,) = again.steps("l1")
    assert (step.step, step.engine_id, step.data) == (LoanStep.PARK_SENT, "e", {"tags": ["kv_cache"]})
    assert [spec for spec, _ in again.live_attempts("l1")] == [SPEC]
    assert again.journal_id == journal.journal_id
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_closed_loan_is_not_open(path: Path) -> None:
    journal = Journal(path)
    accept(journal)
    journal.set_loan("l1", state=LoanState.CLOSED, reason=Reason(code="x", sentence="y"))
    assert journal.open_loans() == []
    assert journal.forget_closed(before=0) == []
    assert journal.forget_closed(before=2**40) == ["a1"]
    assert journal.loan("l1") is None


def test_an_attempt_is_accepted_once_and_ends_once(path: Path) -> None:
    journal = Journal(path)
    accept(journal)
    assert not journal.accept_attempt("l1", SPEC)
    assert journal.end_attempt(ENDED)
    assert not journal.end_attempt(ENDED.model_copy(update={"exit_code": 9}))
    assert journal.attempt_end("a1") == ENDED
    assert journal.live_attempts("l1") == []
    assert [r["report"]["kind"] for r in journal.unsent()] == ["attempt_changed"]
    assert journal.ended_unacknowledged() == [ENDED]


def test_reports_keep_their_numbers_after_they_were_taken(path: Path) -> None:
    journal = Journal(path)
    for _ in range(3):
        journal.report(ENDED)
    assert [report["id"] for report in journal.unsent()] == [1, 2, 3]
    journal.acknowledge(3)
    journal.report(ENDED)
    assert [report["id"] for report in journal.unsent()] == [4]


def test_together_is_all_or_nothing(path: Path) -> None:
    journal = Journal(path)

    def write_and_fail() -> None:
        with journal.together():
            accept(journal)
            journal.report(ENDED)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert journal.open_loans() == []
    assert journal.unsent() == []
    accept(journal)
    assert len(journal.open_loans()) == 1


def test_the_highest_is_never_lowered(path: Path) -> None:
    journal = Journal(path)
    assert journal.raise_to("term", 5)
    assert journal.raise_to("term", 5)
    assert not journal.raise_to("term", 4)
    assert journal.highest("term") == 5


def test_a_newer_schema_is_refused(path: Path) -> None:
    Journal(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(JournalTooNew, match="schema 99"):
        Journal(path)


@pytest.mark.parametrize("offset", [0, 100, 4096])
def test_overwritten_bytes_are_noticed(path: Path, offset: int) -> None:
    journal = Journal(path)
    for _ in range(50):
        journal.report(ENDED)
    journal.close()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(os.urandom(4096))
    with pytest.raises(JournalCorrupt):
        Journal(path)


def test_a_journal_that_cannot_be_opened_is_not_called_corrupt(path: Path) -> None:
    journal = Journal(path)
    accept(journal)
    journal.close()
    path.rename(path.with_name("kept"))
    path.mkdir()
    with pytest.raises(JournalUnavailable, match="cannot be opened now"):
        Journal(path)
    path.rmdir()
    path.with_name("kept").rename(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(JournalUnavailable, match="locked"):
        Journal(path)
    other.close()
    assert len(Journal(path).open_loans()) == 1


KILLED = """
import sys
from pathlib import Path
from lull.agents.journal import Journal
from lull.agents.protocol.loans import LoanStep
journal = Journal(Path(sys.argv[1]))
number = 0
while True:
    journal.write_step("l", LoanStep.ACCEPTED, data={"number": number})
    print(number, flush=True)
    number += 1
"""


def test_what_was_written_survives_a_kill(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = -1
    for line in child.stdout:
        told = int(line)
        if told >= 40:
            child.send_signal(signal.SIGKILL)
            break
    for line in child.stdout:
        told = int(line)
    child.wait(10)
    child.stdout.close()
    journal = Journal(path)
    numbers = [step.data["number"] for step in journal.steps("l")]
    assert numbers[: told + 1] == list(range(told + 1))
    assert len(journal.unsent(1000)) == len(numbers)
