"""A process that stands still: alive, and silent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.waiting import wait_until


def freeze(pid: int) -> None:
    """SIGSTOP reaches the threads one after the other; until the last has it, one of them may answer."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_is_stopped(thread) for thread in threads.iterdir()), 10, "all its threads stand still")


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
