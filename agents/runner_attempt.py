"""One attempt, from `go` to exit.json: the loop that owns the job, its limits, its logs and the control socket.

States: waiting -> starting -> running -> sweeping -> ended. All deadlines are on CLOCK_BOOTTIME.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn

from .runner_files import StreamLog, boottime, put
from .runner_processes import (
    STATUS_BYTES_MAX,
    WALL,
    become_job,
    descendants,
    signal_descendant,
    spawn_message,
    stat_of,
)

EXIT_NO_RECORD: Final = 74

_LINE_BYTES_MAX: Final = 4096
_CLIENTS_MAX: Final = 16
_PIPE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
_READS_PER_TURN: Final = 16
_PIDS_IN_RECORD_MAX: Final = 64
_STRAGGLER_GRACE_SECONDS: Final = 2.0
_UNKILLABLE_SECONDS: Final = 60.0
_ROUND_SECONDS_MAX: Final = 0.2
_RECORD_RETRY_SECONDS_MAX: Final = 600.0
_WAIT_SECONDS_MAX: Final = 5.0  # poll counts no time asleep, our deadlines do: look again now and then


class Runner:
    def __init__(self, spec: dict[str, Any], umask: int) -> None:
        self.spec = spec
        self.umask = umask
        self.state = "waiting"  # then starting, running, sweeping
        self.end: str | None = None  # why it is being ended, once somebody decided that
        self.message: str | None = None
        self.job_pid = 0
        self.job_ticks = 0
        self.exec_status = -1
        self.status: int | None = None  # of waitpid
        self.started_at: float | None = None
        self.started_boottime = math.inf
        self.restore_by: float | None = spec["restore_by_boottime"]
        self.go_by: float = boottime() + spec["go_seconds_max"]
        self.kill_at = math.inf
        self.next_round_at = 0.0
        self.round_seconds = 0.005
        self.unkillable_at = math.inf
        self.has_children = False
        self.stragglers: set[tuple[int, int]] = set()
        self.stragglers_told = False
        self.started_unwritten = False
        self.told_to_end = False
        self.logs = {
            name: StreamLog(name, spec["log_head_bytes"], spec["log_tail_bytes"]) for name in ("stdout", "stderr")
        }
        self.pipes: dict[int, StreamLog] = {}
        self.clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self.awaiting_start: list[int] = []
        self.poller = select.poll()
        self.readers: dict[int, Callable[[], None]] = {}
        self._listen()
        self._catch_signals()

    # ---- the loop

    def run(self) -> NoReturn:
        while True:
            now = boottime()
            wait = min(max(self._next_look() - now, 0.0), _WAIT_SECONDS_MAX)
            for fd, _ in self.poller.poll(wait * 1000):
                if fd in self.readers:
                    self.readers[fd]()
            self._reap()
            self._advance(boottime())

    def _next_look(self) -> float:
        if self.state == "waiting":
            return self.go_by
        if self.state == "sweeping" or self.kill_at < math.inf:
            return max(self.kill_at, self.next_round_at)
        retry = boottime() + 1.0 if self.started_unwritten else math.inf
        return min(self._limit_at(), math.inf if self.restore_by is None else self.restore_by, retry)

    def _limit_at(self) -> float:
        seconds: float | None = self.spec["time_limit_seconds"]
        return math.inf if seconds is None else self.started_boottime + seconds

    def _advance(self, now: float) -> None:
        if self.told_to_end:  # by SIGTERM: the node goes down
            self.told_to_end = False
            self.stop("preempted")
        if self.state == "waiting":
            if now >= self.go_by:
                self._finish("not_started", message="no go came in time")
            return
        if self.started_unwritten:
            self._write_started()
        if self.state == "sweeping":
            self._sweep(now)
        elif now >= self._limit_at():
            self.stop("timed_out")
        elif self.restore_by is not None and now >= self.restore_by:
            self.stop("preempted")
        if now >= self.kill_at and now >= self.next_round_at:
            self._kill_round(now)

    def _watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self.readers[fd] = on_readable
        self.poller.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        self.readers.pop(fd)
        self.poller.unregister(fd)

    def _catch_signals(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        self._watch(wake_read, lambda: _drain(wake_read))
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self.told_to_end = True

    # ---- the job

    def go(self) -> None:
        if self.restore_by is not None and boottime() >= self.restore_by:
            self._finish("not_started", message="restore_by was reached before the start")
        try:
            put("starting.json", {"at": time.time(), "boottime": boottime()})
        except OSError as error:
            self._finish("not_started", message=f"starting.json could not be written: {error}")
        self.state = "starting"
        runner_pid = os.getpid()
        try:
            (out, out_end), (err, err_end), (status, status_end) = os.pipe(), os.pipe(), os.pipe()
            self.started_at, self.started_boottime = time.time(), boottime()
            self.job_pid = os.fork()
        except OSError as error:
            self._finish("spawn_failed", message=f"no process could be made: {error}")
        if self.job_pid == 0:
            become_job(self.spec, runner_pid, out_end, err_end, status_end, self.umask)
        stat = stat_of(self.job_pid)
        self.job_ticks = stat[1] if stat is not None else 0
        for fd in (out_end, err_end, status_end):
            os.close(fd)
        for fd, name in ((out, "stdout"), (err, "stderr")):
            with contextlib.suppress(OSError):  # no pages left for larger pipes: the default size does
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self.pipes[fd] = self.logs[name]
            self._watch(fd, functools.partial(self._pump, fd, _READS_PER_TURN))
        self.exec_status = status
        self._watch(status, lambda: self._on_exec(status))

    def _on_exec(self, status: int) -> None:
        """End of file: exec closed our end, the job runs. Anything else: why it does not."""
        try:
            told = os.read(status, STATUS_BYTES_MAX)
        except BlockingIOError:
            return
        self._unwatch(status)
        os.close(status)
        if told:
            self.end, self.message = "spawn_failed", spawn_message(self.spec, *json.loads(told))
        else:
            self._write_started()
        self.state = "running"
        for fd in self.awaiting_start:
            self._reply(fd, self._view())
        self.awaiting_start.clear()
        if self.kill_at < math.inf:
            self._signal_group(signal.SIGTERM)

    def _write_started(self) -> None:
        job = {"pid": self.job_pid, "start_ticks": self.job_ticks}
        try:
            put("started.json", {**job, "at": self.started_at, "boottime": self.started_boottime})
        except OSError:
            self.started_unwritten = True  # a full disk: the job goes on, the record is tried again
        else:
            self.started_unwritten = False

    def _pump(self, fd: int, reads: int) -> None:
        for _ in range(reads):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._unwatch(fd)
                del self.pipes[fd]
                os.close(fd)
                return
            self.pipes[fd].write(data)

    def _reap(self) -> None:
        if self.state == "waiting":
            return
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | WALL)
            except ChildProcessError:
                self.has_children = False
                return
            if pid == 0:
                self.has_children = True
                return
            if pid == self.job_pid and self.status is None:
                if self.state == "starting":
                    self._on_exec(self.exec_status)
                self.status = status
                self.state = "sweeping"

    # ---- ending it

    def stop(self, end: str) -> None:
        """The first cause stands, but a user's cancel outranks a preemption: the job must not be queued again."""
        if self.state == "waiting":
            self._finish("cancelled" if end == "cancelled" else "not_started", message="stopped before go")
        if self.state == "sweeping":  # the result is already fixed; only the grace of what is left is over
            self.kill_at = boottime()
            return
        if self.end is None or (self.end == "preempted" and end == "cancelled"):
            self.end = end
        if self.kill_at == math.inf:
            self.kill_at = boottime() + self.spec["kill_grace_seconds"]
            if self.state == "running":
                self._signal_group(signal.SIGTERM)
                self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        """Only while the job's first process is not yet waited for: until then its group's number is not used again."""
        try:
            os.killpg(self.job_pid, number)
        except OSError:  # it has not made its group yet
            with contextlib.suppress(OSError):
                os.kill(self.job_pid, number)

    def _sweep(self, now: float) -> None:
        if not self.has_children:
            self._finish(*self._result())
        if not self.stragglers_told:
            self.stragglers_told = True
            self._signal_descendants(signal.SIGTERM)
            grace = min(self.spec["kill_grace_seconds"], _STRAGGLER_GRACE_SECONDS)
            self.kill_at = min(self.kill_at, now + grace)

    def _signal_descendants(self, number: int) -> list[int]:
        living: list[int] = []
        for pid, (ticks, alive) in descendants().items():
            living.append(pid)
            if alive and signal_descendant(pid, ticks, number) and pid != self.job_pid:
                self.stragglers.add((pid, ticks))
        return living

    def _kill_round(self, now: float) -> None:
        if self.state != "sweeping":
            self._signal_group(signal.SIGKILL)
        left = self._signal_descendants(signal.SIGKILL)
        if self.unkillable_at == math.inf:
            self.unkillable_at = now + self.spec.get("unkillable_seconds_max", _UNKILLABLE_SECONDS)
        elif now >= self.unkillable_at and left:
            self._finish(*self._result(), cleanup={"code": "unkillable", "pids": sorted(left)[:_PIDS_IN_RECORD_MAX]})
        self.next_round_at = now + self.round_seconds
        self.round_seconds = min(self.round_seconds * 2, _ROUND_SECONDS_MAX)

    def _result(self) -> tuple[str, str | None]:
        if self.end is not None:
            return self.end, self.message
        signalled = self.status is not None and os.WIFSIGNALED(self.status)
        return ("signalled" if signalled else "exited"), None

    def _finish(self, end: str, message: str | None = None, *, cleanup: dict[str, Any] | None = None) -> NoReturn:
        for fd in list(self.pipes):
            self._pump(fd, 2 * _PIPE_BYTES // _READ_BYTES)
        for log in self.logs.values():
            log.close()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        status = self.status if end != "spawn_failed" else None
        ran = self.started_at is not None and end != "spawn_failed"
        record: dict[str, Any] = {
            "end": end,
            "exit_code": os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            "started_at": self.started_at if ran else None,
            "ended_at": time.time(),
            "boottime": boottime(),
            "stragglers_killed": len(self.stragglers),
            "cleanup": cleanup,
            "message": message,
            "peak_rss_bytes": usage.ru_maxrss * 1024 if ran else None,
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 6) if ran else None,
            "log_bytes": {name: log.total for name, log in self.logs.items()},
        }
        give_up_at = boottime() + _RECORD_RETRY_SECONDS_MAX
        while True:
            try:
                put("exit.json", record, reserved=True)
                break
            except OSError as error:
                if boottime() >= give_up_at:
                    os.write(2, f"exit.json could not be written: {error}\n".encode())
                    os._exit(EXIT_NO_RECORD)
                select.select([], [], [], 1.0)
        self.state, self.end = "ended", end
        for fd in self.awaiting_start:
            self._reply(fd, self._view())
        os._exit(0)

    # ---- the socket

    def _listen(self) -> None:
        if os.path.lexists("control.sock"):
            os.unlink("control.sock")  # of a runner that died before it was told to go: we hold the lock
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("control.sock")
        os.chmod("control.sock", 0o600)
        listener.listen(_CLIENTS_MAX)
        self._watch(listener.fileno(), lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        if len(self.clients) >= _CLIENTS_MAX:  # never let idle ones keep the agent out
            self._drop(next(iter(self.clients)))
        fd = client.fileno()
        self.clients[fd] = (client, bytearray())
        self._watch(fd, lambda: self._on_readable(fd))

    def _drop(self, fd: int) -> None:
        self._unwatch(fd)
        self.clients.pop(fd)[0].close()
        if fd in self.awaiting_start:
            self.awaiting_start.remove(fd)

    def _on_readable(self, fd: int) -> None:
        client, buffer = self.clients[fd]
        try:
            data = client.recv(_LINE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(fd)
            return
        buffer += data
        while (end := buffer.find(b"\n")) >= 0 and fd in self.clients:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            try:
                self._obey(fd, json.loads(line))
            except (ValueError, RecursionError) as error:
                self._reply(fd, {"ok": False, "error": str(error)})
        if len(buffer) > _LINE_BYTES_MAX and fd in self.clients:
            self._reply(fd, {"ok": False, "error": f"a request has at most {_LINE_BYTES_MAX} bytes"})
            self._drop(fd)

    def _obey(self, fd: int, request: Any) -> None:
        match request:
            case {"do": "go"}:
                if self.state in ("waiting", "starting"):
                    self.awaiting_start.append(fd)
                    if self.state == "waiting":
                        self.go()
                    return
            case {"do": "stop", "end": "cancelled" | "preempted" as end}:
                if self.state == "waiting":
                    self.awaiting_start.append(fd)  # answered with the end
                self.stop(end)
            case {"do": "restore_by", "boottime": None | int() | float() as at} if at is None or math.isfinite(at):
                self.restore_by = at
            case {"do": "status"}:
                pass
            case _:
                raise ValueError(
                    'unknown request: {"do": "go" | "status"}, {"do": "stop", "end": "cancelled" | "preempted"}, '
                    '{"do": "restore_by", "boottime": seconds | null}'
                )
        self._reply(fd, self._view())

    def _view(self) -> dict[str, Any]:
        started = self.state in ("running", "sweeping", "ended") and self.job_pid and self.end != "spawn_failed"
        return {
            "ok": True,
            "state": self.state if self.kill_at == math.inf or self.state == "ended" else "stopping",
            "end": self.end,
            "job": {"pid": self.job_pid, "start_ticks": self.job_ticks} if started else None,
            "restore_by_boottime": self.restore_by,
            "log_bytes": {name: log.total for name, log in self.logs.items()},
        }

    def _reply(self, fd: int, reply: dict[str, Any]) -> None:
        if fd not in self.clients:
            return
        content = json.dumps(reply).encode("ascii") + b"\n"
        try:
            sent = self.clients[fd][0].send(content)
        except OSError:
            sent = 0
        if sent < len(content):  # gone, or it does not read: it asks again
            self._drop(fd)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Caught, so that the wake-up descriptor becomes readable."""


def _drain(fd: int) -> None:
    try:
        os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return
