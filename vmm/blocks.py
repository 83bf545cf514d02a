"""One allocation's physical side: its handle, its mapping, its backup, and the steps between them.

Every step looks at what is there already, so that a step that raised can be asked for again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from .backup import Backup
from .copier import CopyTask, FillTask, Task
from .driver import Access, Driver, Handle
from .errors import DeviceFailed, LullMemoryError
from .tags import KEEPS_CONTENTS, RestoreMode


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """What a pool's user holds. ``address`` and ``nbytes`` are fixed for its life; the pool owns the rest."""

    address: int
    nbytes: int
    reserved_bytes: int  # nbytes rounded up to the device's granularity: what it takes there
    tag: str
    mode: RestoreMode


@dataclass(slots=True, eq=False)
class Block:
    allocation: Allocation
    handle: Handle | None = None
    mapped: bool = False
    contents_here: bool = False  # the handle holds what the user wrote
    sealed: bool = False  # mapped read-only, so the clean backup stays clean
    backup: Backup | None = None
    digest: bytes | None = None  # of the clean backup, where changes of it are looked for
    in_doubt: bool = False  # a release raised: the handle may be gone
    dropped: bool = False  # parked without its contents this once, whatever its mode
    leaving: bool = False  # being freed: no part of any park or wake, even if freeing it failed

    @property
    def keeps_contents(self) -> bool:
        return self.allocation.mode in KEEPS_CONTENTS and not self.dropped

    @property
    def has_clean_backup(self) -> bool:
        return self.backup is not None and self.backup.clean

    @property
    def needs_copy_out(self) -> bool:
        return self.keeps_contents and not self.has_clean_backup

    @property
    def contents_lost(self) -> bool:
        """Owed to its user, and nowhere."""
        return self.keeps_contents and not self.in_place and not self.has_clean_backup

    @property
    def in_place(self) -> bool:
        return self.contents_here and self.mapped

    def create(self, driver: Driver) -> None:
        if self.in_doubt:
            self._look_for_handle(driver)
        if self.handle is None:
            self.handle = driver.create(self.allocation.reserved_bytes)

    def attach(self, driver: Driver) -> None:
        assert self.handle is not None, "create comes first"
        address, nbytes = self.allocation.address, self.allocation.reserved_bytes
        if not self.mapped:
            driver.map(address, nbytes, self.handle)
            self.mapped = True
        driver.set_access(address, nbytes, Access.READ_WRITE)
        self.sealed = False

    def detach(self, driver: Driver) -> None:
        if self.in_doubt:
            self._look_for_handle(driver)
        if self.mapped:
            try:
                driver.unmap(self.allocation.address, self.allocation.reserved_bytes)
            except BaseException as error:
                self._look_for_mapping(driver, error)
                raise
            self.mapped = self.sealed = False
        if self.handle is not None:
            self.in_doubt = True
            driver.release(self.handle)
            self.handle = None
            self.contents_here = self.in_doubt = False

    def _look_for_mapping(self, driver: Driver, error: BaseException) -> None:
        """After an unmap that raised. What is mapped the driver can tell, whatever its error means."""
        access = Access.READ if self.sealed else Access.READ_WRITE
        try:
            if not isinstance(error, DeviceFailed):
                driver.set_access(self.allocation.address, self.allocation.reserved_bytes, access)
        except LullMemoryError:
            self.mapped = self.sealed = False

    def _look_for_handle(self, driver: Driver) -> None:
        """After a release that raised: what can be mapped is held. What cannot is given up, not relied on."""
        handle = self.handle
        assert handle is not None, "a handle that is gone is not in doubt"
        try:
            driver.map(self.allocation.address, self.allocation.reserved_bytes, handle)
            self.mapped, self.in_doubt = True, False
        except DeviceFailed:
            raise
        except LullMemoryError:
            with suppress(LullMemoryError):
                driver.release(handle)
            self.handle = None
            self.contents_here = self.in_doubt = False

    def seal(self, driver: Driver) -> None:
        if self.has_clean_backup and not self.sealed:
            driver.set_access(self.allocation.address, self.allocation.reserved_bytes, Access.READ)
            self.sealed = True

    def copy_out(self) -> CopyTask:
        assert self.backup is not None, "the backup is allocated first"
        return CopyTask(self.backup.address, self.allocation.address, self.allocation.nbytes)

    def refill(self) -> Task | None:
        """What brings the contents of a new handle to what its mode promises."""
        if self.allocation.mode == RestoreMode.MEMSET:
            return FillTask(self.allocation.address, 0, self.allocation.nbytes)
        if not self.keeps_contents:
            return None
        assert self.backup is not None, "a parked block that keeps its contents has a backup"
        assert self.backup.clean, "never restore from half a backup"
        return CopyTask(self.allocation.address, self.backup.address, self.allocation.nbytes)

    def settle_backup(self) -> None:
        """The contents are in place and may change from now on, unless they are sealed."""
        if self.backup is None or self.sealed:
            return
        self.backup.clean = False
        self.digest = None
        if not self.backup.pinned:
            self.free_backup()

    def free_backup(self) -> None:
        if self.backup is not None:
            self.backup.free()
            self.backup = self.digest = None
