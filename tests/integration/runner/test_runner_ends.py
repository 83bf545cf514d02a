"""How attempts end: by themselves, by their limits, by a request, by a kill, and what is left then."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import stat
import time
from pathlib import Path
from typing import Final

import pytest

from lull.agents import processes
from lull.agents.attempts import AttemptDir, AttemptProcess
from lull.agents.protocol.wire import AttemptEnd
from tests.attempt_runs import BOUND_SECONDS, PYTHON, Attempts, alive, output
from tests.waiting import wait_until, wait_until_async

CANCELLED: Final = AttemptEnd.CANCELLED
PREEMPTED: Final = AttemptEnd.PREEMPTED

# Forks twice into a session of its own, so that neither its group nor its parent leads to it.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {before}
        os.write(1, b"daemon %d\\n" % os.getpid())
        signal.pause()
    os._exit(0)
os.wait()
{after}
"""


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def daemon_pid(attempts: Attempts, directory: AttemptDir) -> int:
    said = await attempts.wait_said(directory, b"daemon ")
    return int(said.split(b"daemon ")[1].split()[0])


async def test_exit_code_and_output_are_complete(attempts: Attempts) -> None:
    process = await attempts.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.exit_code, outcome.signal) == (AttemptEnd.EXITED, 3, None)
    assert output(process.directory) == b"out\n"
    assert output(process.directory, "stderr") == b"err\n"
    assert outcome.stragglers_killed == 0
    assert outcome.cleanup is None
    assert outcome.started_at is not None
    assert outcome.ended_at is not None
    assert outcome.started_at <= outcome.ended_at
    assert outcome.peak_rss_bytes is not None
    assert outcome.peak_rss_bytes > 100_000
    assert outcome.cpu_seconds is not None


async def test_everything_in_the_directory_is_the_owners_alone(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"])
    paths = [process.directory.path, *process.directory.path.rglob("*")]
    assert {path.name for path in paths} >= {"spec.json", "identity.json", "started.json", "control.sock", "stdout"}
    for path in paths:
        mode = path.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path
    await process.stop(CANCELLED)
    assert (await process.wait_ended()).signal == signal.SIGTERM
    assert stat.S_IMODE((process.directory.path / "exit.json").stat().st_mode) == 0o600


async def test_a_job_that_dies_by_a_signal(attempts: Attempts) -> None:
    process = await attempts.run(["sh", "-c", "kill -KILL $$"])
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.exit_code, outcome.signal) == (AttemptEnd.SIGNALLED, None, signal.SIGKILL)


async def test_peak_memory_and_processor_time_are_recorded(attempts: Attempts) -> None:
    code = "x = bytearray(64 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
    outcome = await (await attempts.run([*PYTHON, code])).wait_ended()
    assert outcome.peak_rss_bytes is not None
    assert outcome.peak_rss_bytes >= 64 << 20
    assert outcome.cpu_seconds


@pytest.mark.parametrize("end", [CANCELLED, PREEMPTED])
async def test_a_stopped_job_may_end_in_its_own_way(attempts: Attempts, end: AttemptEnd) -> None:
    script = "trap 'echo bye; exit 4' TERM; echo ready; while :; do sleep 1000 & wait; done"
    process = await attempts.start(["sh", "-c", script])
    assert await process.stop(end)  # type: ignore[arg-type]
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.exit_code) == (end, 4)
    assert output(process.directory) == b"ready\nbye\n"
    assert not await process.stop(CANCELLED), "there is nobody to stop any more"


async def test_a_job_that_ignores_sigterm_is_killed_after_the_grace(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "trap '' TERM; echo ready; sleep 1000"], kill_grace_seconds=0.2)
    asked_at = boottime()
    await process.stop(CANCELLED)
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.signal) == (CANCELLED, signal.SIGKILL)
    assert outcome.boottime is not None
    assert outcome.boottime - asked_at >= 0.2
    assert processes.find_by_environ("LULL_ATTEMPT", process.directory.path.name) == []


async def test_a_stopped_process_hears_of_its_end(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "trap 'exit 6' TERM; echo ready; kill -STOP $$"])
    job = process.job
    assert job is not None
    await wait_until_async(lambda: (s := processes.read_stat(job.pid)) and s.state == "T", BOUND_SECONDS, "the stop")
    await process.stop(CANCELLED)
    assert (await process.wait_ended()).exit_code == 6


@pytest.mark.parametrize("before", ["pass", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
async def test_a_daemon_is_swept_before_the_record_is_written(attempts: Attempts, before: str) -> None:
    code = DAEMON.format(before=before, after="sys.exit(5)")
    process = await attempts.run([*PYTHON, code], kill_grace_seconds=0.2)
    pid = await daemon_pid(attempts, process.directory)
    record = process.directory.path / "exit.json"
    await wait_until_async(record.exists, BOUND_SECONDS, "the record")
    assert alive(pid) is None
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.exit_code, outcome.cleanup) == (AttemptEnd.EXITED, 5, None)
    assert outcome.stragglers_killed == 1


async def test_the_record_waits_for_the_last_descendant(attempts: Attempts) -> None:
    code = DAEMON.format(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)", after="sys.exit(5)")
    process = await attempts.run([*PYTHON, code], kill_grace_seconds=1000)
    pid = await daemon_pid(attempts, process.directory)
    daemon = alive(pid)
    assert daemon is not None
    swept: bool = await wait_until_async(functools.partial(_sweeping, process), BOUND_SECONDS, "the sweep")
    assert swept
    assert not (process.directory.path / "exit.json").exists()
    assert processes.is_same(daemon)
    await process.stop(CANCELLED)  # the job has ended: this only ends the grace of what is left
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.exit_code, outcome.stragglers_killed) == (AttemptEnd.EXITED, 5, 1)
    assert not processes.is_same(daemon)


async def _sweeping(process: AttemptProcess) -> bool:
    return (await process.status()).state == "stopping"


async def test_a_growing_tree_is_swept_to_the_last(attempts: Attempts) -> None:
    code = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for i in range(12):
    if os.fork() == 0:
        os.setsid()
        for j in range(3):
            os.fork()
        signal.pause()
os.write(1, b"ready\\n")
signal.pause()
"""
    process = await attempts.start([*PYTHON, code], kill_grace_seconds=0.0)
    await wait_until_async(lambda: len(processes.descendants(process.runner.pid)) > 90, BOUND_SECONDS, "the tree")
    await process.stop(PREEMPTED)
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.signal, outcome.cleanup) == (PREEMPTED, signal.SIGKILL, None)
    assert processes.find_by_environ("LULL_ATTEMPT", process.directory.path.name) == []


async def test_the_jobs_own_limit(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"], time_limit_seconds=0.2)
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.signal) == (AttemptEnd.TIMED_OUT, signal.SIGTERM)


async def test_restore_by_ends_the_job_without_an_agent(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"], restore_by_boottime=boottime() + 3600)
    assert await process.set_restore_by(boottime() + 0.1)
    process.detach()
    adopted = await process.adopt(process.directory)
    outcome = adopted.outcome or (adopted.process and await adopted.process.wait_ended())
    assert outcome
    assert outcome.end == PREEMPTED


async def test_restore_by_can_be_put_off(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"], restore_by_boottime=boottime() + 60)
    later = boottime() + 3600
    await process.set_restore_by(later)
    assert (await process.status()).restore_by_boottime == later
    await process.set_restore_by(None)
    assert (await process.status()).restore_by_boottime is None
    assert (await process.status()).state == "running"


async def test_cancel_outranks_preemption_and_nothing_outranks_cancel(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "trap '' TERM; echo ready; sleep 1000"], kill_grace_seconds=1000)
    await process.stop(PREEMPTED)
    assert (await process.status()).end == PREEMPTED
    await process.stop(CANCELLED)
    await process.stop(PREEMPTED)
    status = await process.status()
    assert (status.state, status.end) == ("stopping", CANCELLED)


async def test_a_node_that_goes_down_preempts(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"])
    processes.send_signal(process.runner, signal.SIGTERM)
    assert (await process.wait_ended()).end == PREEMPTED


async def test_without_go_nothing_is_executed(attempts: Attempts, tmp_path: Path) -> None:
    process = await attempts.launch(["touch", str(tmp_path / "ran")], go_seconds_max=0.1)
    outcome = await process.wait_ended()
    assert (outcome.end, outcome.started_at) == (AttemptEnd.NOT_STARTED, None)
    assert outcome.reason is not None
    assert "go" in outcome.reason.sentence
    assert not (tmp_path / "ran").exists()
    assert not process.directory.starting()


async def test_go_after_restore_by_executes_nothing(attempts: Attempts, tmp_path: Path) -> None:
    process = await attempts.launch(["touch", str(tmp_path / "ran")], restore_by_boottime=boottime() - 1)
    assert await process.go() is None
    assert (await process.wait_ended()).end == AttemptEnd.NOT_STARTED
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("asked", "end"), [(CANCELLED, CANCELLED), (PREEMPTED, AttemptEnd.NOT_STARTED)])
async def test_stop_before_go(attempts: Attempts, tmp_path: Path, asked: AttemptEnd, end: AttemptEnd) -> None:
    process = await attempts.launch(["touch", str(tmp_path / "ran")])
    assert await process.stop(asked)  # type: ignore[arg-type]
    assert (await process.wait_ended()).end == end
    assert not (tmp_path / "ran").exists()


async def test_what_cannot_be_killed_is_named(attempts: Attempts) -> None:
    """A traced process stays until its tracer, which is not ours to signal, has seen its end."""
    code = f"""
import ctypes, os, signal
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, any: for Yama
{DAEMON.format(before="ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)", after="signal.pause()")}
"""
    process = await attempts.run([*PYTHON, code], unkillable_seconds_max=0.2, kill_grace_seconds=0.1)
    pid = await daemon_pid(attempts, process.directory)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0x4206, pid, None, None) != 0:  # PTRACE_SEIZE
        pytest.skip(f"this machine forbids tracing: {os.strerror(ctypes.get_errno())}")
    try:
        await process.stop(CANCELLED)
        outcome = await process.wait_ended()
        assert outcome.end == CANCELLED
        assert outcome.cleanup is not None
        assert outcome.cleanup.code == "unkillable"
        assert outcome.cleanup.data == {"pids": [pid]}
    finally:
        os.waitpid(pid, 0x40000000)


async def test_only_descendants_are_signalled(attempts: Attempts) -> None:
    """Bystanders: in another session, and one that the job knows and names its own attempt."""
    process = await attempts.start(["sh", "-c", "trap '' TERM; echo ready; sleep 1000"], kill_grace_seconds=0.0)
    argv = ["sleep", "1000"]
    env = {"PATH": os.environ["PATH"], "LULL_ATTEMPT": process.directory.path.name}
    bystander = os.posix_spawn("/bin/sleep", argv, env, setsid=True)
    try:
        await process.stop(CANCELLED)
        assert (await process.wait_ended()).end == CANCELLED
        assert alive(bystander), "the runner kills what descends from it, whatever its environment says"
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)


async def test_a_killed_runner_takes_the_job_along(attempts: Attempts) -> None:
    code = f"""
import os, subprocess, sys
{DAEMON.format(before="pass", after="")}
quiet = subprocess.Popen(["sleep", "1000"], env={{}})  # in the job's session, without its environment
os.write(1, b"quiet %d\\n" % quiet.pid)
signal.pause()
"""
    process = await attempts.run([PYTHON[0], "-I", "-c", code])
    said = await attempts.wait_said(process.directory, b"quiet ")
    said = await attempts.wait_said(process.directory, b"daemon ")
    pids = [int(line.split()[1]) for line in said.splitlines()]
    job = process.job
    assert job is not None
    children = [found for pid in pids if (found := alive(pid))]
    assert len(children) == 2
    stranger = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {"LULL_ATTEMPT": "another"}, setsid=True)
    try:
        processes.send_signal(process.runner, signal.SIGKILL)
        outcome = await process.wait_ended()
        assert outcome.end == AttemptEnd.RUNNER_LOST
        assert outcome.cleanup is None
        assert outcome.stragglers_killed >= 2
        for each in [job, *children]:
            assert not processes.is_same(each)
        assert alive(stranger)
        assert process.directory.exit_record() == outcome, "the judgement is the record"
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)


async def test_the_job_dies_with_its_runner_even_if_nobody_looks(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "trap '' TERM HUP; echo ready; exec sleep 1000"])
    job = process.job
    assert job is not None
    process.detach()
    processes.send_signal(process.runner, signal.SIGKILL)
    wait_until(lambda: not processes.is_same(job), BOUND_SECONDS, "the job's end")
