"""Committing the pages of a memfd: huge ones where the kernel gives them, else ordinary ones.

Page faults and not copying are what a wake costs on the host device, and a huge page is one fault instead of 512.
``MADV_COLLAPSE`` (Linux 6.1) makes them even where shared memory gets none by itself (``shmem_enabled`` is ``never``),
and needs no privilege. A range that the kernel refuses keeps ordinary pages: slower, and as good.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from . import host_memory
from .host_memory import HUGE_BYTES

_PIECE_BYTES: Final = 32 << 20  # what a thread asks for at once


def commit_pages(fd: int, nbytes: int, *, huge: bool, threads: int) -> None:
    """Every page of the file exists and is zero. Raises OSError where there is no memory for them."""
    if huge and nbytes >= HUGE_BYTES:
        _ask_for_huge_pages(fd, nbytes // HUGE_BYTES * HUGE_BYTES, threads)
    os.posix_fallocate(fd, 0, nbytes)  # what is not there by now


def _ask_for_huge_pages(fd: int, nbytes: int, threads: int) -> None:
    """Through a mapping for the time being: only a mapping can be advised."""
    start = host_memory.map_pages(None, nbytes + HUGE_BYTES, host_memory.PROT_NONE, host_memory.RESERVED)
    address = -(-start // HUGE_BYTES) * HUGE_BYTES
    try:
        host_memory.map_pages(address, nbytes, host_memory.PROT_READ_WRITE, host_memory.SHARED_FIXED, fd)
        host_memory.advise_pages(address, nbytes, host_memory.MADV_DONTFORK)
        host_memory.advise_pages(address, nbytes, host_memory.MADV_HUGEPAGE)
        pieces = iter(range(0, nbytes, _PIECE_BYTES))
        lock = threading.Lock()

        def work() -> None:
            for offset in _shared(pieces, lock):
                if not _collapse(address + offset, min(_PIECE_BYTES, nbytes - offset)):
                    return  # it will not for the next piece either

        if threads == 1 or nbytes <= _PIECE_BYTES:
            work()
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="lull-pages") as executor:
                for future in [executor.submit(work) for _ in range(threads)]:
                    future.result()
    finally:
        host_memory.unmap_pages(start, nbytes + HUGE_BYTES)


def _collapse(address: int, nbytes: int) -> bool:
    """One ordinary page in each huge one, since the kernel collapses no empty range; then all at once."""
    for page in range(address, address + nbytes, HUGE_BYTES):
        if not host_memory.advise_pages(page, host_memory.PAGE_BYTES, host_memory.MADV_POPULATE_WRITE):
            return False
    return host_memory.advise_pages(address, nbytes, host_memory.MADV_COLLAPSE)


def _shared(pieces: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            piece = next(pieces, None)
        if piece is None:
            return
        yield piece


def huge_mapped_bytes(address: int, nbytes: int) -> int:
    """How much of a mapped range lies in huge pages, as the kernel says."""
    huge_bytes = 0
    inside = False
    with open("/proc/self/smaps", "rb") as lines:  # names of files are bytes
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if not head.endswith(b":"):
                first, _, last = head.partition(b"-")
                inside = int(first, 16) < address + nbytes and int(last, 16) > address
            elif inside and head in (b"AnonHugePages:", b"ShmemPmdMapped:", b"FilePmdMapped:"):
                huge_bytes += int(line.split()[1]) * 1024
    return huge_bytes
