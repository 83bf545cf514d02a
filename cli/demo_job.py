"""The demo's job: takes all the device memory it was promised, fills it with a pattern, and reads all of it back."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..vmm.blocks import Allocation

CHUNK_BYTES: Final = 64 << 20
PATTERN_BYTES: Final = 1 << 20


def pattern(seed: int) -> bytes:
    """A megabyte that differs from every other seed's."""
    return hashlib.shake_128(str(seed).encode()).digest(PATTERN_BYTES)


def fill(allocation: Allocation, seed: int) -> None:
    block = pattern(seed)
    for offset in range(0, allocation.nbytes, PATTERN_BYTES):
        # Each block begins with its own offset, so that a block in the wrong place shows too.
        marked = offset.to_bytes(8, "big") + block[8:]
        ctypes.memmove(allocation.address + offset, marked, min(PATTERN_BYTES, allocation.nbytes - offset))


def wrong_blocks(allocation: Allocation, seed: int) -> int:
    block = pattern(seed)
    wrong = 0
    for offset in range(0, allocation.nbytes, PATTERN_BYTES):
        size = min(PATTERN_BYTES, allocation.nbytes - offset)
        marked = offset.to_bytes(8, "big") + block[8:]
        wrong += ctypes.string_at(allocation.address + offset, size) != marked[:size]
    return wrong


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fills device memory with a pattern and reads it back.")
    parser.add_argument("--bytes", type=int, required=True, dest="nbytes")
    parser.add_argument("--seconds", type=float, default=2.0, help="read it back again until this time is over")
    given = parser.parse_args(arguments)
    from ..vmm.host_device import HostDevice
    from ..vmm.host_driver import HostDriver
    from ..vmm.pool import Pool

    device = HostDevice.from_environment()[0]
    pool = Pool(HostDriver(device))
    began = time.monotonic()
    sizes = [CHUNK_BYTES] * (given.nbytes // CHUNK_BYTES)
    if given.nbytes % CHUNK_BYTES:
        sizes.append(given.nbytes % CHUNK_BYTES)
    allocations = [pool.allocate(size, "job") for size in sizes]
    print(json.dumps({"allocated_bytes": sum(sizes), "free_bytes_left": device.free_bytes()}), flush=True)
    for seed, allocation in enumerate(allocations):
        fill(allocation, seed)
    rounds = wrong = 0
    while rounds == 0 or time.monotonic() - began < given.seconds:
        wrong += sum(wrong_blocks(allocation, seed) for seed, allocation in enumerate(allocations))
        rounds += 1
    verdict = {"allocated_bytes": sum(sizes), "wrong_blocks": wrong, "read_back_rounds": rounds}
    print(json.dumps(verdict), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
