"""Reads an attempt's output by (attempt directory, stream, offset), never by a path that came from outside.

A stream is a directory of files named by the offset of their first byte. What lies between two of them is gone: older
than the kept tail, or refused by a full disk. The job may own these directories: nothing in them is followed.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from .attempt_files import AttemptDir

LogStream = Literal["stdout", "stderr"]
LOG_CHUNK_BYTES_MAX: Final = 1024 * 1024

_STREAMS: Final = get_args(LogStream)
_SEGMENT_NAME: Final = re.compile(r"[0-9]{20}")
_SEGMENTS_MAX: Final = 100_000
_LOOKS_MAX: Final = 8
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class LogChunk:
    """``data`` begins at ``offset``, which lies ``gap_bytes`` beyond what was asked for where bytes are gone."""

    offset: int
    data: bytes
    next_offset: int
    gap_bytes: int
    ended: bool  # nothing will ever follow next_offset
    total_bytes: int  # of the stream so far


def read_log(directory: Path, stream: LogStream, offset: int, limit_bytes: int = LOG_CHUNK_BYTES_MAX) -> LogChunk:
    """At most ``limit_bytes`` from ``offset`` on. Raises FileNotFoundError if it is kept no more."""
    if stream not in _STREAMS:
        raise ValueError(f"stream must be stdout or stderr, not {stream!r}")
    if offset < 0:
        raise ValueError(f"offset must not be negative, not {offset}")
    if not 0 < limit_bytes <= LOG_CHUNK_BYTES_MAX:
        raise ValueError(f"limit_bytes must be 1 to {LOG_CHUNK_BYTES_MAX}, not {limit_bytes}")
    root = os.open(directory, _DIRECTORY_FLAGS)
    try:
        # Before the files are looked at: the record is written after the last byte.
        final_bytes = _final_bytes(directory, stream)
        try:
            logs = os.open("logs", _DIRECTORY_FLAGS, dir_fd=root)
        except FileNotFoundError:
            if final_bytes:
                raise  # there was output, and it has expired
            return _beyond(offset, 0, final_bytes)
        try:
            segments = os.open(stream, _DIRECTORY_FLAGS, dir_fd=logs)
        except FileNotFoundError:
            return _beyond(offset, 0 if final_bytes is None else final_bytes, final_bytes)
        finally:
            os.close(logs)
        try:
            return _read_segments(segments, offset, limit_bytes, final_bytes)
        finally:
            os.close(segments)
    finally:
        os.close(root)


def _read_segments(segments: int, offset: int, limit_bytes: int, final_bytes: int | None) -> LogChunk:
    for _ in range(_LOOKS_MAX):
        table = _table(segments)
        total = max((start + size for start, size in table), default=0)
        if final_bytes is not None:
            total = max(total, final_bytes)
        place = next(((start, size) for start, size in table if start + size > offset), None)
        if place is None:
            return _beyond(offset, total, final_bytes)
        start, size = place
        begin = max(start, offset)
        try:
            fd = _open_segment(segments, start)
        except FileNotFoundError:
            continue  # the tail moved on meanwhile
        try:
            data = os.pread(fd, min(limit_bytes, start + size - begin), begin - start)
        finally:
            os.close(fd)
        end = begin + len(data)
        return LogChunk(
            offset=begin,
            data=data,
            next_offset=end,
            gap_bytes=begin - offset,
            ended=final_bytes is not None and end >= total,
            total_bytes=total,
        )
    # It writes faster than we look: the next call starts at what is there then.
    return LogChunk(offset, b"", offset, 0, False, offset)


def _beyond(offset: int, total: int, final_bytes: int | None) -> LogChunk:
    """Nothing there at or after ``offset`` now; once the attempt has ended, bytes lost at the very end are a gap."""
    ended = final_bytes is not None
    gap = max(0, total - offset) if ended else 0
    return LogChunk(offset + gap, b"", offset + gap, gap, ended, total)


def _table(segments: int) -> list[tuple[int, int]]:
    """(offset, size) of every piece, in order."""
    table: list[tuple[int, int]] = []
    for name in os.listdir(segments)[:_SEGMENTS_MAX]:
        if not _SEGMENT_NAME.fullmatch(name):
            continue
        try:
            status = os.stat(name, dir_fd=segments, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            table.append((int(name), status.st_size))
    return sorted(table)


def _open_segment(segments: int, start: int) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(f"{start:020d}", flags, dir_fd=segments)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(start)
    return fd


def _final_bytes(directory: Path, stream: str) -> int | None:
    """The stream's whole length, once the attempt has ended."""
    lengths = AttemptDir(directory).log_bytes()
    # Where the record does not know it, the files say it.
    return None if lengths is None else lengths.get(stream, 0)
