"""A process is told from every other, and nothing but the one that is meant is signalled."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from lull.agents import processes, runner_processes
from lull.agents.protocol.wire import ProcessIdentity
from tests.attempt_runs import BOUND_SECONDS, PYTHON
from tests.waiting import wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    env = {"PATH": os.environ["PATH"], "LULL_ATTEMPT": "a-7", "OTHER_LULL_ATTEMPT": "a-8"}
    with subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True) as process:
        wait_until(lambda: processes.environ_value(process.pid, "LULL_ATTEMPT"), BOUND_SECONDS, "its exec")
        yield process
        process.kill()


def named(pid: int) -> ProcessIdentity:
    found = processes.identity(pid)
    assert found is not None
    return found


def test_a_live_process_is_itself(sleeper: subprocess.Popen[bytes]) -> None:
    process = named(sleeper.pid)
    assert process.boot_id == processes.boot_id()
    assert processes.is_same(process)
    assert processes.send_signal(process, signal.SIGTERM)
    assert sleeper.wait(BOUND_SECONDS) == -signal.SIGTERM
    assert not processes.is_same(process)
    assert not processes.send_signal(process, signal.SIGTERM)
    assert processes.identity(sleeper.pid) is None


@pytest.mark.parametrize("other", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_the_same_pid_at_another_time_is_another(sleeper: subprocess.Popen[bytes], other: dict[str, object]) -> None:
    process = named(sleeper.pid).model_copy(update=other)
    assert not processes.is_same(process)
    assert processes.open_process(process) is None
    assert not processes.send_signal(process, signal.SIGKILL)
    assert processes.is_same(named(sleeper.pid)), "it was not signalled"


def test_a_zombie_has_exited() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process = named(child.pid)
    os.kill(child.pid, 0)  # which calls it alive
    assert not processes.is_same(process)
    assert not processes.send_signal(process, signal.SIGTERM)
    stat = processes.read_stat(child.pid)
    assert stat is not None
    assert stat.is_zombie
    assert child.wait(BOUND_SECONDS) == 0


async def test_waiting_for_a_process_that_is_not_ours(sleeper: subprocess.Popen[bytes]) -> None:
    process = named(sleeper.pid)
    assert not await processes.wait_exited(process, 0.01)
    sleeper.kill()
    assert await processes.wait_exited(process, BOUND_SECONDS)
    sleeper.wait(BOUND_SECONDS)
    assert await processes.wait_exited(process)


def test_environ_is_matched_whole(sleeper: subprocess.Popen[bytes]) -> None:
    assert processes.find_by_environ("LULL_ATTEMPT", "a-7") == [sleeper.pid]
    assert processes.find_by_environ("LULL_ATTEMPT", "a-8") == []
    assert processes.find_by_environ("LULL_ATTEMPT", "a-") == []


def test_a_name_with_parentheses_and_blanks() -> None:
    code = "import ctypes, os; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([*PYTHON, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stat = processes.read_stat(child.pid)
        assert stat is not None
        assert stat.parent_pid == os.getpid()
        assert runner_processes.stat_of(child.pid) == (os.getpid(), stat.start_ticks, True)
        child.communicate(b"\n", BOUND_SECONDS)


def test_descendants() -> None:
    script = "sleep 1000 & setsid sleep 1000 & echo; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        below = processes.descendants(shell.pid)
        try:
            assert len(below) == 2
            assert set(below) < set(processes.descendants(os.getpid()))
            assert shell.pid not in below
        finally:
            for pid in below:
                processes.send_signal(named(pid), signal.SIGKILL)


def test_leftovers_by_environment_session_and_descent() -> None:
    quiet = "env -i sleep 1000"  # says nothing of the attempt
    with subprocess.Popen(
        ["sh", "-c", f"{quiet} & setsid {quiet} & echo; wait"],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": os.environ["PATH"], "LULL_ATTEMPT": "a-9"},
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        try:
            wait_until(lambda: len(processes.descendants(shell.pid)) == 2, BOUND_SECONDS, "both of them")
            everything = {shell.pid, *processes.descendants(shell.pid)}
            job = named(shell.pid)
            assert {left.pid for left in processes.find_leftovers("a-9", None)} == everything
            in_session = {left.pid for left in processes.find_leftovers("another", job)}
            assert in_session == everything, "its session, and what is below that"
            elder = job.model_copy(update={"start_ticks": job.start_ticks - 1})
            assert processes.find_leftovers("another", elder) == [], "the pid was used again: these are strangers"
            assert processes.find_leftovers("another", job.model_copy(update={"boot_id": "another"})) == []
        finally:
            swept = processes.kill_leftovers("a-9", named(shell.pid), BOUND_SECONDS)
        assert swept.remaining == ()
        assert swept.killed == 3


def test_the_runner_signals_only_what_is_below_it(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = named(sleeper.pid).start_ticks
    found = runner_processes.descendants()
    assert found[sleeper.pid] == (ticks, True)
    assert os.getpid() not in found
    assert os.getppid() not in found
    parent = named(os.getppid())
    assert not runner_processes.signal_descendant(parent.pid, parent.start_ticks, signal.SIGCONT)
    assert not runner_processes.signal_descendant(1, named(1).start_ticks, signal.SIGCONT)
    assert not runner_processes.signal_descendant(sleeper.pid, ticks - 1, signal.SIGKILL)
    assert processes.is_same(named(sleeper.pid))
    assert runner_processes.signal_descendant(sleeper.pid, ticks, signal.SIGKILL)
    assert sleeper.wait(BOUND_SECONDS) == -signal.SIGKILL
    assert not runner_processes.signal_descendant(sleeper.pid, ticks, signal.SIGKILL)
