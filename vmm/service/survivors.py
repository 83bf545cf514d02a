"""Whether a process whose connection has ended can still write to what it has mapped."""

from __future__ import annotations

import os
from typing import Final

from ..host_device import process_key

_EXITING: Final = 0x4  # PF_EXITING, in the flags of /proc/PID/stat


def may_write(process: tuple[int, int]) -> bool:
    """``process``: pid and start. One that is on its way out unmaps before it closes: then it may not."""
    pid, _ = process
    if process_key(pid) != process:
        return False
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return False
    return any(_runs(pid, task) for task in tasks)


def _runs(pid: int, task: str) -> bool:
    try:
        with open(f"/proc/{pid}/task/{task}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in b"ZX" and not int(fields[6]) & _EXITING
