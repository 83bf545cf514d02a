"""The seam to physical memory, in the words of the CUDA virtual memory management API.

A call that raises has changed nothing, unless its docstring says otherwise. Calls are thread-safe. Sizes of reserve,
create, map, set_access and unmap are multiples of the granularity; copy and set take any size. DeviceFailed may come
from every call: then the device is lost to this process, and only what the operating system frees at its end is freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Access(Enum):
    READ = "read"
    READ_WRITE = "read_write"


@dataclass(frozen=True, slots=True)
class Handle:
    """Physical memory of ``nbytes``. ``key`` is the same in every process that imports it."""

    key: str
    nbytes: int


class CopyLane(Protocol):
    """An ordered queue of copies: a CUDA stream, or on the host the calling thread. One thread uses it at a time."""

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """As Driver.copy, but it may return before it is copied. Both sides stay as they are until synchronize."""
        ...

    def set(self, address: int, value: int, nbytes: int) -> None: ...

    def synchronize(self) -> None:
        """Returns when everything of this lane has ended; raises what went wrong in it. Must not hold the GIL."""
        ...

    def close(self) -> None:
        """Waits for what the lane still does. Again is no change; nothing else may follow."""
        ...


class Driver(Protocol):
    @property
    def device_uuid(self) -> str: ...

    @property
    def unified(self) -> bool:
        """True where device and host share their memory: a backup in host memory would free nothing."""
        ...

    @property
    def prefers_pinned(self) -> bool:
        """True where copies to page-locked host memory are so much quicker that backups should be PINNED."""
        ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def failed(self) -> str | None:
        """Why the device is unusable for this process for good (every call is DeviceFailed then), else None."""
        ...

    def granularity(self) -> int: ...

    def free_bytes(self) -> int:
        """Bytes that create could still get, over all processes of the device."""
        ...

    def reserve(self, nbytes: int) -> int:
        """An address range that stays ours until free_address. Touching it while nothing is mapped is fatal."""
        ...

    def free_address(self, address: int, nbytes: int) -> None: ...

    def create(self, nbytes: int) -> Handle:
        """Physical memory. Raises OutOfDeviceMemory, or OutOfHostMemory where the pages come from the host."""
        ...

    def map(self, address: int, nbytes: int, handle: Handle) -> None:
        """Puts the handle at a reserved range, or at a part of one, without access until set_access.

        A handle may be mapped at several places. set_access and unmap are for exactly what was mapped.
        """
        ...

    def set_access(self, address: int, nbytes: int, access: Access) -> None: ...

    def unmap(self, address: int, nbytes: int) -> None:
        """The range is reserved and inaccessible again."""
        ...

    def release(self, handle: Handle) -> None:
        """Gives the handle up. Its memory is free once no process maps or holds it."""
        ...

    def export_handle(self, handle: Handle) -> int:
        """A file descriptor to pass to another process; the caller closes it.

        It keeps the memory alive and is charged to nobody: hold the handle until the other side has imported.
        """
        ...

    def import_handle(self, fd: int, exported: Handle | None = None) -> Handle:
        """The handle behind an exported descriptor, which stays the caller's.

        ``exported`` is the exporter's handle, sent along with the descriptor. A CUDA descriptor tells neither key nor
        size, so it is needed there; where the descriptor tells them, they must agree.
        """
        ...

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copies between any two accessible addresses, host or device. Must not hold the GIL."""
        ...

    def set(self, address: int, value: int, nbytes: int) -> None:
        """Fills with one byte value."""
        ...

    def synchronize(self) -> None:
        """Returns when everything that was started on the device has ended."""
        ...

    def open_lane(self) -> CopyLane:
        """Copies of different lanes may overlap. The caller closes it."""
        ...

    def pin_host(self, address: int, nbytes: int) -> bool:
        """Page-locks host memory, so that copies are quick and overlap. False where that is not allowed: nothing
        changed, and copies work all the same."""
        ...

    def unpin_host(self, address: int, nbytes: int) -> None:
        """Before the memory that pin_host locked is unmapped; the same range."""
        ...
