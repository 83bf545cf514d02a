"""What the machine itself takes for the steps of a park and a wake: plain copies, fresh pages, giving pages back.

No pool, no driver, no ledger: only system calls and memmove, over the same kind of memory and as many threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from ..vmm import host_memory
from ..vmm.host_memory import HUGE_BYTES
from ..vmm.host_pages import commit_pages, huge_mapped_bytes
from .memory_costs import timed


@contextmanager
def warm_buffer(nbytes: int, *, huge: bool) -> Generator[int]:
    """The address of anonymous memory whose pages are all there, in huge ones on request, if the kernel gives them."""
    address = host_memory.map_anonymous(nbytes)
    try:
        if not huge:
            host_memory.advise_pages(address, nbytes, host_memory.MADV_NOHUGEPAGE)
        ctypes.memset(address, 1, nbytes)
        yield address
    finally:
        host_memory.unmap_pages(address, nbytes)


def copy_seconds(destination: int, source: int, nbytes: int, threads: int) -> float:
    return timed(lambda: _copy(destination, source, nbytes, threads))


def _copy(destination: int, source: int, nbytes: int, threads: int) -> None:
    if threads == 1:
        ctypes.memmove(destination, source, nbytes)
        return
    share_bytes = -(-nbytes // threads // HUGE_BYTES) * HUGE_BYTES
    offsets = range(0, nbytes, share_bytes)

    def copy(offset: int) -> None:
        ctypes.memmove(destination + offset, source + offset, min(share_bytes, nbytes - offset))

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(copy, offsets))


def fresh_copy_seconds(source: int, nbytes: int, threads: int, *, huge: bool) -> float:
    """Shared pages that did not exist before, mapped and filled. Ordinary ones come by the copy's own page faults.

    Huge ones are asked for first, as the copy alone gets none where ``shmem_enabled`` is ``never``.
    """
    with _reserved(nbytes) as address:
        fd = _shared_memory(nbytes)

        def fill() -> None:
            if huge:
                commit_pages(fd, nbytes, huge=True, threads=threads)
            _map(fd, address, nbytes, huge=huge)
            _copy(address, source, nbytes, threads)

        seconds = timed(fill)
        os.close(fd)
        return seconds


def fresh_private_copy_seconds(source: int, nbytes: int, threads: int) -> float:
    """Anonymous pages that did not exist before, such as a backup's that is not kept."""
    address = 0

    def fill() -> None:
        nonlocal address
        address = host_memory.map_anonymous(nbytes)
        _copy(address, source, nbytes, threads)

    seconds = timed(fill)
    host_memory.unmap_pages(address, nbytes)
    return seconds


def give_back_seconds(source: int, nbytes: int, *, huge: bool) -> tuple[float, int]:
    """Unmapping and releasing pages that were in use; and how many bytes of them lay in huge pages."""
    with _reserved(nbytes) as address:
        fd = _shared_memory(nbytes)
        commit_pages(fd, nbytes, huge=huge, threads=1)
        _map(fd, address, nbytes, huge=huge)
        host_memory.advise_pages(address, nbytes, host_memory.MADV_POPULATE_WRITE)  # as the pool's pages came to be
        ctypes.memmove(address, source, nbytes)
        huge_bytes = huge_mapped_bytes(address, nbytes)

        def give_back() -> None:
            flags = host_memory.RESERVED | host_memory.MAP_FIXED
            host_memory.map_pages(address, nbytes, host_memory.PROT_NONE, flags)
            os.close(fd)

        return timed(give_back), huge_bytes


@contextmanager
def _reserved(nbytes: int) -> Generator[int]:
    reserved_bytes = nbytes + HUGE_BYTES
    start = host_memory.map_pages(None, reserved_bytes, host_memory.PROT_NONE, host_memory.RESERVED)
    try:
        yield -(-start // HUGE_BYTES) * HUGE_BYTES
    finally:
        host_memory.unmap_pages(start, reserved_bytes)


def _shared_memory(nbytes: int) -> int:
    fd = os.memfd_create("lull-bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def _map(fd: int, address: int, nbytes: int, *, huge: bool) -> None:
    host_memory.map_pages(address, nbytes, host_memory.PROT_READ_WRITE, host_memory.SHARED_FIXED, fd)
    if huge:
        host_memory.advise_pages(address, nbytes, host_memory.MADV_HUGEPAGE)


SYSTEM_SETTINGS: Final = {
    "transparent_hugepage": "/sys/kernel/mm/transparent_hugepage/enabled",
    "transparent_hugepage_shmem": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
}


def system_facts() -> dict[str, object]:
    """What the numbers depend on."""
    facts: dict[str, object] = {"processors": os.cpu_count(), "kernel": os.uname().release}
    for name, path in SYSTEM_SETTINGS.items():
        try:
            with open(path, encoding="ascii") as file:
                facts[name] = file.read().partition("[")[2].partition("]")[0]
        except OSError:
            facts[name] = None
    lockable_bytes = host_memory.lockable_bytes()
    facts["lockable_bytes"] = "unlimited" if lockable_bytes is None else lockable_bytes
    return facts
