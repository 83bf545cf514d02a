"""What the memory tests share: small devices, patterns, and what /proc says about a process."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

from lull.vmm.blocks import Allocation
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver

GRANULE_BYTES = 64 << 10


def small_driver(path: Path, *, granules: int = 64, kind: str = "discrete") -> HostDriver:
    device = HostDevice.create(path, capacity_bytes=granules * GRANULE_BYTES, kind=kind)
    return HostDriver(device, granularity_bytes=GRANULE_BYTES)


def pattern(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def write(allocation: Allocation, content: bytes) -> None:
    assert len(content) <= allocation.nbytes
    ctypes.memmove(allocation.address, content, len(content))


def read(allocation: Allocation) -> bytes:
    return ctypes.string_at(allocation.address, allocation.nbytes)


def memfd_bytes(pid: int, uuid: str) -> int:
    """The pages of the device's memfds that the process has open, by their inodes and not by anybody's ledger."""
    pages: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if not os.readlink(entry).startswith(f"/memfd:lull:{uuid}:"):
                continue
            status = entry.stat()
        except FileNotFoundError:
            continue
        pages[status.st_ino] = status.st_blocks * 512
    return sum(pages.values())


def mapped_memfds(pid: int, uuid: str) -> int:
    """How many ranges of the process map the device's memory."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return sum(f"/memfd:lull:{uuid}:" in line for line in maps.splitlines())


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Started. The list gets one entry when it ends: what it raised, or None."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
