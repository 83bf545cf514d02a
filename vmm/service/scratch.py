"""A place that is initialised before there is memory for it: one small block, mapped again and again over all of it.

A standby engine can so zero its KV cache and capture graphs at the final addresses at the price of one block. What it
writes there is garbage: every block shows through all others. `replace` puts real memory at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..driver import Access, Driver, Handle
from ..errors import LullMemoryError

BLOCK_BYTES: Final = 512 << 20


class ScratchRange:
    """``nbytes`` are rounded up to the device's granularity, the block down to what fits them. Not thread-safe."""

    def __init__(self, driver: Driver, nbytes: int, *, block_bytes: int = BLOCK_BYTES) -> None:
        """Raises OutOfDeviceMemory if there is not even room for the block."""
        granularity_bytes = driver.granularity()
        if nbytes <= 0 or block_bytes < granularity_bytes:
            raise ValueError(
                f"{nbytes} bytes over blocks of {block_bytes}; a block needs at least {granularity_bytes} bytes"
            )
        self.driver = driver
        self.reserved_bytes = -(-nbytes // granularity_bytes) * granularity_bytes
        block_bytes = min(block_bytes // granularity_bytes * granularity_bytes, self.reserved_bytes)
        self._parts: list[tuple[int, int]] = []  # address and bytes of what is mapped
        self._held: list[Handle] = []
        self.address = driver.reserve(self.reserved_bytes)
        try:
            block = driver.create(block_bytes)
            self._held.append(block)
            whole, rest_bytes = divmod(self.reserved_bytes, block_bytes)
            for number in range(whole):
                self._map(self.address + number * block_bytes, block)
            if rest_bytes:
                rest = driver.create(rest_bytes)
                self._held.append(rest)
                self._map(self.address + whole * block_bytes, rest)
        except BaseException:
            self.close()
            raise

    @property
    def taken_bytes(self) -> int:
        """What it takes of the device now."""
        return sum(handle.nbytes for handle in self._held)

    def replace(self, create: Callable[[int], Handle]) -> None:
        """Real memory instead, of this range from now on: ``create(reserved_bytes)``, called when the blocks are given
        back, whose room it may need. If it raises, nothing is mapped here (touching it is fatal): ask again."""
        self.driver.synchronize()
        self._drop()
        handle = create(self.reserved_bytes)
        self._held.append(handle)
        self._map(self.address, handle)

    def close(self) -> None:
        self._drop()
        self.driver.free_address(self.address, self.reserved_bytes)

    def _map(self, address: int, handle: Handle) -> None:
        self.driver.map(address, handle.nbytes, handle)
        self._parts.append((address, handle.nbytes))
        try:
            self.driver.set_access(address, handle.nbytes, Access.READ_WRITE)
        except LullMemoryError:
            self._drop_last()
            raise

    def _drop(self) -> None:
        while self._parts:
            self._drop_last()
        while self._held:
            self.driver.release(self._held[-1])
            self._held.pop()

    def _drop_last(self) -> None:
        self.driver.unmap(*self._parts[-1])
        self._parts.pop()
