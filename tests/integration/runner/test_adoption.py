"""The next agent finds out what became of each attempt, wherever the last agent, the runner or the node stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lull.agents import processes
from lull.agents.attempts import Adopted, AttemptDir, AttemptError, AttemptProcess, SpareRunners
from lull.agents.protocol.wire import AttemptEnd
from tests.attempt_runs import BOUND_SECONDS, Attempts, alive, output
from tests.waiting import wait_until_async

AGENT = """
import asyncio, json, os, signal, sys
from pathlib import Path
from lull.agents.attempts import AttemptDir, AttemptProcess, RunnerSpec

async def main():
    spec = json.loads(sys.argv[2])
    process = await AttemptProcess.launch(AttemptDir(Path(sys.argv[1])), RunnerSpec(**spec))
    if sys.argv[3] == "go":
        await process.go()
    print(process.runner.pid, flush=True)
    signal.pause()

asyncio.run(main())
"""


async def killed_agent(attempts: Attempts, argv: list[str], told: str) -> AttemptDir:
    """Another process launches the attempt and is then killed."""
    directory, spec = attempts.make(argv, env={"PATH": os.environ["PATH"], "FIFO": str(attempts.root / "fifo")})
    attempts.root.mkdir(parents=True)
    os.mkfifo(attempts.root / "fifo")
    fields = json.dumps({name: getattr(spec, name) for name in ("attempt_id", "job_id", "argv", "env")})
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(directory.path), fields, told], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    with agent.stdout:
        assert await asyncio.to_thread(agent.stdout.readline)
    agent.kill()
    agent.wait(BOUND_SECONDS)
    return directory


def only(adopted: Adopted) -> str:
    told = [
        name
        for name, there in (
            ("process", adopted.process is not None),
            ("outcome", adopted.outcome is not None),
            ("never_started", adopted.never_started),
        )
        if there
    ]
    assert len(told) == 1
    return told[0]


async def kill_runner(process: AttemptProcess) -> None:
    process.detach()
    processes.send_signal(process.runner, signal.SIGKILL)
    assert await processes.wait_exited(process.runner, BOUND_SECONDS)


def rewrite_boot(directory: AttemptDir) -> None:
    directory.write("identity.json", {**(directory.read("identity.json") or {}), "boot_id": "another"})


async def test_a_job_outlives_its_agent_and_nothing_is_lost(attempts: Attempts) -> None:
    script = "echo ready; read line < $FIFO; echo $line; echo done >&2; exit 7"
    directory = await killed_agent(attempts, ["sh", "-c", script], "go")
    await attempts.wait_said(directory, b"ready\n")
    adopted = await AttemptProcess.adopt(directory)
    assert only(adopted) == "process"
    process = adopted.process
    assert process is not None
    status = await process.status()
    assert (status.state, status.job) == ("running", process.job)
    waiting = asyncio.create_task(process.wait_ended())
    await asyncio.to_thread((attempts.root / "fifo").write_text, "still here\n")
    outcome = await waiting
    assert (outcome.end, outcome.exit_code) == (AttemptEnd.EXITED, 7)
    assert output(directory) == b"ready\nstill here\n"
    assert output(directory, "stderr") == b"done\n"
    again = await AttemptProcess.adopt(directory)
    assert again.outcome == outcome


async def test_a_job_that_ended_while_there_was_no_agent(attempts: Attempts) -> None:
    directory = await killed_agent(attempts, ["sh", "-c", "read line < $FIFO; echo $line; exit 9"], "go")
    await asyncio.to_thread((attempts.root / "fifo").write_text, "alone\n")
    await wait_until_async((directory.path / "exit.json").exists, BOUND_SECONDS, "the record")
    runner = directory.identity()
    assert runner is not None
    assert await processes.wait_exited(runner, BOUND_SECONDS)
    adopted = await AttemptProcess.adopt(directory)
    assert only(adopted) == "outcome"
    assert adopted.outcome is not None
    assert (adopted.outcome.end, adopted.outcome.exit_code) == (AttemptEnd.EXITED, 9)
    assert output(directory) == b"alone\n"


async def test_an_agent_killed_ten_times_starts_no_second_job(attempts: Attempts, tmp_path: Path) -> None:
    script = f"echo $$ >> {tmp_path}/witness; read line < $FIFO; exit 3"
    directory = await killed_agent(attempts, ["sh", "-c", script], "go")
    spec = directory.spec()
    assert spec is not None
    runners = set[int]()
    for restart in range(10):
        adopted = await AttemptProcess.adopt(directory)
        assert adopted.process is not None
        await adopted.process.go()
        runners.add(adopted.process.runner.pid)
        adopted.process.detach()
        if restart % 4 == 0:  # one that knows nothing of its predecessor
            launched = await AttemptProcess.launch(directory, spec)
            await launched.go()
            runners.add(launched.runner.pid)
            launched.detach()
    assert len(runners) == 1
    adopted = await AttemptProcess.adopt(directory)
    assert adopted.process is not None
    await asyncio.to_thread((attempts.root / "fifo").write_text, "end\n")
    assert (await adopted.process.wait_ended()).exit_code == 3
    assert len((tmp_path / "witness").read_text().splitlines()) == 1


async def test_nothing_there(attempts: Attempts) -> None:
    directory, _ = attempts.make(["true"])
    assert only(await AttemptProcess.adopt(directory)) == "never_started"


async def test_only_a_spec(attempts: Attempts) -> None:
    directory, spec = attempts.make(["echo", "same attempt"])
    directory.write_spec(spec)
    assert only(await AttemptProcess.adopt(directory)) == "never_started"
    process = await AttemptProcess.launch(directory, spec)
    await process.go()
    assert (await process.wait_ended()).exit_code == 0
    assert output(directory) == b"same attempt\n"


async def test_a_runner_that_is_just_coming_up(attempts: Attempts) -> None:
    directory, spec = attempts.make(["true"])
    directory.write_spec(spec)
    with directory.runner_lock(0.0) as ours:
        assert ours
        adopting = asyncio.create_task(AttemptProcess.adopt(directory))
        done, _ = await asyncio.wait([adopting], timeout=0.05)
        assert not done, "a held lock without an identity says that somebody comes"
    assert only(await adopting) == "never_started"


async def test_identity_but_no_go(attempts: Attempts) -> None:
    directory = await killed_agent(attempts, ["echo", "ran"], "no go")
    adopted = await AttemptProcess.adopt(directory)
    assert adopted.process is not None
    status = await adopted.process.status()
    assert (status.state, status.job) == ("waiting", None)
    assert await adopted.process.go()
    assert (await adopted.process.wait_ended()).exit_code == 0
    assert output(directory) == b"ran\n"


async def test_a_runner_killed_before_go(attempts: Attempts) -> None:
    process = await attempts.launch(["true"])
    await kill_runner(process)
    adopted = await AttemptProcess.adopt(process.directory)
    assert only(adopted) == "outcome"
    assert adopted.outcome is not None
    assert adopted.outcome.end == AttemptEnd.NOT_STARTED
    assert process.directory.exit_record() == adopted.outcome


@pytest.mark.parametrize("gone", [["exit.json"], ["exit.json", "started.json"]])
async def test_a_runner_killed_after_starting(attempts: Attempts, gone: list[str]) -> None:
    """With started.json lost as well, what it forked is found by its environment alone."""
    process = await attempts.start(["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo ready; wait"])
    job = process.job
    assert job is not None
    below = [found for pid in processes.descendants(process.runner.pid) if (found := alive(pid))]
    assert len(below) >= 2
    processes.send_signal(process.runner, signal.SIGSTOP)
    for name in gone:
        (process.directory.path / name).unlink(missing_ok=True)
    await kill_runner(process)
    adopted = await AttemptProcess.adopt(process.directory)
    assert only(adopted) == "outcome"
    assert adopted.outcome is not None
    assert adopted.outcome.end == AttemptEnd.RUNNER_LOST
    assert adopted.outcome.reason is not None
    assert not [each for each in below if processes.is_same(each)]


async def test_another_boot(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"])
    await kill_runner(process)
    rewrite_boot(process.directory)
    adopted = await AttemptProcess.adopt(process.directory)
    assert adopted.outcome is not None
    assert adopted.outcome.end == AttemptEnd.NODE_REBOOTED


async def test_another_boot_before_go(attempts: Attempts) -> None:
    process = await attempts.launch(["true"])
    await kill_runner(process)
    rewrite_boot(process.directory)
    adopted = await AttemptProcess.adopt(process.directory)
    assert adopted.outcome is not None
    assert adopted.outcome.end == AttemptEnd.NOT_STARTED, "it was never forked, on whatever boot"


async def test_after_another_boot_nobody_is_signalled(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pids in the records are strangers' by then: here they are those of live processes."""
    monkeypatch.setattr("lull.agents.attempt_files._LOCK_SECONDS_MAX", 0.1)
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"])
    job = process.job
    assert job is not None
    rewrite_boot(process.directory)
    with pytest.raises(AttemptError, match="lock"):  # somebody lives there after all
        await AttemptProcess.adopt(process.directory)
    assert processes.is_same(process.runner)
    assert processes.is_same(job)


async def test_the_record_of_a_live_runner_is_not_believed(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"])
    process.directory.write("exit.json", {"end": "exited", "exit_code": 0})
    assert only(await AttemptProcess.adopt(process.directory)) == "process"
    await process.stop(AttemptEnd.CANCELLED)
    assert (await process.wait_ended()).end == AttemptEnd.CANCELLED


async def test_several_wait_for_the_same_end(attempts: Attempts) -> None:
    process = await attempts.run(["true"])
    adopted = (await AttemptProcess.adopt(process.directory)).process
    waits = [process.wait_ended(), process.wait_ended()] + ([] if adopted is None else [adopted.wait_ended()])
    outcomes = await asyncio.gather(*waits)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    with pytest.raises(ChildProcessError):
        os.waitpid(process.runner.pid, os.WNOHANG)


async def test_a_spare_runner_serves_like_any_other(attempts: Attempts) -> None:
    spares = SpareRunners()
    spares.start()
    try:
        for _ in range(2):  # the second comes before the first is replaced
            directory, spec = attempts.make(["echo", "from a spare"])
            process = await AttemptProcess.launch(directory, spec, spares=spares)
            await process.go()
            assert (await process.wait_ended()).exit_code == 0
            assert output(directory) == b"from a spare\n"
            argv = Path(f"/proc/{process.runner.pid}/cmdline")
            assert not argv.exists()
    finally:
        spares.close()


async def test_a_dead_spare_is_passed_over(attempts: Attempts) -> None:
    spares = SpareRunners()
    spares.start()
    # Right after a spawn a process is there and has no command line yet.
    [spare] = await wait_until_async(_spares, BOUND_SECONDS, "the spare")
    found = processes.identity(spare)
    assert found is not None
    processes.send_signal(found, signal.SIGKILL)
    assert await processes.wait_exited(found, BOUND_SECONDS)
    try:
        directory, spec = attempts.make(["true"])
        process = await AttemptProcess.launch(directory, spec, spares=spares)
        await process.go()
        assert (await process.wait_ended()).exit_code == 0
    finally:
        spares.close()


async def test_a_spare_ends_with_its_agent() -> None:
    code = "import os, signal\nfrom lull.agents.attempts import SpareRunners\nimport asyncio\n" + (
        "async def main():\n    SpareRunners().start()\n    print('up', flush=True)\n    signal.pause()\n"
        "asyncio.run(main())"
    )
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    with agent.stdout:
        await asyncio.to_thread(agent.stdout.readline)
    [spare] = [found for pid in processes.descendants(agent.pid) if (found := processes.identity(pid))]
    agent.kill()
    agent.wait(BOUND_SECONDS)
    assert await processes.wait_exited(spare, BOUND_SECONDS)


def _spares() -> list[int]:
    return [pid for pid in processes.descendants(os.getpid()) if _is_spare(pid)]


def _is_spare(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"runner.py\0-\0")
    except OSError:
        return False
