"""Which process is which on this node, and how one is signalled without ever hitting another.

A pid alone names nothing: it is used again. A process is (boot id, pid, start time), and a signal goes through a pidfd
that was opened first and compared with that identity after.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .protocol.wire import ProcessIdentity

_PROC = Path("/proc")
_COMMAND_BYTES_MAX = 1024 * 1024
_ENVIRON_BYTES_MAX = 4 * 1024 * 1024
_KILL_ROUND_SECONDS = 0.05


@functools.cache
def boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that tell processes apart and say whose they are."""

    pid: int
    state: str
    parent_pid: int
    group: int
    session: int
    threads: int
    start_ticks: int

    @property
    def is_zombie(self) -> bool:
        """Dead but not yet waited for. A dead first thread beside live ones is no zombie: it still holds memory."""
        return self.state in ("Z", "X") and self.threads <= 1


def read_stat(pid: int) -> ProcessStat | None:
    """None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold both parentheses and blanks: only the last one ends it.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        state=fields[0].decode("ascii"),
        parent_pid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def start_ticks(pid: int) -> int | None:
    stat = read_stat(pid)
    return None if stat is None else stat.start_ticks


def identity(pid: int) -> ProcessIdentity | None:
    """None when there is no such process."""
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessIdentity(boot_id=boot_id(), pid=pid, start_ticks=ticks)


def open_process(process: ProcessIdentity) -> int | None:
    """A pidfd of exactly this process, to be closed by the caller; None when it is gone."""
    if process.boot_id != boot_id():
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except (ProcessLookupError, FileNotFoundError):
        return None  # FileNotFoundError, or EINVAL on older kernels: the number is a thread of another process now
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    # From here the pidfd is bound to one process: if the start time fits now, it is the one that was meant.
    if start_ticks(process.pid) != process.start_ticks:
        os.close(pidfd)
        return None
    return pidfd


def has_exited(pidfd: int) -> bool:
    """Also true of a zombie, which kill(pid, 0) calls alive."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def is_same(process: ProcessIdentity) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    pidfd = open_process(process)
    if pidfd is None:
        return False
    try:
        return not has_exited(pidfd)
    finally:
        os.close(pidfd)


def send_signal(process: ProcessIdentity, signal_number: int) -> bool:
    """True if the signal went to exactly this process; a process that does not match is never signalled."""
    pidfd = open_process(process)
    if pidfd is None:
        return False
    try:
        if has_exited(pidfd):
            return False
        signal.pidfd_send_signal(pidfd, signal_number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


async def wait_exited(process: ProcessIdentity, seconds_max: float | None = None) -> bool:
    """Waits for the end of a process that need not be our child; False if it still runs after ``seconds_max``."""
    pidfd = open_process(process)
    if pidfd is None:
        return True
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        loop.remove_reader(pidfd)
        if not exited.done():
            exited.set_result(None)

    loop.add_reader(pidfd, on_readable)
    try:
        async with asyncio.timeout(seconds_max):
            await exited
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return True


def all_processes() -> Iterator[ProcessStat]:
    for name in os.listdir(_PROC):
        if name.isdecimal():
            stat = read_stat(int(name))
            if stat is not None:
                yield stat


def descendants(pid: int) -> list[int]:
    """Children of ``pid``, their children and so on, without ``pid`` itself."""
    return [stat.pid for stat in _below({pid}, list(all_processes()))]


def _below(roots: set[int], table: list[ProcessStat]) -> list[ProcessStat]:
    children: dict[int, list[ProcessStat]] = {}
    for stat in table:
        children.setdefault(stat.parent_pid, []).append(stat)
    found: list[ProcessStat] = []
    seen = set(roots)
    pending = list(roots)
    while pending:
        for stat in children.get(pending.pop(), ()):
            if stat.pid not in seen:
                seen.add(stat.pid)
                found.append(stat)
                pending.append(stat.pid)
    return found


def command_line(pid: int) -> list[str]:
    """The words that the process was started with; none if it is gone or not ours to read."""
    try:
        with open(_PROC / str(pid) / "cmdline", "rb") as file:
            content = file.read(_COMMAND_BYTES_MAX)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [os.fsdecode(word) for word in content.split(b"\0")[:-1]]


def environ_value(pid: int, name: str) -> str | None:
    """What the process was started with; None if it has no such variable, is gone, or is not ours to read."""
    try:
        with open(_PROC / str(pid) / "environ", "rb") as file:
            content = file.read(_ENVIRON_BYTES_MAX)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    prefix = os.fsencode(name) + b"="
    for entry in content.split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return None


def find_by_environ(name: str, value: str) -> list[int]:
    """Pids of the live processes that were started with ``name=value``."""
    return [stat.pid for stat in all_processes() if not stat.is_zombie and environ_value(stat.pid, name) == value]


def find_leftovers(attempt_id: str, job: ProcessIdentity | None) -> list[ProcessIdentity]:
    """Live processes of an attempt whose runner is gone."""
    return find_started("LULL_ATTEMPT", attempt_id, job)


def find_started(name: str, value: str, leader: ProcessIdentity | None) -> list[ProcessIdentity]:
    """Live processes of what was started with ``name=value`` in a session of its own: by their environment, which a
    program that sets its title may have written over; by the session of ``leader``; and what is below them.

    The number of a session stays taken while a member lives. So a process that bears the leader's pid without being the
    leader proves that the session was empty at some time: then its members are strangers.
    """
    table = [stat for stat in all_processes() if not stat.is_zombie]
    found = {stat.pid: stat for stat in table if environ_value(stat.pid, name) == value}
    if leader is not None and leader.boot_id == boot_id() and start_ticks(leader.pid) in (None, leader.start_ticks):
        for stat in table:
            if stat.session == leader.pid and stat.start_ticks >= leader.start_ticks:
                found[stat.pid] = stat
    for stat in _below(set(found), table):
        found[stat.pid] = stat
    found.pop(os.getpid(), None)
    return [ProcessIdentity(boot_id=boot_id(), pid=stat.pid, start_ticks=stat.start_ticks) for stat in found.values()]


@dataclass(frozen=True, slots=True)
class Swept:
    killed: int
    remaining: tuple[int, ...]  # pids that lived on after the bound


def kill_leftovers(attempt_id: str, job: ProcessIdentity | None, seconds_max: float) -> Swept:
    """SIGKILLs what is left of an attempt until nothing is found. Blocks: call it in a thread."""
    deadline = time.monotonic() + seconds_max
    killed: set[tuple[int, int]] = set()
    while True:
        left = find_leftovers(attempt_id, job)
        if not left:
            return Swept(len(killed), ())
        for process in left:
            if send_signal(process, signal.SIGKILL):
                killed.add((process.pid, process.start_ticks))
        if time.monotonic() >= deadline:
            return Swept(len(killed), tuple(sorted(process.pid for process in left)))
        _wait_any_exit(left, _KILL_ROUND_SECONDS)


def _wait_any_exit(processes: Iterable[ProcessIdentity], seconds_max: float) -> None:
    poller = select.poll()
    pidfds: list[int] = []
    try:
        for process in processes:
            pidfd = open_process(process)
            if pidfd is not None:
                pidfds.append(pidfd)
                poller.register(pidfd, select.POLLIN)
        if pidfds:
            poller.poll(seconds_max * 1000)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def process_in_words(pid: int) -> str:
    """What an operator finds it by. NVML's pids are those of the host, whatever namespace the agent is in."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"process {pid} of another pid namespace, which the agent cannot see (run the agent in the host's)"
    return f"process {pid} ({name}, uid {owner})"
