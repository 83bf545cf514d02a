"""What a pool's tags hold and what their last park and wake cost, as values that do not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .blocks import Block
from .tags import RestoreMode


@dataclass(frozen=True, slots=True)
class TagStatistics:
    """``seconds`` are those of the whole park or wake, of which the tag may have been a part; waiting between its two
    phases is not in it. ``copied_bytes`` are the tag's own."""

    tag: str
    parked: bool
    allocations: int
    modes: Mapping[RestoreMode, int]  # how many allocations have which
    reserved_bytes: int  # of the device, while it is not parked
    device_bytes: int  # now
    backup_bytes: int  # of host memory, those kept for the next park included
    locked_bytes: int  # of these
    parks: int
    wakes: int
    last_park_seconds: float | None
    last_park_copied_bytes: int
    last_wake_seconds: float | None
    last_wake_copied_bytes: int


@dataclass(slots=True)
class TagRecord:
    """What a pool writes down about a tag as it parks and wakes."""

    parks: int = 0
    wakes: int = 0
    last_park_seconds: float | None = None
    last_park_copied_bytes: int = 0
    last_wake_seconds: float | None = None
    last_wake_copied_bytes: int = 0


@dataclass(slots=True)
class TransitionCost:
    """Of a park or a wake that is under way."""

    seconds: float = 0.0
    copied_bytes: dict[str, int] = field(default_factory=dict[str, int])

    def add_copies(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            tag = block.allocation.tag
            self.copied_bytes[tag] = self.copied_bytes.get(tag, 0) + block.allocation.nbytes


def summarize(tag: str, blocks: Iterable[Block], record: TagRecord, *, parked: bool) -> TagStatistics:
    modes: dict[RestoreMode, int] = {}
    allocations = reserved_bytes = device_bytes = backup_bytes = locked_bytes = 0
    for block in blocks:
        allocation = block.allocation
        allocations += 1
        modes[allocation.mode] = modes.get(allocation.mode, 0) + 1
        reserved_bytes += allocation.reserved_bytes
        device_bytes += allocation.reserved_bytes if block.handle is not None else 0
        if (backup := block.backup) is not None:
            backup_bytes += backup.held_bytes
            locked_bytes += backup.held_bytes if backup.locked else 0
    return TagStatistics(
        tag=tag,
        parked=parked,
        allocations=allocations,
        modes=MappingProxyType(modes),
        reserved_bytes=reserved_bytes,
        device_bytes=device_bytes,
        backup_bytes=backup_bytes,
        locked_bytes=locked_bytes,
        parks=record.parks,
        wakes=record.wakes,
        last_park_seconds=record.last_park_seconds,
        last_park_copied_bytes=record.last_park_copied_bytes,
        last_wake_seconds=record.last_wake_seconds,
        last_wake_copied_bytes=record.last_wake_copied_bytes,
    )
