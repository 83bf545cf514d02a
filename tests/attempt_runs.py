"""Attempts of real jobs for tests, with an end to every process that a failed test left."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path

from lull.agents import processes
from lull.agents.attempts import AttemptDir, AttemptProcess, RunnerSpec, read_log
from lull.agents.protocol.wire import ProcessIdentity
from tests.waiting import wait_until_async

BOUND_SECONDS = 20.0
PYTHON = [sys.executable, "-I", "-S", "-c"]


class Attempts:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: list[tuple[AttemptDir, RunnerSpec]] = []
        self._processes: list[AttemptProcess] = []

    def make(self, argv: list[str], **fields: object) -> tuple[AttemptDir, RunnerSpec]:
        """A directory that does not exist yet, and a spec for it."""
        attempt_id = str(uuid.uuid4())
        spec = RunnerSpec(attempt_id, "job-1", argv, {"PATH": os.environ["PATH"]}, kill_grace_seconds=5.0)
        made = AttemptDir(self.root / attempt_id), replace(spec, **fields)  # type: ignore[arg-type]
        self._made.append(made)
        return made

    async def launch(self, argv: list[str], **fields: object) -> AttemptProcess:
        directory, spec = self.make(argv, **fields)
        process = await AttemptProcess.launch(directory, spec)
        self._processes.append(process)
        return process

    async def run(self, argv: list[str], **fields: object) -> AttemptProcess:
        process = await self.launch(argv, **fields)
        await process.go()
        return process

    async def start(self, argv: list[str], said: bytes = b"ready\n", **fields: object) -> AttemptProcess:
        """A job that has said that it is ready."""
        process = await self.run(argv, **fields)
        await self.wait_said(process.directory, said)
        return process

    async def wait_said(self, directory: AttemptDir, said: bytes) -> bytes:
        def look() -> bytes | None:
            data = output(directory)
            return data if said in data else None

        return await wait_until_async(look, BOUND_SECONDS, f"the job saying {said!r}") or b""

    def end(self) -> None:
        for process in self._processes:
            process.detach()
        for directory, spec in self._made:
            runner = directory.identity() if directory.path.exists() else None
            if runner is not None:
                processes.send_signal(runner, signal.SIGKILL)
            processes.kill_leftovers(spec.attempt_id, None, BOUND_SECONDS)


def output(directory: AttemptDir, stream: str = "stdout") -> bytes:
    """All that is kept of a stream."""
    data, offset = b"", 0
    while True:
        chunk = read_log(directory.path, stream, offset)  # type: ignore[arg-type]
        if not chunk.data:
            return data
        data += chunk.data
        offset = chunk.next_offset


def alive(pid: int) -> ProcessIdentity | None:
    found = processes.identity(pid)
    return found if found is not None and processes.is_same(found) else None
