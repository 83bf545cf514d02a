"""The seam to physical memory, in the words of the CUDA virtual memory management API.

A call that raises has changed nothing, unless its docstring says otherwise. Calls are thread-safe. Sizes of reserve,
create, map, set_access and unmap are multiples of the granularity; copy and set take any size.
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


class Driver(Protocol):
    @property
    def device_uuid(self) -> str: ...

    @property
    def unified(self) -> bool:
        """True where device and host share their memory: a backup in host memory would free nothing."""
        ...

    @property
    def capacity_bytes(self) -> int: ...

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
        """Puts the handle at a reserved address, without access until set_access."""
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

    def import_handle(self, fd: int) -> Handle:
        """The handle behind an exported descriptor, which stays the caller's."""
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
