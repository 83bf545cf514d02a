"""Host copies of parked memory, and the threads that copy.

A backup is anonymous memory of exactly the bytes it keeps, rounded up to pages. A pinned one is faulted in before use
and locked where the memlock limit allows. Bytes are asked for before they are taken, so that a park that does not fit
fails while nothing has changed.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from . import host_memory
from .driver import Driver
from .errors import OutOfHostMemory

COPY_CHUNK_BYTES: Final = 16 << 20
UNTOUCHED_BYTES: Final = 64 << 20  # of host memory, left for everybody else


@dataclass(slots=True, eq=False)
class Backup:
    address: int
    nbytes: int
    pinned: bool
    locked: bool
    clean: bool = False  # holds what the device memory holds, or would hold if it were not parked

    @property
    def held_bytes(self) -> int:
        return round_to_pages(self.nbytes)

    def free(self) -> None:
        host_memory.unmap_pages(self.address, self.held_bytes)


def allocate_backup(nbytes: int, *, pinned: bool) -> Backup:
    """To be called inside `promise`, which has asked whether there is room."""
    size_bytes = round_to_pages(nbytes)
    try:
        address = host_memory.map_pages(
            None, size_bytes, host_memory.PROT_READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:
        raise OutOfHostMemory(size_bytes, host_memory.available_bytes(), _PURPOSE) from error
    host_memory.advise_pages(address, size_bytes, host_memory.MADV_DONTFORK)
    host_memory.advise_pages(address, size_bytes, host_memory.MADV_HUGEPAGE)
    locked = False
    if pinned:
        # An old kernel cannot populate; then the first copy faults the pages in.
        host_memory.advise_pages(address, size_bytes, host_memory.MADV_POPULATE_WRITE)
        locked = host_memory.lock_pages(address, size_bytes)
    return Backup(address, nbytes, pinned, locked)


# Bytes that a park of this process was allowed to take and may not have faulted in yet: MemAvailable does not show
# them, and another pool may ask at the same time.
_promised_bytes = 0
_promises = threading.Lock()
_PURPOSE: Final = "the backup of device memory"


@contextmanager
def promise(sizes_bytes: Iterable[int], available_bytes: Callable[[], int]) -> Generator[None]:
    """Room for backups of these sizes while the block runs and fills them; else OutOfHostMemory."""
    global _promised_bytes
    needed_bytes = sum(round_to_pages(nbytes) for nbytes in sizes_bytes)
    with _promises:
        if needed_bytes:
            room_bytes = max(0, available_bytes() - UNTOUCHED_BYTES - _promised_bytes)
            if needed_bytes > room_bytes:
                raise OutOfHostMemory(needed_bytes, room_bytes, _PURPOSE)
        _promised_bytes += needed_bytes
    try:
        yield
    finally:
        with _promises:
            _promised_bytes -= needed_bytes


@dataclass(frozen=True, slots=True)
class CopyTask:
    destination: int
    source: int
    nbytes: int


class Copier:
    """Copies in chunks over a few threads. Returns or raises only when no thread copies any more."""

    def __init__(self, driver: Driver, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"copy_threads is {threads}; at least 1 is needed")
        self._driver = driver
        self._threads = threads

    def run(self, tasks: Sequence[CopyTask]) -> None:
        chunks = [chunk for task in tasks for chunk in _chunks(task)]
        if len(chunks) <= 1 or self._threads == 1:
            for chunk in chunks:
                self._driver.copy(chunk.destination, chunk.source, chunk.nbytes)
            return
        remaining = iter(chunks)
        lock = threading.Lock()
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                with lock:
                    chunk = next(remaining, None)
                if chunk is None:
                    return
                try:
                    self._driver.copy(chunk.destination, chunk.source, chunk.nbytes)
                except BaseException:
                    stop.set()
                    raise

        with ThreadPoolExecutor(self._threads, thread_name_prefix="lull-copy") as executor:
            futures = [executor.submit(work) for _ in range(min(self._threads, len(chunks)))]
        for future in futures:
            future.result()


def _chunks(task: CopyTask) -> Iterator[CopyTask]:
    for offset in range(0, task.nbytes, COPY_CHUNK_BYTES):
        nbytes = min(COPY_CHUNK_BYTES, task.nbytes - offset)
        yield CopyTask(task.destination + offset, task.source + offset, nbytes)


def round_to_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
