"""The engine's mappings of a pool's memory: large pieces, each at an address that it keeps over parks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..blocks import Allocation
from ..driver import Access, Driver, Handle
from ..errors import LullMemoryError
from .errors import StaleLayout


@dataclass(slots=True, eq=False)
class Slab:
    slot: int | None  # None: the service has no memory for it now
    allocation: Allocation
    handle: Handle | None = None
    mapped: bool = False

    def take(self, driver: Driver, handle: Handle, access: Access) -> None:
        """Maps the handle at the slab's place; if it raises, the handle is given back."""
        address, nbytes = self.allocation.address, self.allocation.reserved_bytes
        self.handle = handle
        try:
            driver.map(address, nbytes, handle)
            self.mapped = True
            driver.set_access(address, nbytes, access)
        except BaseException:
            self.drop(driver)
            raise

    def unmap(self, driver: Driver) -> None:
        if self.mapped:
            driver.unmap(self.allocation.address, self.allocation.reserved_bytes)
            self.mapped = False

    def drop(self, driver: Driver) -> None:
        """Unmaps and gives the handle back; the place stays reserved. Can be asked again."""
        self.unmap(driver)
        if self.handle is not None:
            driver.release(self.handle)
            self.handle = None

    def map_again(self, driver: Driver, access: Access) -> None:
        """After unmap: the handle was kept."""
        assert self.handle is not None, "unmap keeps the handle"
        if not self.mapped:
            driver.map(self.allocation.address, self.allocation.reserved_bytes, self.handle)
            self.mapped = True
        driver.set_access(self.allocation.address, self.allocation.reserved_bytes, access)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a named piece lies. ``value`` is any JSON."""

    slab: Slab
    offset: int
    nbytes: int
    value: Any


def drop_all(slabs: Sequence[Slab], driver: Driver) -> LullMemoryError | None:
    """Drops each, also behind one that fails; returns what went wrong last."""
    failure: LullMemoryError | None = None
    for slab in slabs:
        try:
            slab.drop(driver)
        except LullMemoryError as error:
            failure = error
    return failure


def require_same(slabs: Sequence[Slab], rows: Sequence[Sequence[int | str]]) -> None:
    """The service's allocations are those that the slabs were made for, slot numbers apart; else StaleLayout."""
    ours = [(slab.allocation.nbytes, slab.allocation.reserved_bytes, slab.allocation.tag) for slab in slabs]
    theirs = [(nbytes, reserved_bytes, tag) for _, nbytes, reserved_bytes, tag in rows]
    if ours != theirs:
        raise StaleLayout(
            f"the service holds {len(theirs)} allocations that are not the {len(ours)} of this engine; build it again"
        )


def pack(sizes_bytes: Sequence[int], slab_bytes: int, alignment_bytes: int) -> list[tuple[int, int]]:
    """For each size the slab it goes into and its offset there; a larger piece than a slab gets one of its own."""
    places: list[tuple[int, int]] = []
    slab, end = 0, 0
    for nbytes in sizes_bytes:
        start = -(-end // alignment_bytes) * alignment_bytes
        if end and start + nbytes > slab_bytes:
            slab, start = slab + 1, 0
        places.append((slab, start))
        end = start + nbytes
    return places
