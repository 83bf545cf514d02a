"""The Driver of the host-memory device: a handle is a memfd, a mapping is mmap, the shared ledger says out of memory.

Pages are committed at create and belong to the memfd alone, so its st_blocks is the truth that others may measure. A
handle is gone when it is released and mapped nowhere; then its descriptor is closed and its bytes are discharged. As
with CUDA, nothing of it can be used after a fork: mappings are not inherited, a forked child drops the descriptors.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import re
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, cast

from . import host_memory
from .copier import THREADS_MAX
from .driver import Access, Handle
from .errors import DeviceFailed, DriverError, LullMemoryError, OutOfHostMemory
from .host_charges import HostCharges
from .host_device import CAPACITY_BYTES_MAX, HostDevice, process_key
from .host_lane import HostLane
from .host_pages import commit_pages
from .whole_numbers import require_whole

OWNER_ENVIRONMENT_NAME: Final = "LULL_ATTEMPT"
OWNER_BYTES_ENVIRONMENT_NAME: Final = "LULL_HBM_BYTES"
GRANULARITY_BYTES: Final = 2 << 20  # CUDA's usual minimum, and one huge page
VERBS: Final = frozenset(
    {
        "reserve",
        "free_address",
        "create",
        "map",
        "set_access",
        "unmap",
        "release",
        "export_handle",
        "import_handle",
        "copy",
        "set",
        "synchronize",
        "free_bytes",
        "open_lane",
        "pin_host",
        "unpin_host",
    }
)

_MEMFD_PATTERN: Final = re.compile(r"/memfd:lull:([A-Za-z0-9-]+):([0-9a-f]{32})(?: \(deleted\))?")
_PROTECTION: Final = {Access.READ: host_memory.PROT_READ, Access.READ_WRITE: host_memory.PROT_READ_WRITE}
_POPULATE_BYTES_MIN: Final = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Physical:
    handle: Handle
    fd: int
    held: bool = True  # until release
    mappings: int = 0


@dataclass(frozen=True, slots=True)
class _Fault:
    nth_call: int
    error: Exception


class HostDriver:
    """One process's use of one host device."""

    def __init__(
        self,
        device: HostDevice,
        *,
        owner: str | None = None,
        owner_bytes_max: int | None = None,
        granularity_bytes: int = GRANULARITY_BYTES,
        huge_pages: bool = True,
        page_threads: int | None = None,
    ) -> None:
        """``owner`` and its limit default to LULL_ATTEMPT and LULL_HBM_BYTES, which a job finds in its environment.

        Large handles get huge pages where the kernel gives them, made by ``page_threads`` threads (2, or the number of
        processors where that is less).
        """
        if not isinstance(cast("object", device), HostDevice):
            raise TypeError(f"device is {device!r}; it must be a HostDevice, as HostDevice.open returns one")
        if page_threads is not None:
            require_whole(page_threads, "page_threads", 1, THREADS_MAX)
        if owner_bytes_max is not None:
            require_whole(owner_bytes_max, "owner_bytes_max", 0, CAPACITY_BYTES_MAX)
        whole = isinstance(cast("object", granularity_bytes), int)
        if not whole or granularity_bytes <= 0 or granularity_bytes % mmap.PAGESIZE:
            raise ValueError(f"granularity_bytes is {granularity_bytes!r}; it must be a multiple of the page size")
        identity = process_key(os.getpid())
        assert identity is not None, "we are alive"
        self.device = device
        self._charges = HostCharges(
            device,
            identity,
            owner if owner is not None else os.environ.get(OWNER_ENVIRONMENT_NAME),
            owner_bytes_max if owner_bytes_max is not None else _owner_bytes_from_environment(),
        )
        self._granularity_bytes = granularity_bytes
        self._huge_pages = huge_pages
        self._page_threads = page_threads or min(2, os.cpu_count() or 1)
        self._process = identity
        self._lock = threading.Lock()  # guards the tables below; never held over a copy or a page fault
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, _Physical] = {}
        self._in_parts: set[int] = set()  # reserved ranges with mappings that are smaller than they
        self._physical: dict[str, _Physical] = {}
        self._calls: dict[str, int] = {}
        self._faults: dict[str, list[_Fault]] = {}
        self._failed: str | None = None
        _drivers.add(self)

    @property
    def device_uuid(self) -> str:
        return self.device.uuid

    @property
    def unified(self) -> bool:
        return self.device.kind == "unified"

    @property
    def prefers_pinned(self) -> bool:
        return False  # a copy is a copy here, and a kept backup doubles the host memory

    @property
    def capacity_bytes(self) -> int:
        return self.device.capacity_bytes

    @property
    def failed(self) -> str | None:
        return self._failed

    def granularity(self) -> int:
        return self._granularity_bytes

    def free_bytes(self) -> int:
        self._enter("free_bytes")
        with _os_errors_as("free_bytes"):
            return self.device.free_bytes()

    def inject(self, verb: str, error: Exception, *, nth_call: int = 1) -> None:
        """For tests: the ``nth_call``-th call of ``verb`` from now raises ``error`` and changes nothing. Once,
        but DeviceFailed stays: from then on every verb raises it."""
        if verb not in VERBS:
            raise ValueError(f"verb is {verb!r}; expected one of {', '.join(sorted(VERBS))}")
        if nth_call < 1:
            raise ValueError(f"nth_call is {nth_call}; the next call is 1")
        with self._lock:
            self._faults.setdefault(verb, []).append(_Fault(self._calls.get(verb, 0) + nth_call, error))

    def clear_faults(self) -> None:
        with self._lock:
            self._faults.clear()

    def calls(self, verb: str) -> int:
        """How often ``verb`` was called so far."""
        with self._lock:
            return self._calls.get(verb, 0)

    def reserve(self, nbytes: int) -> int:
        self._enter("reserve", nbytes)
        # Over-reserve, then cut both ends: mmap aligns to pages only.
        slack_bytes = self._granularity_bytes
        try:
            start = host_memory.map_pages(None, nbytes + slack_bytes, host_memory.PROT_NONE, host_memory.RESERVED)
        except OSError as error:
            room = "an address range for device memory (ulimit -v, and what a process may map)"
            raise OutOfHostMemory(nbytes, host_memory.available_bytes(), room) from error
        with _os_errors_as("reserve"):
            address = -(-start // slack_bytes) * slack_bytes
            if address > start:
                host_memory.unmap_pages(start, address - start)
            if tail_bytes := start + slack_bytes - address:
                host_memory.unmap_pages(address + nbytes, tail_bytes)
        with self._lock:
            self._reserved[address] = nbytes
        return address

    def reserve_at(self, address: int, nbytes: int) -> bool:
        """See `PlacingDriver`."""
        self._enter("reserve", nbytes)
        flags = host_memory.RESERVED | host_memory.MAP_FIXED_NOREPLACE
        try:
            if address % self._granularity_bytes:
                return False
            start = host_memory.map_pages(address, nbytes, host_memory.PROT_NONE, flags)
        except OSError:
            return False
        if start != address:  # a kernel that knows the flag not
            host_memory.unmap_pages(start, nbytes)
            return False
        with self._lock:
            self._reserved[address] = nbytes
        return True

    def free_address(self, address: int, nbytes: int) -> None:
        self._enter("free_address", nbytes)
        with self._lock:
            if self._reserved.get(address) != nbytes:
                raise DriverError("free_address", f"{address:#x} with {nbytes} bytes is not a reserved range")
            if self._is_mapped(address, nbytes):
                raise DriverError("free_address", f"{address:#x} is still mapped; unmap it first")
            with _os_errors_as("free_address"):
                host_memory.unmap_pages(address, nbytes)
            del self._reserved[address]
            self._in_parts.discard(address)

    def create(self, nbytes: int) -> Handle:
        self._enter("create", nbytes)
        handle = self._charges.charged_handle(nbytes)
        try:
            # After the charge: what is refused for the device's capacity must not be blamed on the host.
            with _os_errors_as("create"):
                available_bytes = host_memory.available_bytes()
            if nbytes > available_bytes:
                raise OutOfHostMemory(nbytes, available_bytes, "host-device memory")
            fd = self._committed_memfd(handle)
        except BaseException:
            self._charges.discharge(handle.key)
            raise
        with self._lock:
            self._physical[handle.key] = _Physical(handle, fd)
        return handle

    def map(self, address: int, nbytes: int, handle: Handle) -> None:
        self._enter("map", nbytes)
        with self._lock:
            start = self._reserved_around("map", address, nbytes)
            physical = self._require_held("map", handle)
            if self._is_mapped(address, nbytes):
                raise DriverError("map", f"{address:#x} is mapped already; unmap it first")
            if handle.nbytes != nbytes:
                raise DriverError("map", f"the handle has {handle.nbytes} bytes, the range {nbytes}")
            with _os_errors_as("map"):
                host_memory.map_pages(address, nbytes, host_memory.PROT_NONE, host_memory.SHARED_FIXED, physical.fd)
                host_memory.advise_pages(address, nbytes, host_memory.MADV_DONTFORK)
                if self._huge_pages:
                    host_memory.advise_pages(address, nbytes, host_memory.MADV_HUGEPAGE)
            physical.mappings += 1
            self._mapped[address] = physical
            if self._reserved[start] != nbytes:
                self._in_parts.add(start)

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        self._enter("set_access", nbytes)
        with self._lock:
            self._require_mapped("set_access", address, nbytes)
            with _os_errors_as("set_access"):
                host_memory.protect_pages(address, nbytes, _PROTECTION[access])

    def unmap(self, address: int, nbytes: int) -> None:
        self._enter("unmap", nbytes)
        with self._lock:
            physical = self._require_mapped("unmap", address, nbytes)
            # Else the kernel marks each page as used while it unmaps it, which takes as long again.
            host_memory.advise_pages(address, nbytes, host_memory.MADV_SEQUENTIAL)
            with _os_errors_as("unmap"):
                host_memory.map_pages(
                    address, nbytes, host_memory.PROT_NONE, host_memory.RESERVED | host_memory.MAP_FIXED
                )
            del self._mapped[address]
            physical.mappings -= 1
        self._drop_if_unused(physical)

    def release(self, handle: Handle) -> None:
        self._enter("release")
        with self._lock:
            physical = self._require_held("release", handle)
            physical.held = False
        self._drop_if_unused(physical)

    def export_handle(self, handle: Handle) -> int:
        self._enter("export_handle")
        with self._lock, _os_errors_as("export_handle"):
            return fcntl.fcntl(self._require_held("export_handle", handle).fd, fcntl.F_DUPFD_CLOEXEC, 0)

    def import_handle(self, fd: int, exported: Handle | None = None) -> Handle:
        self._enter("import_handle")
        with _os_errors_as("import_handle"):
            match = _MEMFD_PATTERN.fullmatch(os.readlink(f"/proc/self/fd/{fd}"))
        if match is None or match[1] != self.device.uuid:
            raise DriverError("import_handle", f"descriptor {fd} is not memory of device {self.device.uuid}")
        with _os_errors_as("import_handle"):
            handle = Handle(match[2], os.fstat(fd).st_size)
            if exported not in (None, handle):
                raise DriverError("import_handle", f"descriptor {fd} is {handle}, not {exported}")
            own_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        try:
            self._charges.charge(handle)
            with self._lock:
                if handle.key in self._physical:
                    raise DriverError(
                        "import_handle", f"{handle.key} is held by this process already: use the pool that has it"
                    )
                self._physical[handle.key] = _Physical(handle, own_fd)
        except BaseException:
            os.close(own_fd)
            raise
        return handle

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._enter("copy")
        if nbytes >= _POPULATE_BYTES_MIN and destination % mmap.PAGESIZE == 0:
            # Faulting the pages in by one call is several times quicker than one by one while copying.
            whole_pages_bytes = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
            host_memory.advise_pages(destination, whole_pages_bytes, host_memory.MADV_POPULATE_WRITE)
        ctypes.memmove(destination, source, nbytes)  # releases the GIL

    def set(self, address: int, value: int, nbytes: int) -> None:
        self._enter("set")
        ctypes.memset(address, value, nbytes)

    def synchronize(self) -> None:
        self._enter("synchronize")  # every verb has ended when it returns

    def open_lane(self) -> HostLane:
        self._enter("open_lane")
        return HostLane(self)

    def pin_host(self, address: int, nbytes: int) -> bool:
        self._enter("pin_host")
        return host_memory.lock_pages(address, nbytes)

    def unpin_host(self, address: int, nbytes: int) -> None:
        self._enter("unpin_host")
        with _os_errors_as("unpin_host"):
            host_memory.unlock_pages(address, nbytes)

    def _enter(self, verb: str, nbytes: int | None = None) -> None:
        """What every verb begins with: our process, a whole number of granules, no fault due."""
        if os.getpid() != self._process.pid:
            raise DriverError(verb, "the driver belongs to the process before the fork; make a new one")
        if nbytes is not None and (nbytes <= 0 or nbytes % self._granularity_bytes):
            raise DriverError(verb, f"{nbytes} bytes are no multiple of {self._granularity_bytes}")
        with self._lock:
            number = self._calls[verb] = self._calls.get(verb, 0) + 1
            if self._failed is not None:
                raise DeviceFailed(verb, self._failed)
            for fault in self._faults.get(verb, ()):
                if fault.nth_call == number:
                    if isinstance(fault.error, DeviceFailed):
                        self._failed = fault.error.reason
                    raise fault.error

    def together(self, create_bytes: Sequence[int] = ()) -> AbstractContextManager[None]:
        """See `TogetherDriver`. The ledger is written once before and once after."""
        return self._charges.together(create_bytes)

    def _committed_memfd(self, handle: Handle) -> int:
        name = f"lull:{self.device.uuid}:{handle.key}"
        with _os_errors_as("create"):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, handle.nbytes)
            commit_pages(fd, handle.nbytes, huge=self._huge_pages, threads=self._page_threads)
            # A peer with the descriptor must not be able to cut pages away under us.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(fd)
            raise OutOfHostMemory(handle.nbytes, host_memory.available_bytes(), "host-device memory") from error
        return fd

    def _drop_if_unused(self, physical: _Physical) -> None:
        with self._lock:
            if physical.held or physical.mappings or self._physical.pop(physical.handle.key, None) is None:
                return
        try:
            os.close(physical.fd)
        except OSError as error:  # what was asked for is done all the same
            _log.warning("device %s: the descriptor of %s was lost: %s", self.device.uuid, physical.handle.key, error)
        self._charges.discharge(physical.handle.key)

    def _reserved_around(self, verb: str, address: int, nbytes: int) -> int:
        """Where the reserved range begins that this is, or is a part of."""
        if self._reserved.get(address, 0) >= nbytes:
            return address
        for start, reserved_bytes in self._reserved.items():
            if start <= address and address + nbytes <= start + reserved_bytes:
                return start
        raise DriverError(verb, f"{address:#x} with {nbytes} bytes is not in a reserved range")

    def _is_mapped(self, address: int, nbytes: int) -> bool:
        """Whether anything is mapped there. Ranges that hold several mappings are few: only then all are looked at."""
        if not self._in_parts:
            return address in self._mapped
        return any(at < address + nbytes and address < at + p.handle.nbytes for at, p in self._mapped.items())

    def _require_mapped(self, verb: str, address: int, nbytes: int) -> _Physical:
        physical = self._mapped.get(address)
        if physical is None or physical.handle.nbytes != nbytes:
            raise DriverError(verb, f"nothing of {nbytes} bytes is mapped at {address:#x}")
        return physical

    def _require_held(self, verb: str, handle: Handle) -> _Physical:
        physical = self._physical.get(handle.key)
        if physical is None or not physical.held:
            raise DriverError(verb, f"handle {handle.key} is not held by this process")
        return physical

    def _forget_after_fork(self) -> None:
        """In a forked child, without locks: another thread may have held them."""
        for physical in list(self._physical.values()):
            os.close(physical.fd)
        self._physical.clear()


_drivers: weakref.WeakSet[HostDriver] = weakref.WeakSet()


def _forget_all_after_fork() -> None:
    for driver in list(_drivers):
        driver._forget_after_fork()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forget_all_after_fork)


@contextmanager
def _os_errors_as(verb: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DriverError(verb, str(error)) from error


def _owner_bytes_from_environment() -> int | None:
    value = os.environ.get(OWNER_BYTES_ENVIRONMENT_NAME)
    if value is None:
        return None
    if not value.isdecimal():
        raise LullMemoryError(f"{OWNER_BYTES_ENVIRONMENT_NAME} is {value!r}; it must be a number of bytes")
    return int(value)
