"""Host copies of parked memory.

A backup is anonymous memory of exactly the bytes it keeps, rounded up to pages. A pinned one is faulted in before use
and page-locked where that is allowed. Bytes are asked for before they are taken, so that a park that does not fit fails
while nothing has changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from . import host_memory
from .driver import Driver
from .errors import LullMemoryError, OutOfHostMemory

UNTOUCHED_BYTES: Final = 64 << 20  # of host memory, left for everybody else

_PURPOSE: Final = "the backup of device memory"
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Backup:
    address: int
    nbytes: int
    pinned: bool
    locked_by: Driver | None  # None: it is not page-locked
    clean: bool = False  # holds what the device memory holds, or would hold if it were not parked

    @property
    def held_bytes(self) -> int:
        return round_to_pages(self.nbytes)

    @property
    def locked(self) -> bool:
        return self.locked_by is not None

    def free(self) -> None:
        """Does not raise for the driver: what it will not unlock stays mapped, since a device may still write there."""
        if self.locked_by is not None:
            try:
                self.locked_by.unpin_host(self.address, self.held_bytes)
            except LullMemoryError as error:
                _log.warning("%d bytes of host memory stay locked until the process ends: %s", self.held_bytes, error)
                return
        host_memory.unmap_pages(self.address, self.held_bytes)


def allocate_backup(nbytes: int, *, pinned: bool, driver: Driver) -> Backup:
    """To be called inside `promise`, which has asked whether there is room. ``driver`` is who copies, and so locks."""
    size_bytes = round_to_pages(nbytes)
    try:
        address = host_memory.map_anonymous(size_bytes)
    except OSError as error:
        raise OutOfHostMemory(size_bytes, host_memory.available_bytes(), _PURPOSE) from error
    backup = Backup(address, nbytes, pinned, None)
    if pinned:
        # An old kernel cannot populate; then the first copy faults the pages in.
        host_memory.advise_pages(address, size_bytes, host_memory.MADV_POPULATE_WRITE)
        try:
            backup.locked_by = driver if driver.pin_host(address, size_bytes) else None
        except BaseException:
            backup.free()
            raise
    return backup


# Bytes that a park of this process was allowed to take and may not have faulted in yet: MemAvailable does not show
# them, and another pool may ask at the same time.
_promised_bytes = 0
_promises = threading.Lock()


@contextmanager
def promise(sizes_bytes: Iterable[int], available_bytes: Callable[[], int]) -> Generator[None]:
    """Room for backups of these sizes while the block runs and fills them; else OutOfHostMemory."""
    global _promised_bytes
    needed_bytes = sum(round_to_pages(nbytes) for nbytes in sizes_bytes)
    with _promises:
        if needed_bytes:
            room_bytes = max(0, available_bytes() - UNTOUCHED_BYTES - _promised_bytes)
            if needed_bytes > room_bytes:
                raise OutOfHostMemory(needed_bytes, room_bytes, _PURPOSE)
        _promised_bytes += needed_bytes
    try:
        yield
    finally:
        with _promises:
            _promised_bytes -= needed_bytes


def round_to_pages(nbytes: int) -> int:
    return -(-nbytes // host_memory.PAGE_BYTES) * host_memory.PAGE_BYTES
