"""What the runner keeps on disk: records that are whole or absent, and capped logs whose offsets stay exact.

All names are relative to the attempt's directory, which is the runner's working directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any, Final

_TAIL_SEGMENTS: Final = 8
_TAIL_FILES_MAX: Final = 32
_DISK_PAUSE_SECONDS: Final = 1.0


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# ---- records: temporary file, fsync, rename, fsync of the directory -----------------------------------------------


def put(name: str, record: dict[str, Any], *, reserved: bool = False) -> None:
    """``reserved``: the temporary file exists already and holds the blocks, so that a full disk cannot stop us."""
    content = json.dumps(record).encode("ascii") + b"\n"
    part = name + ".part"
    flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | (0 if reserved else os.O_TRUNC)
    fd = os.open(part, flags, 0o600)
    try:
        written = 0
        while written < len(content):
            written += os.pwrite(fd, content[written:], written)
        os.ftruncate(fd, len(content))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(part, name)
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def reserve(name: str, size: int) -> None:
    fd = os.open(name + ".part", os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        pass  # a file system without it: the record may then need space that is not there, and is retried
    finally:
        os.close(fd)


class StreamLog:
    """One stream as files named by the offset of their first byte: a head that stays and a tail that moves on.

    What is missing between two files is a gap: old tail, or bytes that a full disk refused. Offsets stay exact.
    """

    def __init__(self, name: str, head_bytes: int, tail_bytes: int, clock: Callable[[], float] = boottime) -> None:
        self.directory = f"logs/{name}"
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self.head_bytes = head_bytes
        self.tail_bytes = tail_bytes
        self.total = 0
        self._clock = clock
        self._fd = -1
        self._limit = 0
        self._tail: list[list[int]] = []  # [offset, size]
        self._head_over = False
        self._closed_until = 0.0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self.total >= self._limit and not self._next_file():
                self.total += len(view)
                return
            piece = view[: self._limit - self.total]
            try:
                written = os.write(self._fd, piece)
            except OSError:
                self._pause()
                continue
            self.total += written
            if self._tail:
                self._tail[-1][1] += written
            view = view[written:]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _pause(self) -> None:
        """A full or failing disk never stops the job: its output is dropped, and tried again a little later."""
        self.close()
        self._limit = self.total
        self._head_over = True
        self._closed_until = self._clock() + _DISK_PAUSE_SECONDS

    def _next_file(self) -> bool:
        self.close()
        in_head = self.total < self.head_bytes and not self._head_over
        size = self.head_bytes - self.total if in_head else max(1, self.tail_bytes // _TAIL_SEGMENTS)
        if (not in_head and self.tail_bytes == 0) or self._clock() < self._closed_until:
            return False
        while not in_head and self._tail:
            held = sum(kept for _, kept in self._tail)
            if held + size <= self.tail_bytes and len(self._tail) < _TAIL_FILES_MAX:
                break
            self._remove(self._tail.pop(0)[0])
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
            self._fd = os.open(f"{self.directory}/{self.total:020d}", flags, 0o600)
        except OSError:
            self._pause()
            return False
        if not in_head:
            self._tail.append([self.total, 0])
        self._limit = self.total + size
        return True

    def _remove(self, offset: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.directory}/{offset:020d}")
