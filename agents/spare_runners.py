"""Starts runners, and keeps one up ahead of its job: most of a start is Python's own, and a job need not wait for it.

A spare has no directory, so it can execute nothing; it ends with the agent that started it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

from .attempt_files import LaunchFailed

_RUNNER: Final = Path(__file__).with_name("runner.py")
_RUNNER_ENV: Final = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")  # the job's environment comes from its spec alone
_FIRST_LINE_BYTES_MAX: Final = 4096
_REFILL_SECONDS: Final = 0.25  # not while the job that took the last one is starting


class FreshRunner:
    """A runner process from its start until it says that it is ready. It is our child and not yet waited for."""

    def __init__(self, pid: int, told: int, order: int | None) -> None:
        self.pid = pid
        self._told = told
        self._order = order
        self._pidfd = os.pidfd_open(pid)

    @classmethod
    def start(cls, directory: Path | None) -> FreshRunner:
        """Without a directory: a spare, which waits for `assign`. It gets nothing of ours but a few variables."""
        told, tell = os.pipe()
        source, order = os.pipe() if directory is None else (os.open(os.devnull, os.O_RDONLY), None)
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(_RUNNER), "-" if directory is None else str(directory.absolute())],
                {name: os.environ[name] for name in _RUNNER_ENV if name in os.environ} | {"LC_ALL": "C.UTF-8"},
                file_actions=[(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, tell, 1)],
                setsid=True,
                setsigmask=[],
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        except BaseException:
            os.close(told)
            if order is not None:
                os.close(order)
            raise
        finally:
            os.close(tell)
            os.close(source)
        return cls(pid, told, order)

    def assign(self, directory: Path) -> bool:
        """False if this spare is gone."""
        if self._order is None:
            return False
        try:
            os.write(self._order, os.fsencode(directory.absolute()) + b"\n")
        except BrokenPipeError:
            return False
        os.close(self._order)
        self._order = None
        return True

    async def first_line(self, seconds_max: float) -> str:
        """What it said before the end of line or of file. If it says nothing in time, it is ended."""
        loop = asyncio.get_running_loop()
        said = bytearray()
        done: asyncio.Future[None] = loop.create_future()

        def on_readable() -> None:
            data = os.read(self._told, _FIRST_LINE_BYTES_MAX)
            said.extend(data)
            if (not data or b"\n" in data or len(said) >= _FIRST_LINE_BYTES_MAX) and not done.done():
                loop.remove_reader(self._told)
                done.set_result(None)

        loop.add_reader(self._told, on_readable)
        try:
            async with asyncio.timeout(seconds_max):
                await done
        except TimeoutError:
            self.end()
            raise LaunchFailed(f"the runner did not come up in {seconds_max} s") from None
        except BaseException:
            self.end()
            raise
        finally:
            loop.remove_reader(self._told)
        return said.decode("utf-8", "replace").strip()

    def keep(self) -> int:
        """Its pidfd; from here on its owner waits for it."""
        os.close(self._told)
        return self._pidfd

    def end(self) -> None:
        """Of one that refused or was not wanted: it was never told to go."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in (self._told, self._pidfd, self._order):
            if fd is not None:
                os.close(fd)


class SpareRunners:
    """One runner up and waiting for a directory. Use it in one event loop; close it there."""

    def __init__(self) -> None:
        self._spare: FreshRunner | None = None
        self._refill: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._refill = None
        if self._spare is None:
            self._spare = FreshRunner.start(None)

    def take(self, directory: Path) -> FreshRunner | None:
        """The spare, sent to ``directory``; None if there is none just now."""
        spare, self._spare = self._spare, None
        if self._refill is None:
            self._refill = asyncio.get_running_loop().call_later(_REFILL_SECONDS, self.start)
        if spare is not None and not spare.assign(directory):
            spare.end()
            return None
        return spare

    def close(self) -> None:
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        if self._spare is not None:
            self._spare.end()
            self._spare = None
