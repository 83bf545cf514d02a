"""What one process has on a host device's ledger: charged before the memory is taken, discharged after it has gone.

So the ledger never says too little. What cannot be discharged at once goes with the next write.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from .driver import Handle
from .errors import LedgerBusy, LullMemoryError
from .host_device import Charge, HostDevice, ProcessKey

_log = logging.getLogger(__name__)


class HostCharges:
    """Thread-safe."""

    def __init__(self, device: HostDevice, process: ProcessKey, owner: str | None, owner_bytes_max: int | None) -> None:
        self._device = device
        self._process = process
        self._owner = owner
        self._owner_bytes_max = owner_bytes_max
        self._lock = threading.Lock()  # guards what follows; never held over the ledger
        self._undischarged: set[str] = set()
        self._charged: dict[int, list[str]] = {}  # by nbytes: keys for the handles that `together` has announced
        self._together = 0
        self._busy = False  # a discharge has waited for the ledger in vain: the next ones only try

    @contextmanager
    def together(self, create_bytes: Sequence[int]) -> Generator[None]:
        """One write before for what is created inside, one after for what is released inside.

        The latter has no error: what is still charged then goes with the next write."""
        announced = [Handle(uuid4().hex, nbytes) for nbytes in create_bytes]
        if announced:
            self._settle()
            self._device.charge_all(map(self._row, announced), self._owner_bytes_max)
        with self._lock:
            self._together += 1
            for handle in announced:
                self._charged.setdefault(handle.nbytes, []).append(handle.key)
        try:
            yield
        finally:
            with self._lock:
                self._together -= 1
                unused = {key for keys in self._charged.values() for key in keys}
                unused.intersection_update(handle.key for handle in announced)
                self._undischarged |= unused
                self._charged = {
                    nbytes: left
                    for nbytes, keys in self._charged.items()
                    if (left := [key for key in keys if key not in unused])
                }
            self._try_to_settle()

    def charged_handle(self, nbytes: int) -> Handle:
        """A new handle whose memory may be taken now. Raises OutOfDeviceMemory, and what is wrong with the ledger."""
        with self._lock:
            if keys := self._charged.get(nbytes):
                return Handle(keys.pop(), nbytes)
        handle = Handle(uuid4().hex, nbytes)
        self._settle()
        self.charge(handle)
        return handle

    def charge(self, handle: Handle) -> None:
        self._device.charge(self._row(handle), self._owner_bytes_max)

    def discharge(self, key: str) -> None:
        """Of memory that is gone. Does not raise for the ledger."""
        with self._lock:
            self._undischarged.add(key)
            later = self._together > 0
        if not later:
            self._try_to_settle()

    def _row(self, handle: Handle) -> Charge:
        return Charge(handle.key, self._process.pid, self._process.start_ticks, handle.nbytes, self._owner)

    def _try_to_settle(self) -> None:
        try:
            self._settle(lock_seconds_max=0 if self._busy else None)
        except LullMemoryError as error:
            self._busy = isinstance(error, LedgerBusy)
            _log.warning("device %s: memory is free but still charged: %s", self._device.uuid, error)

    def _settle(self, *, lock_seconds_max: float | None = None) -> None:
        with self._lock:
            keys = set(self._undischarged)
        if keys:
            self._device.discharge(keys, self._process, lock_seconds_max=lock_seconds_max)
            self._busy = False
            with self._lock:
                self._undischarged -= keys
