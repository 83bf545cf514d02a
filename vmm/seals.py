"""The debug mode of immutable tags: is what lies on the device still what was backed up?

A sealed tag is mapped read-only, so this process cannot have written to it; another one that maps the same memory can,
and so can a bug on the device.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from typing import Final

from . import host_memory
from .backup import Backup, round_to_pages
from .blocks import Block
from .driver import Driver
from .errors import ImmutableChanged

_BUFFER_BYTES: Final = 16 << 20


def digest_of_backup(backup: Backup) -> bytes:
    return _digest(backup.address, backup.nbytes)


def require_unchanged(driver: Driver, blocks: Iterable[Block]) -> None:
    """Raises ImmutableChanged for the first block whose device memory is not what its clean backup was."""
    for block in blocks:
        if block.digest is not None and _device_digest(driver, block) != block.digest:
            raise ImmutableChanged(block.allocation.tag, block.allocation.address, block.allocation.nbytes)


def _device_digest(driver: Driver, block: Block) -> bytes:
    """Through a small host buffer: device memory need not be readable from here."""
    address, left_bytes = block.allocation.address, block.allocation.nbytes
    buffer_bytes = round_to_pages(min(_BUFFER_BYTES, left_bytes))
    buffer = host_memory.map_anonymous(buffer_bytes)
    digest = hashlib.blake2b()
    try:
        while left_bytes:
            nbytes = min(buffer_bytes, left_bytes)
            driver.copy(buffer, address, nbytes)
            driver.synchronize()
            _feed(digest, buffer, nbytes)
            address, left_bytes = address + nbytes, left_bytes - nbytes
    finally:
        host_memory.unmap_pages(buffer, buffer_bytes)
    return digest.digest()


def _digest(address: int, nbytes: int) -> bytes:
    digest = hashlib.blake2b()
    _feed(digest, address, nbytes)
    return digest.digest()


def _feed(digest: hashlib.blake2b, address: int, nbytes: int) -> None:
    digest.update((ctypes.c_char * nbytes).from_address(address))
