"""Bytes on the agent's disk that are set aside while there are enough, and given up when the disk is full.

Bringing engines back needs a few KiB of journal. The reserve is those, whoever filled the disk.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger(__name__)

RESERVE_BYTES_MIN: Final = 1 << 20
RESERVE_BYTES_MAX: Final = 16 << 20
RESERVE_NAME: Final = "disk.reserve"
SMALL_FILES_BYTES: Final = 256 << 10
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskReserve:
    """A file that holds nothing but its blocks."""

    def __init__(self, path: Path, wanted_bytes: int) -> None:
        self.path = path
        self.size_bytes = min(RESERVE_BYTES_MAX, max(RESERVE_BYTES_MIN, wanted_bytes))

    def hold(self) -> bool:
        """Sets the bytes aside if as many are left to others; True if they are set aside."""
        try:
            if self.path.exists() and self.path.stat().st_size >= self.size_bytes:
                return True
            disk = os.statvfs(self.path.parent)
            if disk.f_bavail * disk.f_frsize < 2 * self.size_bytes:
                return False
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, self.size_bytes)
            finally:
                os.close(fd)
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> bool:
        """Gives the bytes up; True if there were any."""
        try:
            self.path.unlink()
        except OSError:
            return False
        log.warning("the disk reserve was given up", reserve=str(self.path))
        return True


def is_full(directory: Path) -> bool:
    """True if not even some small files fit."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < SMALL_FILES_BYTES


def release_above(path: Path) -> bool:
    """Gives up the reserve of the data directory in which ``path`` lies; True if there was one."""
    return any(DiskReserve(parent / RESERVE_NAME, 0).release() for parent in path.parents)
