"""What processes really hold, read from /proc: no word of an engine, an agent or a ledger goes in here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The name that the host-memory device gives the pages of one allocation.
_MEMFD: Final = re.compile(r"^/memfd:lull:([^:]+):([^ ]+)(?: \(deleted\))?$")
_BLOCK_BYTES: Final = 512
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Pages:
    """One memfd: which device's, which inode, how many bytes of it are really there."""

    device_uuid: str
    inode: tuple[int, int]
    committed_bytes: int


def live_pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]


def pages_of(pid: int) -> list[Pages]:
    """Device memory that one process holds, by its open files and its mappings; empty once it is gone."""
    found: dict[tuple[int, int], Pages] = {}
    for folder in ("fd", "map_files"):
        try:
            entries = list(os.scandir(_PROC / str(pid) / folder))
        except OSError:  # gone, not ours, or a kernel that shows map_files to root alone
            continue
        for entry in entries:
            pages = _pages(entry.path)
            if pages is not None:
                found[pages.inode] = pages
    return list(found.values())


def _pages(link: str) -> Pages | None:
    try:
        matched = _MEMFD.match(os.readlink(link))
        if matched is None:
            return None
        status = os.stat(link)
    except OSError:  # closed in between
        return None
    return Pages(matched[1], (status.st_dev, status.st_ino), status.st_blocks * _BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on each device, by process; pages that several processes share are counted once in the sum."""

    by_process: Mapping[int, Mapping[str, int]]
    by_device: Mapping[str, int]

    def held_by(self, pids: Iterable[int], device_uuid: str) -> int:
        return sum(self.by_process.get(pid, {}).get(device_uuid, 0) for pid in set(pids))


def device_memory(pids: Iterable[int] | None = None) -> DeviceMemory:
    """Device memory of `pids`, or of every process that we may look into."""
    by_process: dict[int, dict[str, int]] = {}
    unique: dict[tuple[int, int], Pages] = {}
    for pid in live_pids() if pids is None else pids:
        for pages in pages_of(pid):
            per_device = by_process.setdefault(pid, {})
            per_device[pages.device_uuid] = per_device.get(pages.device_uuid, 0) + pages.committed_bytes
            unique[pages.inode] = pages
    by_device: dict[str, int] = {}
    for pages in unique.values():
        by_device[pages.device_uuid] = by_device.get(pages.device_uuid, 0) + pages.committed_bytes
    return DeviceMemory(by_process, by_device)


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process that is backed by nothing: where backups of parked tags are. 0 once it is gone."""
    try:
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
