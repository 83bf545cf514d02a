"""What a pool is made of: allocations by slot, and entries that name pieces of them. Pure.

The layout hash is about structure and names, not about contents. Slots are numbered in the order of allocation and
never used again within one layout; the hash counts ranks, so that a slot that was freed on the way changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from .errors import LayoutInvalid

ALLOCATIONS_MAX: Final = 4096
ENTRIES_MAX: Final = 1 << 17
ENTRY_BYTES_MAX: Final = 64 << 20  # of all keys and values of one pool


@dataclass(frozen=True, slots=True)
class SlotRecord:
    nbytes: int
    reserved_bytes: int  # rounded up to the device's granularity
    tag: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A named piece of an allocation, for example one tensor. ``value`` is any JSON."""

    slot: int
    offset: int
    nbytes: int
    value: object


@dataclass(slots=True)
class Layout:
    slots: dict[int, SlotRecord] = field(default_factory=dict[int, SlotRecord])
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _next_slot: int = 0
    _entry_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(record.reserved_bytes for record in self.slots.values())

    def require_room(self) -> None:
        if len(self.slots) >= ALLOCATIONS_MAX:
            raise LayoutInvalid(f"the pool has {ALLOCATIONS_MAX} allocations already; put more into each")

    def add(self, record: SlotRecord) -> int:
        self.require_room()
        slot = self._next_slot
        self._next_slot += 1
        self.slots[slot] = record
        return slot

    def remove(self, slot: int) -> None:
        """With the entries that lie in it."""
        if slot not in self.slots:
            raise LayoutInvalid(f"there is no allocation {slot}")
        del self.slots[slot]
        for key in [key for key, entry in self.entries.items() if entry.slot == slot]:
            self.delete(key)

    def put(self, key: str, entry: Entry) -> None:
        """Adds or replaces an entry; LayoutInvalid if it does not lie within its allocation."""
        record = self.slots.get(entry.slot)
        if record is None:
            raise LayoutInvalid(f"entry {key}: there is no allocation {entry.slot}")
        if not (entry.offset >= 0 and entry.nbytes > 0 and entry.offset + entry.nbytes <= record.nbytes):
            raise LayoutInvalid(
                f"entry {key}: bytes {entry.offset} to {entry.offset + entry.nbytes} are not within the "
                f"{record.nbytes} bytes of allocation {entry.slot}"
            )
        replaced = self.entries.get(key)
        entry_bytes = self._entry_bytes + _size(key, entry) - (0 if replaced is None else _size(key, replaced))
        if entry_bytes > ENTRY_BYTES_MAX or (replaced is None and len(self.entries) >= ENTRIES_MAX):
            raise LayoutInvalid(
                f"entry {key}: a pool holds at most {ENTRIES_MAX} entries of {ENTRY_BYTES_MAX} bytes together"
            )
        self.entries[key] = entry
        self._entry_bytes = entry_bytes

    def delete(self, key: str) -> None:
        entry = self.entries.pop(key, None)
        if entry is None:
            raise LayoutInvalid(f"there is no entry {key}")
        self._entry_bytes -= _size(key, entry)

    def page(self, after: str | None, bytes_max: int) -> Iterator[tuple[str, Entry]]:
        """Entries behind ``after`` in the order of their keys, as many as fit into ``bytes_max``."""
        left_bytes = bytes_max
        for key in sorted(key for key in self.entries if after is None or key > after):
            entry = self.entries[key]
            left_bytes -= _size(key, entry) + 100
            if left_bytes < 0:
                return
            yield key, entry

    def check(self) -> None:
        """Raises LayoutInvalid unless there is something to commit and every entry lies in an allocation."""
        if not self.slots:
            raise LayoutInvalid("nothing was allocated; there is nothing to commit")
        for key, entry in self.entries.items():
            if entry.slot not in self.slots:
                raise LayoutInvalid(f"entry {key} points to allocation {entry.slot}, which does not exist")

    def digest(self) -> str:
        ranks = {slot: rank for rank, slot in enumerate(sorted(self.slots))}
        slots = [[rank, *_record(self.slots[slot])] for slot, rank in ranks.items()]
        entries = [
            [key, ranks[entry.slot], entry.offset, entry.nbytes, entry.value]
            for key, entry in sorted(self.entries.items())
        ]
        text = json.dumps([slots, entries], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _record(record: SlotRecord) -> tuple[int, int, str]:
    return record.nbytes, record.reserved_bytes, record.tag


def _size(key: str, entry: Entry) -> int:
    return len(key) + len(json.dumps(entry.value))
