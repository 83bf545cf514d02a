"""What a pool knows of data that may be written under a sealed layout: by whom, where now, and what was torn. Pure.

The service does not see a write; the writer says before the first byte where it will write, and afterwards that it is
whole. Its memory is mapped read-only elsewhere and at other times, so a death can have torn nothing but what lies in
an allocation of an entry that it was writing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .errors import LayoutInvalid


@dataclass(slots=True)
class DataSeal:
    """``slot_of``: every entry of the sealed layout. ``identity`` is this seal's alone, over all services."""

    identity: str
    slot_of: Mapping[str, int]
    grants: int = 1  # how often somebody got to write, the one who sealed included
    written: set[str] = field(default_factory=set[str])  # entries that are being written
    torn: set[str] = field(default_factory=set[str])
    survivor: tuple[int, int] | None = None  # pid and start of a writer without a connection that may write still

    def begin(self, keys: Collection[str] | None) -> None:
        """The writer will write to these entries, or to all. LayoutInvalid names one that is none."""
        self.written |= self._known(keys)

    def end(self, keys: Collection[str] | None, *, whole: bool) -> None:
        """They are written: whole, or not, and then they are torn until somebody has written them again."""
        known = self._known(keys)
        self.written -= known
        if whole:
            self.torn -= known
        else:
            self.torn |= self._around(known)

    def writer_gone(self, survivor: tuple[int, int] | None) -> None:
        """Its connection has ended. A process that lives on may write anywhere, and is waited for."""
        self.torn |= self._around(self.written)
        self.written.clear()
        self.survivor = survivor

    def survivor_gone(self, *, back: bool) -> None:
        """The process has ended, or is ``back`` as a client, and then says itself what it has written meanwhile."""
        self.survivor = None
        if not back:
            self.torn |= self.slot_of.keys()

    def page(self, after: str | None, bytes_max: int) -> Iterator[str]:
        """Torn entries behind ``after`` in order, as many as fit."""
        left_bytes = bytes_max
        for key in sorted(key for key in self.torn if after is None or key > after):
            left_bytes -= len(key) + 4
            if left_bytes < 0:
                return
            yield key

    def _known(self, keys: Collection[str] | None) -> set[str]:
        if keys is None:
            return set(self.slot_of)
        for key in keys:
            if key not in self.slot_of:
                raise LayoutInvalid(f"there is no entry {key}")
        return set(keys)

    def _around(self, keys: Iterable[str]) -> set[str]:
        """With all that shares an allocation with them: that was writable, too."""
        slots = {self.slot_of[key] for key in keys}
        return {key for key, slot in self.slot_of.items() if slot in slots}
