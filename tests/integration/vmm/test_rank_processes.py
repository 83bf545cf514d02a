"""Three processes that act as one engine; any of them is killed or stopped at every step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_examples import example
from tests.rank_processes import WEIGHTS_BYTES, RankProcess, RankProcesses
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with tempfile.TemporaryDirectory(prefix="lull-ranks-") as folder:  # short enough for a socket
        processes = RankProcesses(Path(folder))
        yield processes
        processes.close()


def in_place(rank: RankProcess) -> bool:
    memory = rank.ask("memory")
    return bool(memory["bytes"] == WEIGHTS_BYTES and memory["intact"])


def test_they_park_and_wake_as_one(processes: RankProcesses) -> None:
    ranks = processes.start(3)
    leader = ranks[0]
    assert leader.ask("status") == {"state": "running", "parked_tags": [], "failure": None}
    for _ in range(2):
        assert leader.ask("release") == ""
        assert [rank.ask("memory")["bytes"] for rank in ranks] == [0, 0, 0]
        assert leader.ask("status")["state"] == "parked"
        assert leader.ask("release") == ""  # again is no change
        assert leader.ask("resume") == ""
        assert all(in_place(rank) for rank in ranks)
    assert leader.ask("status")["state"] == "running"


def to_step(ranks: list[RankProcess], victim: RankProcess, step: str) -> None:
    """Brings the engine to where ``victim`` stands at the step, and the others wait for it."""
    leader, other = ranks[0], next(rank for rank in ranks[1:] if rank is not victim)
    if step in {"parked", "waking"}:
        assert leader.ask("release") == ""
    if step in {"preparing", "committing", "waking"}:
        victim.stop_at(step)
        leader.tell(do="resume" if step == "waking" else "release")
        assert victim.heard("stopped") == step
    elif step == "prepared":
        other.stop_at("preparing")
        leader.tell(do="release")
        assert other.heard("stopped") == "preparing"
        for rank in (leader, victim):
            wait_until(lambda rank=rank: rank.ask("memory")["state"] == "parking", 10, "preparing")  # type: ignore[misc]


STEPS = ["idle", "preparing", "prepared", "committing", "parked", "waking"]


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_dies(processes: RankProcesses, step: str) -> None:
    ranks = processes.start(3)
    leader, other, victim = ranks
    to_step(ranks, victim, step)
    victim.kill()
    if step == "prepared":
        wait_until(lambda: leader.ask("memory")["state"] == "running", 10, "the leader hearing of it")
        other.tell(go=True)
    if step in {"preparing", "prepared", "committing"}:
        assert "RanksFailed: rank 2 is gone" in leader.heard("release")
    if step == "waking":
        assert "RanksFailed: rank 2 is gone" in leader.heard("resume")
    for rank in (leader, other):
        assert rank.failed() == "rank 2 is gone"
        if step in {"idle", "preparing", "prepared"}:
            wait_until(lambda rank=rank: in_place(rank), 10, "the release undone")  # type: ignore[misc]
        elif step in {"parked", "waking"}:
            wait_until(lambda rank=rank: rank.ask("memory")["bytes"] == 0, 10, "as it was")  # type: ignore[misc]
        else:  # it may have begun when it heard of the death, or not
            wait_until(lambda rank=rank: rank.ask("memory")["bytes"] == 0 or in_place(rank), 10, "an end")  # type: ignore[misc]
    status = leader.ask("status")
    assert (status["state"], status["failure"]) == ("failed", "rank 2 is gone")
    assert "RanksFailed: Cannot resume memory while state is failed (rank 2 is gone)" in leader.ask("resume")


@pytest.mark.parametrize("step", STEPS)
def test_the_leader_dies(processes: RankProcesses, step: str) -> None:
    ranks = processes.start(3)
    leader, other, last = ranks
    to_step(ranks, leader, step)
    leader.kill()
    if step == "prepared":
        other.tell(go=True)
    for rank in (other, last):
        assert rank.failed() == "the leader of its ranks is gone"
        if step in {"idle", "preparing", "prepared"}:
            wait_until(lambda rank=rank: in_place(rank), 10, "the release undone")  # type: ignore[misc]
        elif step in {"parked", "waking"}:
            wait_until(lambda rank=rank: rank.ask("memory")["bytes"] == 0, 10, "as it was")  # type: ignore[misc]
        else:  # the word may have reached it or not
            wait_until(lambda rank=rank: in_place(rank) or rank.ask("memory")["bytes"] == 0, 10, "an end")  # type: ignore[misc]


def test_a_rank_that_is_late_is_undone_everywhere(processes: RankProcesses) -> None:
    ranks = processes.start(3, prepare_seconds_max=1.0)
    leader, late, last = ranks
    late.stop_at("preparing")
    leader.tell(do="release")
    assert late.heard("stopped") == "preparing"
    wait_until(lambda: last.ask("memory")["state"] == "parking", 10, "the others preparing")
    wait_until(lambda: last.ask("memory")["state"] == "running", 10, "the others going back")
    late.tell(go=True)
    told = "RankRefused: rank 1: rank 1 did not get ready in time; the release was undone on every rank"
    assert leader.heard("release") == told
    assert all(in_place(rank) for rank in ranks)
    assert leader.ask("status")["state"] == "running"
    assert leader.ask("release") == ""


@pytest.mark.parametrize(("step", "deadlines"), [("preparing", "undo"), ("committing", "commit")])
def test_a_rank_that_hangs_fails_the_engine(processes: RankProcesses, step: str, deadlines: str) -> None:
    ranks = processes.start(3, prepare_seconds_max=0.2, abort_seconds_max=0.2, commit_seconds_max=0.5)
    leader, other, hung = ranks
    hung.stop_at(step)
    leader.tell(do="release")
    assert hung.heard("stopped") == step
    reason = f"rank 2 did not {deadlines} in time"
    assert leader.heard("release") == f"RanksFailed: {reason}"
    assert [rank.failed() for rank in ranks] == [reason] * 3  # the hung one hears it as well
    if step == "preparing":
        assert in_place(leader)
        assert in_place(other)
        hung.tell(go=True)
        wait_until(lambda: in_place(hung), 10, "the hung one undoing what it had begun")


def test_a_rank_that_does_not_answer_disagrees(processes: RankProcesses) -> None:
    leader, _, stopped = processes.start(3, status_seconds_max=0.3)
    os.kill(stopped.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{stopped.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 10, "the rank standing still")
    try:
        failure = leader.ask("status")["failure"]
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert failure == "ranks disagree: rank 0 is running, rank 2 did not say its state in time"
    assert stopped.failed() == failure


def test_the_example_runs() -> None:
    with tempfile.TemporaryDirectory(prefix="lull-ranks-") as folder:
        program = Path(folder) / "engine.py"
        program.write_text(example("ranks.md"))
        ended = subprocess.run(
            [sys.executable, str(program)], cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )
    assert (ended.returncode, ended.stdout) == (0, "parked\n"), ended.stderr
