"""At most one execution per directory, whoever asks how often; and who may ask what over the socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from lull.agents import processes, runner
from lull.agents.attempts import AttemptDir, AttemptProcess, LaunchFailed, RunnerGone, RunnerSilent
from lull.agents.protocol.wire import AttemptEnd
from tests.attempt_runs import BOUND_SECONDS, PYTHON, Attempts, output
from tests.waiting import wait_until_async

CANCELLED: Final = AttemptEnd.CANCELLED


def run_again(directory: AttemptDir) -> tuple[int, str]:
    """A second runner, started by hand."""
    argv = [sys.executable, "-I", "-S", runner.__file__, str(directory.path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False)
    return done.returncode, done.stdout


def connect(directory: AttemptDir) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(BOUND_SECONDS)
    fd = os.open(directory.path, os.O_PATH)
    client.connect(f"/proc/self/fd/{fd}/control.sock")
    os.close(fd)
    return client


def ask(client: socket.socket, line: bytes) -> dict[str, Any]:
    client.sendall(line)
    answer = b""
    while not answer.endswith(b"\n"):
        answer += client.recv(65536) or b"\n"
    reply: dict[str, Any] = json.loads(answer)
    return reply


async def test_go_may_be_repeated_and_overlap(attempts: Attempts, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    process = await attempts.launch(["sh", "-c", f"echo $$ >> {witness}; echo ready; exec sleep 1000"])
    jobs = await asyncio.gather(*(process.go() for _ in range(12)))
    await attempts.wait_said(process.directory, b"ready\n")
    jobs.append(await process.go())
    assert len({job.pid for job in jobs if job}) == 1
    assert None not in jobs
    assert witness.read_text() == f"{jobs[0] and jobs[0].pid}\n"


async def test_the_directory_takes_one_runner_at_a_time(attempts: Attempts) -> None:
    process = await attempts.launch(["true"])
    assert run_again(process.directory) == (75, "refused: another runner holds this directory\n")
    spec = process.directory.spec()
    assert spec is not None
    again = await AttemptProcess.launch(process.directory, spec)
    assert again.runner == process.runner, "launching again finds the runner that is there"
    again.detach()
    await process.go()
    assert (await process.wait_ended()).exit_code == 0
    code, said = run_again(process.directory)
    assert (code, "starting.json exists" in said) == (75, True)


async def test_a_runner_lost_before_go_may_be_replaced(attempts: Attempts) -> None:
    process = await attempts.launch(["echo", "once"])
    processes.send_signal(process.runner, signal.SIGKILL)
    await processes.wait_exited(process.runner, BOUND_SECONDS)
    spec = process.directory.spec()
    assert spec is not None
    second = await AttemptProcess.launch(process.directory, spec)
    assert second.runner != process.runner
    await second.go()
    assert (await second.wait_ended()).exit_code == 0
    assert output(second.directory) == b"once\n"
    with pytest.raises(LaunchFailed, match="exists"):
        await AttemptProcess.launch(process.directory, spec)


async def test_a_runner_lost_after_starting_is_never_replaced(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; exec sleep 1000"])
    processes.send_signal(process.runner, signal.SIGKILL)
    await processes.wait_exited(process.runner, BOUND_SECONDS)
    code, said = run_again(process.directory)
    assert (code, "one execution" in said) == (75, True)


async def test_a_settled_attempt_cannot_begin_late(attempts: Attempts) -> None:
    """An agent that died between its spec and its runner's start left a runner that may still come."""
    directory, spec = attempts.make(["true"])
    directory.write_spec(spec)
    assert directory.settle().end == AttemptEnd.NOT_STARTED
    code, said = run_again(directory)
    assert (code, "exit.json exists" in said) == (75, True)


async def test_a_directory_far_down(attempts: Attempts) -> None:
    """A socket's path has at most 107 bytes; a directory's many more."""
    attempts.root = attempts.root / ("d" * 120) / ("e" * 120)
    process = await attempts.run(["echo", "deep"])
    assert (await process.wait_ended()).exit_code == 0
    assert output(process.directory) == b"deep\n"


async def test_bad_requests_are_answered_and_change_nothing(attempts: Attempts) -> None:
    process = await attempts.launch(["true"])
    assert stat.S_IMODE((process.directory.path / "control.sock").stat().st_mode) == 0o600
    lines = [
        b"{}\n",
        b"[]\n",
        b"nonsense\n",
        b"\xff\n",
        b"[" * 4000 + b"\n",
        b'{"do":"stop"}\n',
        b'{"do":"stop","end":"exited"}\n',
        b'{"do":"restore_by","boottime":NaN}\n',
        b'{"do":"restore_by","boottime":"soon"}\n',
        b'{"do":"restore_by"}\n',
    ]
    with connect(process.directory) as client:
        for line in lines:
            answer = await asyncio.to_thread(ask, client, line)
            assert answer["ok"] is False, line
            assert answer["error"], line
        answer = await asyncio.to_thread(ask, client, b'{"do":"status"}\n')
        assert (answer["state"], answer["restore_by_boottime"]) == ("waiting", None)
    with connect(process.directory) as client:
        answer = await asyncio.to_thread(ask, client, b"x" * 10_000)
        assert "4096" in answer["error"]
    assert (await process.status()).state == "waiting"


async def test_several_requests_in_one_packet_and_one_in_several(attempts: Attempts) -> None:
    process = await attempts.launch(["true"])
    with connect(process.directory) as client:
        client.sendall(b'{"do":"status"}\n{"do":"sta')
        first = await asyncio.to_thread(ask, client, b"")
        second = await asyncio.to_thread(ask, client, b'tus"}\n')
    assert first == second


async def test_idle_clients_do_not_keep_the_agent_out(attempts: Attempts) -> None:
    process = await attempts.launch(["true"])
    idle = [connect(process.directory) for _ in range(16)]
    assert (await process.status()).state == "waiting"
    more = [connect(process.directory) for _ in range(16)]
    await process.go()
    assert (await process.wait_ended()).exit_code == 0
    for client in [*idle, *more]:
        client.close()


async def test_a_frozen_runner_is_silent_not_gone(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lull.agents.attempts._ANSWER_SECONDS_MAX", 0.1)
    process = await attempts.launch(["true"])
    processes.send_signal(process.runner, signal.SIGSTOP)
    pid = process.runner.pid
    await wait_until_async(lambda: (s := processes.read_stat(pid)) and s.state == "T", BOUND_SECONDS, "the freeze")
    with pytest.raises(RunnerSilent):
        await process.status()
    processes.send_signal(process.runner, signal.SIGCONT)
    monkeypatch.undo()
    assert (await process.status()).state == "waiting"


async def test_a_socket_of_somebody_else_is_not_believed(attempts: Attempts) -> None:
    process = await attempts.launch(["true"])
    processes.send_signal(process.runner, signal.SIGKILL)
    await processes.wait_exited(process.runner, BOUND_SECONDS)
    with pytest.raises(RunnerGone):
        await process.go()
    path = process.directory.path / "control.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        fd = os.open(process.directory.path, os.O_PATH)
        listener.bind(f"/proc/self/fd/{fd}/control.sock")
        os.close(fd)
        listener.listen()
        with pytest.raises(RunnerGone, match="belongs to process"):
            await process.go()
    assert not await process.stop(CANCELLED)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"argv": []}, "field argv"),
        ({"argv": [1]}, "field argv"),
        ({"env": None}, "field env"),
        ({"kill_grace_seconds": "soon"}, "field kill_grace_seconds"),
        ({"log_head_bytes": 1.5}, "field log_head_bytes"),
    ],
)
async def test_a_spec_that_cannot_be_obeyed(attempts: Attempts, fields: dict[str, Any], text: str) -> None:
    directory, spec = attempts.make(["true"])
    directory.write_spec(spec)
    directory.write("spec.json", {**(directory.read("spec.json") or {}), **fields})
    code, said = await asyncio.to_thread(run_again, directory)
    assert code == runner.EXIT_BAD_SPEC
    assert text in said


async def test_without_a_spec_or_a_directory(attempts: Attempts, tmp_path: Path) -> None:
    assert run_again(AttemptDir(tmp_path / "missing"))[1].startswith("refused: [Errno 2]")
    assert run_again(AttemptDir(tmp_path))[0] == runner.EXIT_BAD_SPEC
    argv = [*PYTHON[:3], runner.__file__]
    assert subprocess.run(argv, check=False, capture_output=True).returncode == runner.EXIT_USAGE
