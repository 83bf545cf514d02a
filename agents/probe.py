"""What a look at the devices gives, and how host-memory devices are looked at: from /proc, for the ledger that the
processes share is not trusted. GPUs are looked at in ``probe_nvml``.

A device's memory is memfd pages. A process holds a memfd by a descriptor or by a mapping whose descriptor is
closed; both are looked at, and a page that several processes hold counts once for the device and once for each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ..vmm.host_memory import available_bytes
from .errors import DeviceAbsent
from .protocol.words import Reason

_MEMFD: Final = re.compile(r"^/memfd:lull:([0-9A-Za-z-]+):")
_BLOCK_BYTES: Final = 512  # st_blocks counts these, whatever the file system


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One look at one device. ``bytes_by_pid`` holds processes with at least one page, or a context."""

    capacity_bytes: int
    used_bytes: int
    bytes_by_pid: Mapping[int, int] = field(default_factory=dict[int, int])
    # Whose memory this is belongs to nobody here, and it is no reason not to lend: a display that draws on a GPU.
    bystanders: frozenset[int] = frozenset()
    # Device and host share one memory: what is free changes with everything that the host does.
    unified: bool = False

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.used_bytes)

    def bytes_of(self, pids: Iterable[int]) -> int:
        return sum(self.bytes_by_pid.get(pid, 0) for pid in set(pids))


class Facts(dict[str, DeviceFacts]):
    """One look at a node's devices. One that could not be read is not in it, and asking for it raises DeviceAbsent:
    what nobody knows is never taken for free."""

    def __init__(self, read: Mapping[str, DeviceFacts], absent: Mapping[str, Reason] | None = None) -> None:
        super().__init__(read)
        self.absent: dict[str, Reason] = dict(absent or {})

    def __missing__(self, device_id: str) -> DeviceFacts:
        reason = self.absent.get(device_id)
        raise DeviceAbsent(f"device {device_id} is not on this node" if reason is None else reason.sentence)


def why_absent(facts: Mapping[str, DeviceFacts], device_ids: Iterable[str]) -> Reason | None:
    """Why the first of the devices could not be read in this look; None if all were."""
    for device_id in device_ids:
        if device_id not in facts:
            known = facts.absent.get(device_id) if isinstance(facts, Facts) else None
            return known or Reason(code="DeviceUnreadable", sentence=f"device {device_id} could not be read")
    return None


def unified_facts(facts: DeviceFacts, reserve_bytes: int, available: Callable[[], int]) -> DeviceFacts:
    """What is free is what the host can still give, less its reserve. The page cache counts as available."""
    free_bytes = max(0, min(facts.free_bytes, available() - reserve_bytes))
    return replace(facts, used_bytes=facts.capacity_bytes - free_bytes, unified=True)


class HostMemoryProbe:
    """Looks at the devices given as uuid to capacity in bytes. ``reserves``: what unified ones keep for the host, which
    can give ``available`` bytes now."""

    def __init__(
        self,
        capacities: Mapping[str, int],
        reserves: Mapping[str, int] | None = None,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        self._capacities = dict(capacities)
        self._reserves = dict(reserves or {})
        self._available = available

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
        found = {
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
        for uuid, reserve_bytes in self._reserves.items():
            found[uuid] = unified_facts(found[uuid], reserve_bytes, self._available)
        return found


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


def mem_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable of the node, less what its cgroup forbids."""
    available = 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        current = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - current))
