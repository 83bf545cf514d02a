"""`lull up --stop`: every engine comes back first, then all processes of the box end.

The server ends before anything else, so that nothing new is placed. The agent recalls its loans by itself and ends its
engines and its gateway; running jobs are preempted, not lost: they are queued again at the next start.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ..agents.processes import environ_value, find_by_environ, identity, is_same, open_process, send_signal
from ..agents.protocol.wire import ProcessIdentity
from .exits import fail
from .up_files import UpPaths, UpRecord, read_record

# In the environment of everything that a `lull up` starts, jobs and their runners excepted.
UP_MARK: Final = "LULL_UP"
_ATTEMPT_MARK: Final = "LULL_ATTEMPT"
_TERM_SECONDS_MAX: Final = 30.0

Say = Callable[[str], None]


def stop_everything(paths: UpPaths, seconds: float, say: Say) -> None:
    record = read_record(paths)
    if record is None and not marked(paths):
        say(f"nothing runs in {paths.data_dir}")
        return
    paths.stopping.touch()
    try:
        if record is not None:
            _end([process for name, process in record.children.items() if name == "server"], say)
            _stop_agent(record, seconds, say)
            wait_gone([record.up], _TERM_SECONDS_MAX)
        _end(marked(paths), say)
        paths.record.unlink(missing_ok=True)
    finally:
        paths.stopping.unlink(missing_ok=True)
    say("ended")


def _stop_agent(record: UpRecord, seconds: float, say: Say) -> None:
    """The agent that runs, or one that is started for this, recalls all loans and ends its engines and its gateway."""
    environ = {**os.environ, UP_MARK: record.mark}
    try:
        ended = subprocess.run([*record.agent_argv, "--stop"], env=environ, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        say(f"the engines were not back within {seconds:.0f} s; ended as they are")
        return
    if ended.returncode != 0:
        say(f"the agent could not bring everything back (exit code {ended.returncode}); ended as it is")


def marked(paths: UpPaths) -> list[ProcessIdentity]:
    """Live processes that were started in this box: by the mark in their environment, never by name."""
    found = [identity(pid) for pid in find_by_environ(UP_MARK, str(paths.data_dir)) if pid != os.getpid()]
    # A job may run a box of its own: that one is not ours to end.
    return [process for process in found if process is not None and environ_value(process.pid, _ATTEMPT_MARK) is None]


def wait_gone(processes: Iterable[ProcessIdentity], seconds: float) -> bool:
    """Whether all of them are gone within the bound. They need not be our children."""
    deadline = time.monotonic() + seconds
    for process in processes:
        pidfd = open_process(process)
        if pidfd is None:
            continue
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(pidfd)
    return True


def _end(processes: Sequence[ProcessIdentity], say: Say) -> None:
    """SIGTERM to all, a bound, SIGKILL to those that are left."""
    for process in processes:
        send_signal(process, signal.SIGTERM)
    if wait_gone(processes, _TERM_SECONDS_MAX):
        return
    left = [process for process in processes if is_same(process)]
    for process in left:
        say(f"process {process.pid} did not end within {_TERM_SECONDS_MAX:.0f} s: killed")
        send_signal(process, signal.SIGKILL)
    if not wait_gone(left, _TERM_SECONDS_MAX):
        fail(f"cannot be ended: {', '.join(str(process.pid) for process in left)}")
