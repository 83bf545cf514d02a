"""The driver's checkpoint calls, made by a process of their own and waited for with a bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import structlog

from ..errors import EngineTimedOut, EngineUnreachable
from .checkpoint_child import ASKING

log = structlog.get_logger(__name__)

NOT_INITIALIZED: Final = 3  # of a process without a CUDA context, too (cuda-checkpoint#10)
INVALID_VALUE: Final = 1
NOT_READY: Final = 600  # a lock did not get through in time; nothing changed
_START_SECONDS: Final = 20.0  # a first call imports the bindings and initializes the driver
_LINE_BYTES_MAX: Final = 64 << 10
_KILLED_AT_DEADLINE: Final = ASKING | {"lock"}


class ProcessState(IntEnum):
    """CUprocessState, the newer ones included."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5


class CheckpointMissing(EngineUnreachable):
    """The calls cannot be made on this machine: no driver, no bindings, or too old ones. Says nothing of an engine."""


class CheckpointBusy(EngineTimedOut):
    """A call of ours, or of an agent before us, is still under way on one of the devices."""


@dataclass(frozen=True, slots=True)
class Code:
    """What the driver answered. ``value``: of calls that have one."""

    code: int
    name: str
    value: int | None

    @property
    def is_success(self) -> bool:
        return self.code == 0


class CheckpointDriver:
    """At most one child. ``lock_paths``: one for each device, by which calls that change something take turns."""

    def __init__(self, lock_paths: Sequence[Path]) -> None:
        self._lock_paths = [str(path) for path in lock_paths]
        self._turn = asyncio.Lock()
        self._child: tuple[int, int] | None = None  # its pidfd, our end of its pipe
        self._next_id = 0
        self._is_new = True
        self._changing = 0

    @property
    def is_changing(self) -> bool:
        """A call that changes something is under way, or is next: an answer to a question may take as long."""
        return self._changing > 0

    async def call(
        self, verb: str, pid: int, seconds_max: float, *, timeout_ms: int = 0, wait_seconds: float = 0.0
    ) -> Code:
        """Raises EngineTimedOut where it did not answer in time: then what it did is unknown. A question or a lock is
        killed then; a call that moves memory is left to its end, and what comes after it waits (CheckpointBusy).
        Raises CheckpointMissing where such calls cannot be made."""
        changes = verb not in ASKING
        self._changing += changes
        try:
            return await self._call(verb, pid, seconds_max, timeout_ms, wait_seconds)
        finally:
            self._changing -= changes

    async def _call(self, verb: str, pid: int, seconds_max: float, timeout_ms: int, wait_seconds: float) -> Code:
        async with self._turn:
            if self._child is None:
                self._start()
            self._next_id += 1
            asked = {"id": self._next_id, "verb": verb, "pid": pid}
            asked |= {"timeout_ms": timeout_ms, "wait_seconds": wait_seconds}
            bound = seconds_max + wait_seconds + (_START_SECONDS if self._is_new else 0.0)
            told: dict[str, Any] = {}
            try:
                async with asyncio.timeout(bound):
                    told = await self._exchange(json.dumps(asked).encode() + b"\n")
            except TimeoutError as error:
                raise EngineTimedOut(f"the driver did not answer {verb} of pid {pid} in {seconds_max:g} s") from error
            finally:
                if not told:  # cancelled, too: an answer that comes later would be taken for another call's
                    self._leave(kill=verb in _KILLED_AT_DEADLINE)
            self._is_new = False
        if told.get("busy"):
            raise CheckpointBusy(f"another checkpoint call is under way; {verb} of pid {pid} was not made")
        if "missing" in told:
            raise CheckpointMissing(f"checkpoint calls cannot be made here: {told['missing']}")
        return Code(int(told["code"]), str(told["name"]), told["value"])

    def close(self) -> None:
        """The child ends once it has answered what it was asked."""
        self._leave(kill=False)

    def _start(self) -> None:
        try:
            self._child = _spawned(self._lock_paths)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread
            raise CheckpointMissing(f"no process for checkpoint calls: {error}") from error
        self._is_new = True

    def _leave(self, *, kill: bool) -> None:
        if self._child is None:
            return
        pidfd, fd = self._child
        self._child = None
        if kill:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        os.close(fd)

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        """Raises CheckpointMissing where the child ended instead of answering."""
        assert self._child is not None
        fd = self._child[1]
        try:
            os.write(fd, line)
            text = await _read_line(fd)
        except OSError as error:
            raise CheckpointMissing(f"the process for checkpoint calls is gone: {error.strerror}") from error
        if not text:
            raise CheckpointMissing("the process for checkpoint calls ended")
        try:
            told: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as error:  # a library may write to its output too
            raise CheckpointMissing(f"the process for checkpoint calls answered {text[:100]!r}") from error
        return told


def _spawned(lock_paths: Sequence[str]) -> tuple[int, int]:
    """A child's pidfd and our end of its pipe. Raises OSError and RuntimeError, with nothing left behind."""
    with contextlib.ExitStack() as undo:
        ours, its = socket.socketpair()
        undo.enter_context(ours)
        with its:
            ours.setblocking(False)
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-m", f"{__package__}.checkpoint_child", *lock_paths],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, its.fileno(), 0), (os.POSIX_SPAWN_DUP2, its.fileno(), 1)],
                setsid=True,
                setsigmask=[],
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        undo.callback(_reap, pid)
        undo.callback(os.kill, pid, signal.SIGKILL)
        pidfd = os.pidfd_open(pid)
        undo.callback(os.close, pidfd)
        # Not by the event loop, whose child transports kill at their end.
        threading.Thread(target=_reap, args=(pid,), name="reaper of checkpoint calls", daemon=True).start()
        undo.pop_all()
        return pidfd, ours.detach()


async def _read_line(fd: int) -> bytes:
    """Empty at the end of it."""
    loop = asyncio.get_running_loop()
    kept = b""
    while not kept.endswith(b"\n") and len(kept) < _LINE_BYTES_MAX:
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(fd, _wake, readable)
        try:
            await readable
        finally:
            loop.remove_reader(fd)
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(fd, _LINE_BYTES_MAX)
            if not chunk:
                return b""
            kept += chunk
    return kept


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
