"""Copies between device and host: in chunks, over a few threads, each with a lane of its own.

On CUDA a lane is a stream, so copies of different lanes overlap; on the host device it is the thread that copies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from .driver import CopyLane, Driver
from .host_memory import HUGE_BYTES
from .whole_numbers import require_whole

THREADS_MAX: Final = 256
# Large: above a size that grows with the processor's caches the C library copies past them, and is nearly twice as
# quick there. Smaller where that keeps all threads busy to the end.
COPY_CHUNK_BYTES: Final = 1 << 30
_CHUNK_BYTES_MIN: Final = 16 << 20
_CHUNKS_PER_THREAD: Final = 2  # of several threads one may be slower than the others
# A thread waits for its lane after so many: enough to keep the other lanes' copies overlapping with the wait.
_CHUNKS_IN_FLIGHT: Final = 2


@dataclass(frozen=True, slots=True)
class CopyTask:
    destination: int
    source: int
    nbytes: int

    def cut(self, offset: int, nbytes: int) -> CopyTask:
        return CopyTask(self.destination + offset, self.source + offset, nbytes)

    def start(self, lane: CopyLane) -> None:
        lane.copy(self.destination, self.source, self.nbytes)


@dataclass(frozen=True, slots=True)
class FillTask:
    address: int
    value: int
    nbytes: int

    def cut(self, offset: int, nbytes: int) -> FillTask:
        return FillTask(self.address + offset, self.value, nbytes)

    def start(self, lane: CopyLane) -> None:
        lane.set(self.address, self.value, self.nbytes)


Task = CopyTask | FillTask


class Copier:
    """Opens its lanes at first use and keeps them until `close`. One `run` at a time."""

    def __init__(self, driver: Driver, threads: int) -> None:
        require_whole(threads, "copy_threads", 1, THREADS_MAX)
        self._driver = driver
        self._threads = threads
        self._lanes: list[CopyLane] = []

    def run(self, tasks: Sequence[Task]) -> None:
        """Returns or raises only when nothing of it is copied any more, on any lane."""
        chunk_bytes = self._chunk_bytes(sum(task.nbytes for task in tasks))
        chunks = [chunk for task in tasks for chunk in _chunks(task, chunk_bytes)]
        count = min(self._threads, len(chunks))
        while len(self._lanes) < count:
            self._lanes.append(self._driver.open_lane())
        work = _Work(chunks)
        if count <= 1:
            for lane in self._lanes[:count]:
                work.do(lane)
            return
        with ThreadPoolExecutor(count, thread_name_prefix="lull-copy") as executor:
            futures = [executor.submit(work.do, lane) for lane in self._lanes[:count]]
        for future in futures:
            future.result()

    def _chunk_bytes(self, total_bytes: int) -> int:
        """Every thread gets as many, of about the same size."""
        share_bytes = -(-total_bytes // self._threads)
        pieces = max(-(-share_bytes // COPY_CHUNK_BYTES), 1 if self._threads == 1 else _CHUNKS_PER_THREAD)
        return min(COPY_CHUNK_BYTES, max(_CHUNK_BYTES_MIN, _round_up(-(-share_bytes // pieces))))

    def close(self) -> None:
        """Again is no change; a further `run` opens lanes anew."""
        while self._lanes:
            self._lanes.pop().close()


class _Work:
    def __init__(self, chunks: Sequence[Task]) -> None:
        self._remaining = iter(chunks)
        self._lock = threading.Lock()  # guards the iterator
        self._stop = threading.Event()

    def do(self, lane: CopyLane) -> None:
        try:
            while (chunks := self._next()) and not self._stop.is_set():
                for chunk in chunks:
                    chunk.start(lane)
                lane.synchronize()
        except BaseException as error:
            self._stop.set()
            _settle(lane, error)
            raise

    def _next(self) -> list[Task]:
        with self._lock:
            return list(itertools.islice(self._remaining, _CHUNKS_IN_FLIGHT))


def _settle(lane: CopyLane, error: BaseException) -> None:
    """What the lane has begun before it failed must not be written into memory that is somebody else's by then."""
    try:
        lane.synchronize()
    except Exception as second:  # noqa: BLE001  the first error is the one to raise; this one is told with it
        error.add_note(f"and what was in flight ended with: {second}")


def _chunks(task: Task, chunk_bytes: int) -> Iterator[Task]:
    for offset in range(0, task.nbytes, chunk_bytes):
        yield task.cut(offset, min(chunk_bytes, task.nbytes - offset))


def _round_up(nbytes: int) -> int:
    """To whole huge pages, so that no two threads fault the same one in."""
    return -(-nbytes // HUGE_BYTES) * HUGE_BYTES
