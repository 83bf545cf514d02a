"""The job's process and everything below it: made, told apart, signalled, and never anything else."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
from typing import Any, Final, NoReturn

STATUS_BYTES_MAX: Final = 4096
WALL: Final = 0x40000000  # __WALL: also wait for children that report their end by another signal than SIGCHLD

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
# Where memory runs out, the job goes before an engine whose parked weights are in host memory.
_OOM_SCORE_ADJ: Final = "500"
# What Python or the runner ignores or catches; the job gets the defaults back.
_RESET_SIGNALS: Final = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *(ctypes.c_ulong(0),) * 3) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def become_subreaper() -> None:
    """Orphans of the job become our children: none can leave by forking twice, and no child left means none at all."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stat_of(pid: int) -> tuple[int, int, bool] | None:
    """Parent, start time, alive; None if gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[19]), fields[0] not in (b"Z", b"X") or int(fields[17]) > 1


def descendants() -> dict[int, tuple[int, bool]]:
    """Start time and alive by pid, of everything below this process."""
    table: dict[int, tuple[int, int, bool]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := stat_of(int(name))) is not None:
            table[int(name)] = stat
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, tuple[int, bool]] = {}
    pending = [os.getpid()]
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in found:
                found[pid] = table[pid][1:]
                pending.append(pid)
    return found


def signal_descendant(pid: int, ticks: int, number: int) -> bool:
    """Only if, with a pidfd held, it is still that process and still below us."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        stat = stat_of(pid)
        if stat is None or stat[1] != ticks:
            return False
        parent = stat[0]
        while parent != os.getpid():
            above = stat_of(parent)
            if above is None or parent <= 1:
                return False
            parent = above[0]
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def become_job(spec: dict[str, Any], runner_pid: int, stdout: int, stderr: int, status: int, umask: int) -> NoReturn:
    """In the child: the job's own session, no trace of the runner; what fails is told through ``status``."""
    step = "prepare"
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != runner_pid:  # it died before that took effect
            os._exit(127)
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        signal.set_wakeup_fd(-1)
        for number in _RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.umask(umask)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_OOM_SCORE_ADJ)
        env = {**spec["env"], "LULL_ATTEMPT": spec["attempt_id"]}
        step = "workdir"
        os.chdir(spec["workdir"] or env.get("HOME") or "/")
        step = "exec"
        os.execvpe(spec["argv"][0], spec["argv"], env)  # noqa: S606 - running it is what we are for
    except (OSError, ValueError) as error:
        code = error.errno if isinstance(error, OSError) and error.errno else 0
        os.write(status, json.dumps([step, code, str(error)]).encode("ascii")[:STATUS_BYTES_MAX])
    finally:
        os._exit(127)


def spawn_message(spec: dict[str, Any], step: str, number: int, text: str) -> str:
    command = spec["argv"][0]
    if step == "workdir":
        return (
            f"workdir {spec['workdir'] or spec['env'].get('HOME') or '/'!r}: {os.strerror(number) if number else text}"
        )
    if step == "exec" and number in (errno.ENOENT, errno.ENOTDIR):
        if "/" in command:
            return f"command {command!r} does not exist, or the interpreter in its first line does not"
        return f"command not found: {command!r} is in no directory of PATH={spec['env'].get('PATH', os.defpath)!r}"
    if step == "exec" and number == errno.EACCES:
        return f"command {command!r} is not an executable file (or a directory on its path is closed to this user)"
    if step == "exec" and number == errno.ENOEXEC:
        return f"command {command!r} is not a program of this machine; a script needs a #! line"
    return f"command {command!r}: {os.strerror(number) if number else text}"
