"""The agent's side of a job: starts its runner, talks to it, waits for its end, and finds it again after a restart.

A runner outlives the agent that started it; the next agent adopts it from what lies in the attempt's directory. Nothing
here keeps state that the directory does not: dropping an AttemptProcess never ends a job.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from . import processes
from .attempt_files import AttemptDir as AttemptDir
from .attempt_files import AttemptError as AttemptError
from .attempt_files import AttemptOutcome as AttemptOutcome
from .attempt_files import BadRecord as BadRecord
from .attempt_files import BadSpec as BadSpec
from .attempt_files import LaunchFailed as LaunchFailed
from .attempt_files import RunnerGone as RunnerGone
from .attempt_files import RunnerRefused as RunnerRefused
from .attempt_files import RunnerSilent as RunnerSilent
from .attempt_files import RunnerSpec as RunnerSpec
from .attempt_files import Started as Started
from .job_logs import LOG_CHUNK_BYTES_MAX as LOG_CHUNK_BYTES_MAX
from .job_logs import LogChunk as LogChunk
from .job_logs import LogStream as LogStream
from .job_logs import read_log as read_log
from .protocol.wire import AttemptEnd, ProcessIdentity
from .spare_runners import FreshRunner
from .spare_runners import SpareRunners as SpareRunners

_LAUNCH_SECONDS_MAX: Final = 10.0
_ANSWER_SECONDS_MAX: Final = 10.0
_ANSWER_BYTES_MAX: Final = 64 * 1024
_LOOK_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class RunnerStatus:
    state: Literal["waiting", "starting", "running", "stopping", "sweeping", "ended"]
    end: AttemptEnd | None
    job: ProcessIdentity | None
    restore_by_boottime: float | None
    log_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Adopted:
    """Exactly one of the three. ``never_started``: no runner came up here, and the same attempt may be launched."""

    process: AttemptProcess | None = None
    outcome: AttemptOutcome | None = None
    never_started: bool = False


class AttemptProcess:
    """A runner that lives, or lived when this was made. Use it in the event loop that made it."""

    def __init__(self, directory: AttemptDir, runner: ProcessIdentity, pidfd: int, *, is_child: bool) -> None:
        self.directory = directory
        self.runner = runner
        self._pidfd = pidfd
        self._is_child = is_child
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._judging: asyncio.Task[AttemptOutcome] | None = None
        self._loop.add_reader(pidfd, self._on_exit)

    @classmethod
    async def launch(
        cls,
        directory: AttemptDir,
        spec: RunnerSpec,
        *,
        spares: SpareRunners | None = None,
        seconds_max: float = _LAUNCH_SECONDS_MAX,
    ) -> AttemptProcess:
        """Brings up a runner, which then waits for `go`; returns the one that is already there, if one is."""
        await asyncio.to_thread(directory.write_spec, spec)
        fresh = (None if spares is None else spares.take(directory.path)) or FreshRunner.start(directory.path)
        word = await fresh.first_line(seconds_max)
        runner = directory.identity() if word == "ready" else None
        if runner is not None and runner.pid == fresh.pid:
            return cls(directory, runner, fresh.keep(), is_child=True)
        fresh.end()
        adopted = await cls.adopt(directory)
        if adopted.process is not None:
            return adopted.process
        raise LaunchFailed(f"{directory.path}: {word or 'the runner ended without a word: see runner.log'}")

    @classmethod
    async def adopt(cls, directory: AttemptDir, *, seconds_max: float = _LAUNCH_SECONDS_MAX) -> Adopted:
        """What became of an attempt: its live runner, its outcome, or that no runner ever came up."""
        runner = await _await_identity(directory, seconds_max)
        # A live runner comes before any record: only its end says that nothing of the job lives.
        pidfd = None if runner is None else processes.open_process(runner)
        if runner is not None and pidfd is not None:
            is_child = os.getpid() == _parent_of(runner.pid)
            if not processes.has_exited(pidfd):
                return Adopted(process=cls(directory, runner, pidfd, is_child=is_child))
            os.close(pidfd)
            if is_child:
                _reap(runner.pid)
        if runner is None and not directory.was_used():
            return Adopted(never_started=True)
        return Adopted(outcome=await asyncio.to_thread(directory.settle))

    @property
    def job(self) -> ProcessIdentity | None:
        """None until started.json is there."""
        started = self.directory.started()
        return None if started is None else started.job

    async def go(self) -> ProcessIdentity | None:
        """Executes the job, once however often this is called. None if it ended at once: see `wait_ended`."""
        return (await self._ask({"do": "go"})).job

    async def stop(self, end: Literal[AttemptEnd.CANCELLED, AttemptEnd.PREEMPTED]) -> bool:
        """Asks for the end: SIGTERM now, SIGKILL after the grace. False if there is no runner to ask any more."""
        try:
            await self._ask({"do": "stop", "end": end.value})
        except RunnerGone:
            return False
        return True

    async def set_restore_by(self, boottime: float | None) -> bool:
        """False if there is no runner to ask any more."""
        try:
            await self._ask({"do": "restore_by", "boottime": boottime})
        except RunnerGone:
            return False
        return True

    async def status(self) -> RunnerStatus:
        return await self._ask({"do": "status"})

    async def wait_exited(self, seconds_max: float) -> bool:
        """True as soon as the runner has exited; False if it lives on after ``seconds_max``."""
        await asyncio.wait((self._exited,), timeout=seconds_max)
        return self._exited.done()

    async def wait_ended(self) -> AttemptOutcome:
        """Also judges, and clears away what is left, when the runner ended without a record.

        Raises AttemptError or OSError where that cannot be judged now: ask again.
        """
        await asyncio.shield(self._exited)
        if self._judging is None:
            self._judging = self._loop.create_task(asyncio.to_thread(self.directory.settle))
        try:
            return await asyncio.shield(self._judging)
        except (AttemptError, OSError):
            self._judging = None
            raise

    def detach(self) -> None:
        """Lets go of the runner, which goes on. For an agent that ends."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._exited.cancel()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._is_child:
            _reap(self.runner.pid)
        if not self._exited.done():
            self._exited.set_result(None)

    async def _ask(self, request: dict[str, Any]) -> RunnerStatus:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS_MAX):
                line = await self._exchange(json.dumps(request).encode("ascii") + b"\n")
        except TimeoutError:
            raise RunnerSilent(f"{self.directory.path}: no answer to {request} in {_ANSWER_SECONDS_MAX} s") from None
        except OSError as error:
            raise RunnerGone(f"{self.directory.path}: {error}") from None
        if not line.endswith(b"\n"):
            raise RunnerGone(f"{self.directory.path}: the runner ended instead of answering {request}")
        answer = json.loads(line)
        if not answer["ok"]:
            raise RunnerRefused(f"{self.directory.path}: {answer['error']}")
        return self._status(answer)

    async def _exchange(self, line: bytes) -> bytes:
        # The path of a socket has at most 107 bytes; the one through a descriptor is short wherever the directory is.
        directory = os.open(self.directory.path, os.O_PATH | os.O_DIRECTORY)
        try:
            reader, writer = await asyncio.open_unix_connection(
                f"/proc/self/fd/{directory}/control.sock", limit=_ANSWER_BYTES_MAX
            )
        finally:
            os.close(directory)
        try:
            credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid: int = struct.unpack("3i", credentials)[0]
            if pid != self.runner.pid:
                raise ConnectionRefusedError(f"control.sock belongs to process {pid}, not to runner {self.runner.pid}")
            writer.write(line)
            return await reader.readline()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _status(self, answer: dict[str, Any]) -> RunnerStatus:
        job: dict[str, int] | None = answer["job"]
        return RunnerStatus(
            state=answer["state"],
            end=None if answer["end"] is None else AttemptEnd(answer["end"]),
            job=None if job is None else ProcessIdentity(boot_id=self.runner.boot_id, **job),
            restore_by_boottime=answer["restore_by_boottime"],
            log_bytes=answer["log_bytes"],
        )


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _parent_of(pid: int) -> int | None:
    stat = processes.read_stat(pid)
    return None if stat is None else stat.parent_pid


async def _await_identity(directory: AttemptDir, seconds_max: float) -> ProcessIdentity | None:
    """None when no runner has been here and none is just coming up, or none can be told any more."""
    deadline = asyncio.get_running_loop().time() + seconds_max
    while True:
        runner = _readable_identity(directory)
        if runner is not None or not directory.path.is_dir():
            return runner
        with directory.runner_lock(0.0) as ours:
            if ours:
                return _readable_identity(directory)
        if asyncio.get_running_loop().time() >= deadline:
            raise AttemptError(f"{directory.path}: a runner holds the lock and does not come up")
        await asyncio.sleep(_LOOK_SECONDS)


def _readable_identity(directory: AttemptDir) -> ProcessIdentity | None:
    with suppress(BadRecord):  # while a runner lives it holds the lock, and once it does not the attempt is judged
        return directory.identity()
    return None
