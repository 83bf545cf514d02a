"""What really lies in a node's host-memory devices, from /proc: the ledger that the processes share is not trusted.

A device's memory is memfd pages. A process holds a memfd by a descriptor or by a mapping whose descriptor is
closed; both are looked at, and a page that several processes hold counts once for the device and once for each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_MEMFD: Final = re.compile(r"^/memfd:lull:([0-9A-Za-z-]+):")
_BLOCK_BYTES: Final = 512  # st_blocks counts these, whatever the file system


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One look at one device. ``bytes_by_pid`` holds only processes with at least one page."""

    capacity_bytes: int
    used_bytes: int
    bytes_by_pid: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.used_bytes)

    def bytes_of(self, pids: Iterable[int]) -> int:
        return sum(self.bytes_by_pid.get(pid, 0) for pid in set(pids))


class HostMemoryProbe:
    """Looks at the devices given as uuid to capacity in bytes."""

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self._capacities = dict(capacities)

    def look(self) -> dict[str, DeviceFacts]:
        """Every device as it is now. Costs a walk over /proc: some milliseconds for a hundred processes."""
        pages: dict[str, dict[int, int]] = {uuid: {} for uuid in self._capacities}  # by inode
        holders: dict[str, dict[int, set[int]]] = {uuid: {} for uuid in self._capacities}  # inodes by pid
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            for uuid, inode, held_bytes in _memfds(Path(entry.path)):
                if uuid in pages:
                    pages[uuid][inode] = held_bytes
                    holders[uuid].setdefault(int(entry.name), set()).add(inode)
        return {
            uuid: DeviceFacts(
                capacity_bytes=capacity,
                used_bytes=sum(pages[uuid].values()),
                bytes_by_pid={
                    pid: held
                    for pid, inodes in holders[uuid].items()
                    if (held := sum(pages[uuid][inode] for inode in inodes))
                },
            )
            for uuid, capacity in self._capacities.items()
        }


def _memfds(process: Path) -> Iterable[tuple[str, int, int]]:
    """(device uuid, inode, bytes) of every memfd of ours that the process holds; empty once it is gone."""
    found: dict[int, tuple[str, int, int]] = {}
    mapped: set[int] = set()
    try:
        maps = (process / "maps").read_bytes()
    except OSError:
        return ()
    if b"/memfd:lull:" in maps:
        for line in maps.splitlines():
            if b"/memfd:lull:" in line:
                fields = line.split(maxsplit=5)
                uuid = _MEMFD.match(fields[5].decode(errors="replace"))
                inode = int(fields[4])
                if uuid and inode not in mapped:
                    mapped.add(inode)
                    held = _stat_bytes(process / "map_files" / fields[0].decode())
                    if held is None:  # without the right to follow map_files: what is mapped is the best word
                        start, end = (int(part, 16) for part in fields[0].split(b"-"))
                        held = end - start
                    found[inode] = (uuid.group(1), inode, held)
    try:
        names = os.listdir(process / "fd")
    except OSError:
        return found.values()
    for name in names:
        path = process / "fd" / name
        try:
            match = _MEMFD.match(os.readlink(path))
            if match is None:
                continue
            info = path.stat()
        except OSError:
            continue
        found[info.st_ino] = (match.group(1), info.st_ino, info.st_blocks * _BLOCK_BYTES)
    return found.values()


def _stat_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_blocks * _BLOCK_BYTES
    except OSError:
        return None


def mem_available_bytes() -> int:
    """MemAvailable of the node, less what its cgroup forbids."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        current = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - current))
