"""The memory of one pool in the service: handles while its bytes are on the device, backups while they are not.

Only one thread works on it at a time; the pool's locks and its activity see to that. Nothing is mapped here but for the
time of a copy, so a service that never keeps a backup needs no context on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager

from ..backup import Backup, allocate_backup, promise
from ..copier import Copier, CopyTask
from ..driver import Access, Driver, Handle
from ..errors import LullMemoryError, OutOfDeviceMemory, UnsupportedMode
from .errors import LayoutInvalid
from .layout import Layout, SlotRecord
from .state import EventRing, PoolState

_log = logging.getLogger(__name__)


class HeldPool:
    def __init__(
        self,
        name: str,
        driver: Driver,
        events: EventRing,
        *,
        copy_threads: int,
        host_bytes_available: Callable[[], int],
    ) -> None:
        self.name = name
        self.state = PoolState(name, events)
        self.layout = Layout()
        self.keep_backup = False  # over the next wake
        self.pinned = False
        self.places: dict[int, int] = {}  # of allocations, where the one who sealed the layout had them mapped
        self._driver = driver
        self._events = events
        self._copy_threads = copy_threads
        self._host_bytes_available = host_bytes_available
        self._handles: dict[int, Handle] = {}
        self._backups: dict[int, Backup] = {}

    def resident_bytes(self) -> int:
        return sum(handle.nbytes for handle in self._handles.copy().values())

    def backup_bytes(self) -> int:
        return sum(backup.held_bytes for backup in self._backups.copy().values())

    # -- the writer's

    def create(self, nbytes: int, tag: str) -> tuple[Handle, SlotRecord]:
        """Memory that is not part of the layout yet. Raises OutOfDeviceMemory."""
        self.layout.require_room()
        granularity_bytes = self._driver.granularity()
        reserved_bytes = -(-nbytes // granularity_bytes) * granularity_bytes
        return self._driver.create(reserved_bytes), SlotRecord(nbytes, reserved_bytes, tag)

    def take_over(self, fd: int, exported: Handle, nbytes: int, tag: str) -> tuple[Handle, SlotRecord]:
        """Memory that the writer holds already, and that may hold contents. Not part of the layout yet."""
        self.layout.require_room()
        if nbytes > exported.nbytes:
            raise LayoutInvalid(f"{nbytes} bytes are not within the {exported.nbytes} bytes of the handle")
        handle = self._driver.import_handle(fd, exported)
        return handle, SlotRecord(nbytes, handle.nbytes, tag)

    def add(self, handle: Handle, record: SlotRecord) -> int:
        slot = self.layout.add(record)
        self._handles[slot] = handle
        return slot

    def remove(self, slot: int) -> Handle:
        """Takes the allocation out of the layout; the caller gives the handle back."""
        self.layout.remove(slot)
        return self._handles.pop(slot)

    def give_up(self, handle: Handle) -> None:
        """Releases; a driver that refuses is said and not asked again."""
        try:
            self._driver.release(handle)
        except LullMemoryError as error:
            _log.error("pool %s: %d bytes could not be released: %s", self.name, handle.nbytes, error)
            self._events.add("release_failed", self.name, bytes=handle.nbytes, text=str(error)[:500])

    def export(self, slot: int) -> tuple[Handle, int]:
        """The allocation's handle and a descriptor of it, which the caller closes."""
        handle = self._handles.get(slot)
        if handle is None:
            raise LayoutInvalid(f"there is no allocation {slot}")
        return handle, self._driver.export_handle(handle)

    # -- the whole

    def take_contents(self) -> tuple[list[Handle], list[Backup]]:
        """Empties the pool; the caller gives up what it gets, outside of any lock."""
        handles, backups = list(self._handles.values()), list(self._backups.values())
        self._handles, self._backups, self.layout, self.places = {}, {}, Layout(), {}
        self.keep_backup = self.pinned = False
        return handles, backups

    def take_backups(self) -> list[Backup]:
        backups = list(self._backups.values())
        self._backups = {}
        return backups

    def back_up(self, *, pinned: bool) -> None:
        """Copies everything to host memory. If it raises, there is no backup. OutOfHostMemory is asked for first."""
        if self._driver.unified:
            raise UnsupportedMode(
                f"device {self._driver.device_uuid} shares its memory with the host, so a backup would free nothing"
            )
        for backup in self.take_backups():
            backup.free()
        sizes_bytes = {slot: self.layout.slots[slot].nbytes for slot in self._handles}
        made: dict[int, Backup] = {}
        try:
            with promise(sizes_bytes.values(), self._host_bytes_available):
                for slot, nbytes in sizes_bytes.items():
                    made[slot] = allocate_backup(nbytes, pinned=pinned, driver=self._driver)
                with self._mapped(self._handles, Access.READ) as addresses:
                    tasks = [CopyTask(made[slot].address, addresses[slot], size) for slot, size in sizes_bytes.items()]
                    self._copy(tasks)
        except BaseException:
            for backup in made.values():
                backup.free()
            raise
        self._backups = made

    def give_back(self) -> None:
        """The device's memory, once the backups are made."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            self.give_up(handle)

    def wake(self) -> None:
        """Everything back on the device, from the backups, which stay. If it raises, nothing has changed."""
        needed_bytes = self.layout.reserved_bytes
        free_bytes = self._driver.free_bytes()
        if needed_bytes > free_bytes:
            raise OutOfDeviceMemory(needed_bytes, free_bytes, self._driver.capacity_bytes)
        made: dict[int, Handle] = {}
        try:
            for slot, record in self.layout.slots.items():
                made[slot] = self._driver.create(record.reserved_bytes)
            with self._mapped(made, Access.READ_WRITE) as addresses:
                tasks = [
                    CopyTask(addresses[slot], backup.address, backup.nbytes) for slot, backup in self._backups.items()
                ]
                self._copy(tasks)
        except BaseException:
            for handle in made.values():
                self.give_up(handle)
            raise
        self._handles = made

    def _copy(self, tasks: list[CopyTask]) -> None:
        copier = Copier(self._driver, self._copy_threads)
        try:
            copier.run(tasks)
        finally:
            copier.close()
        self._driver.synchronize()

    @contextmanager
    def _mapped(self, handles: Mapping[int, Handle], access: Access) -> Generator[dict[int, int]]:
        """The handles at addresses of ours while the block runs."""
        addresses: dict[int, int] = {}
        with ExitStack() as stack:
            for slot, handle in handles.items():
                address = self._driver.reserve(handle.nbytes)
                stack.callback(self._driver.free_address, address, handle.nbytes)
                self._driver.map(address, handle.nbytes, handle)
                stack.callback(self._driver.unmap, address, handle.nbytes)
                self._driver.set_access(address, handle.nbytes, access)
                addresses[slot] = address
            yield addresses
