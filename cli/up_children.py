"""Two children that are kept running: whoever dies is started again after a back-off, and a stop ends both."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BACKOFF_SECONDS_MIN: Final = 0.5
BACKOFF_SECONDS_MAX: Final = 30.0
STEADY_SECONDS: Final = 60.0  # who ran so long starts at the shortest back-off again
END_SECONDS_MAX: Final = 20.0
LOG_BYTES_MAX: Final = 64 << 20
LOG_TAIL_BYTES: Final = 2048


def backoff_seconds(ended_early_in_a_row: int) -> float:
    """How long to wait before the next start."""
    return min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2.0 ** min(16, max(0, ended_early_in_a_row - 1)))


class StopSignal:
    """SIGTERM, SIGINT and SIGHUP as something that a poll can wait for."""

    def __init__(self) -> None:
        self.requested = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def _on_signal(self, *_: object) -> None:
        self.requested = True

    @contextlib.contextmanager
    def installed(self) -> Generator[StopSignal]:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = [(number, signal.signal(number, self._on_signal)) for number in numbers]
        wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before:
                signal.signal(number, handler)
            self.close()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(64):
                pass


@dataclass(slots=True)
class Child:
    name: str
    argv: Sequence[str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started_at: float = 0.0
    ended_early: int = 0
    start_at: float = 0.0  # when it is due, while it does not run

    def start(self, environ: Mapping[str, str]) -> None:
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES_MAX:
            self.log_path.rename(self.log_path.with_suffix(".log.1"))
        with open(self.log_path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
            # Sessions of their own: a Ctrl-C in the terminal reaches `lull up` alone, which ends them in order.
            self.process = subprocess.Popen(
                self.argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.started_at = time.monotonic()

    def reap(self) -> int | None:
        """Its exit code if it has ended; it is due again after its back-off."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        os.close(self.pidfd)
        self.process, self.pidfd = None, -1
        now = time.monotonic()
        self.ended_early = 1 if now - self.started_at >= STEADY_SECONDS else self.ended_early + 1
        self.start_at = now + backoff_seconds(self.ended_early)
        return code

    def last_words(self) -> str:
        """The last line of its log."""
        return (self.log_tail().splitlines() or ["it said nothing"])[-1]

    def log_tail(self) -> str:
        try:
            return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""


class Children:
    """Starts, watches and ends them. `on_change` is told after every start."""

    def __init__(
        self,
        children: Sequence[Child],
        environ: Mapping[str, str],
        on_change: Callable[[], None],
        say: Callable[[str], None],
        may_restart: Callable[[], bool],
    ) -> None:
        self.children = children
        self._environ = environ
        self._on_change = on_change
        self._say = say
        self._may_restart = may_restart

    def start(self, child: Child) -> None:
        child.start(self._environ)
        self._on_change()

    def watch(self, stop: StopSignal, *, until: Callable[[], bool] | None = None, seconds: float | None = None) -> bool:
        """Keeps them running until a stop is asked for, `until()` holds or the time is over; True if `until` held.

        While an `until` is given (the start), a child that ends is not started again: the caller says why it ended.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not stop.requested:
            if until is not None and until():
                return True
            ended = [child for child in self.children if child.reap() is not None]
            if until is not None and ended:
                return False
            for child in ended if self._may_restart() else ():
                wait = max(0.0, child.start_at - time.monotonic())
                self._say(f"{child.name} ended, started again in {wait:.1f} s: {child.last_words()}")
            if not self._may_restart():
                if all(child.process is None for child in self.children):
                    return False
            elif until is None:
                self._start_due()
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._poll(stop, deadline, step=0.1 if until is not None else 1.0)
        return False

    def _start_due(self) -> None:
        for child in self.children:
            if child.process is None and time.monotonic() >= child.start_at:
                self.start(child)

    def _poll(self, stop: StopSignal, deadline: float | None, step: float) -> None:
        poller = select.poll()
        poller.register(stop.fileno(), select.POLLIN)
        now = time.monotonic()
        due = [now + step] + ([] if deadline is None else [deadline])
        for child in self.children:
            if child.process is not None:
                poller.register(child.pidfd, select.POLLIN)
            elif child.start_at > now:
                due.append(child.start_at)
        poller.poll(max(0.0, min(due) - now) * 1000)
        stop.drain()

    def end(self) -> None:
        """SIGTERM to all, a bound, SIGKILL."""
        running = [child for child in self.children if child.process is not None]
        for child in running:
            if child.process is not None:
                child.process.terminate()
        deadline = time.monotonic() + END_SECONDS_MAX
        for child in running:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._say(f"{child.name} did not end within {END_SECONDS_MAX:.0f} s: killed")
                child.process.kill()
                child.process.wait()
            child.reap()
