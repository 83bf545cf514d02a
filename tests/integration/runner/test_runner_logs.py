"""A job's output through its runner: capped, exact, never a reason for the job to stop."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lull.agents.attempts import read_log
from lull.agents.protocol.wire import AttemptEnd
from tests.attempt_runs import BOUND_SECONDS, PYTHON, Attempts, output
from tests.waiting import wait_until_async

LINE = b"%015d\n"


async def test_head_gap_and_tail_of_a_flood(attempts: Attempts) -> None:
    lines = 400_000
    code = (
        f"import os\nfor i in range(0, {lines}, 1000): os.write(1, b''.join({LINE!r} % j for j in range(i, i + 1000)))"
    )
    process = await attempts.run([*PYTHON, code], log_head_bytes=100_000, log_tail_bytes=800_000)
    assert (await process.wait_ended()).exit_code == 0
    total = lines * 16
    head = read_log(process.directory.path, "stdout", 0)
    assert (head.offset, head.gap_bytes, head.next_offset, head.total_bytes) == (0, 0, 100_000, total)
    chunk = read_log(process.directory.path, "stdout", 100_000)
    assert chunk.gap_bytes == chunk.offset - 100_000 > 0
    data, tail_begin = b"", chunk.offset
    while chunk.data:
        assert chunk.data
        data += chunk.data
        chunk = read_log(process.directory.path, "stdout", chunk.next_offset)
        assert chunk.gap_bytes == 0
    assert chunk.ended
    assert chunk.next_offset == total
    assert 700_000 <= len(data) <= 800_000
    whole = b"".join(LINE % j for j in range(lines))
    assert head.data == whole[:100_000]
    assert data == whole[tail_begin:]
    kept = sum(path.stat().st_size for path in (process.directory.path / "logs/stdout").iterdir())
    assert kept <= 900_000


async def test_output_can_be_followed_while_the_job_runs(attempts: Attempts) -> None:
    process = await attempts.start(["sh", "-c", "echo ready; read line < go; echo $line"], workdir=make_fifo(attempts))
    chunk = read_log(process.directory.path, "stdout", 0)
    assert (chunk.data, chunk.ended, chunk.next_offset) == (b"ready\n", False, 6)
    assert read_log(process.directory.path, "stdout", 6).data == b""
    with open(attempts.root / "go", "w") as fifo:
        fifo.write("on\n")
    await attempts.wait_said(process.directory, b"ready\non\n")
    await process.wait_ended()
    chunk = read_log(process.directory.path, "stdout", 6)
    assert (chunk.data, chunk.ended) == (b"on\n", True)
    assert read_log(process.directory.path, "stderr", 0).ended


def make_fifo(attempts: Attempts) -> str:
    attempts.root.mkdir(parents=True)
    os.mkfifo(attempts.root / "go")
    return str(attempts.root)


async def test_output_of_a_daemon_is_kept_to_its_end(attempts: Attempts) -> None:
    daemon = "trap 'echo last words; exit' TERM; echo ready; echo > go; while :; do sleep 1000 & wait; done"
    script = f"({daemon}) & read line < go; echo parent"  # it ends no sooner: its end is the daemon's TERM
    process = await attempts.start(["sh", "-c", script], workdir=make_fifo(attempts), kill_grace_seconds=5.0)
    assert (await process.wait_ended()).end == AttemptEnd.EXITED
    assert b"last words\n" in output(process.directory)


async def test_a_full_disk_stops_neither_job_nor_record(attempts: Attempts) -> None:
    """In a mount namespace of its own: a file system with room for the records and little else."""
    script = """
import asyncio, os, sys
from pathlib import Path
from lull.agents.attempts import AttemptDir, AttemptProcess, RunnerSpec, read_log

async def main():
    root = Path(sys.argv[1])
    directory = AttemptDir(root / "a1")
    # It fills the disk by its output, and goes on after.
    code = "import os; [os.write(1, b'x' * 65536) for _ in range(64)]; os.write(2, b'after')"
    spec = RunnerSpec("a1", "j", [sys.executable, "-I", "-S", "-c", code], {}, log_head_bytes=1 << 24)
    process = await AttemptProcess.launch(directory, spec)
    await process.go()
    outcome = await process.wait_ended()
    full = os.statvfs(root).f_bavail <= 1  # the end of the reserved record
    last = read_log(directory.path, "stdout", 4 << 20)
    gap = read_log(directory.path, "stdout", 1 << 20)
    print(outcome.end, outcome.exit_code, full, last.total_bytes, last.ended, gap.gap_bytes > 0)

asyncio.run(main())
"""
    attempts.root.mkdir(parents=True)
    mount = f'mount -t tmpfs -o size=512k none {attempts.root} && exec {sys.executable} -c "$0" {attempts.root}'
    argv = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"exited 0 True {4 << 20} True True\n"


async def test_logs_of_a_job_that_never_wrote(attempts: Attempts) -> None:
    process = await attempts.run(["sh", "-c", "echo ready >&2; exec sleep 1000"])
    chunk = read_log(process.directory.path, "stdout", 0)
    assert (chunk.data, chunk.ended, chunk.total_bytes) == (b"", False, 0)
    await wait_until_async(lambda: output(process.directory, "stderr") == b"ready\n", BOUND_SECONDS, "its words")
