"""Many small pieces in few allocations of a pool: one device handle per tensor would round each up to a granule.

A piece is a buffer object over pool memory. It goes back when that object dies, on whatever thread and at whatever
moment that is, also inside the garbage collector while this very thread holds a lock of the pool or of its driver.
So a dying piece takes no lock that it would have to wait for, and an allocation that is empty is freed by a thread of
its own where the collector is at work. This file does not know torch.
"""

from __future__ import annotations

import _thread
import bisect
import ctypes
import gc
import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from .blocks import Allocation
from .errors import LullMemoryError, OutOfDeviceMemory, TransitionInProgress
from .pool import Pool
from .tags import RestoreMode

ALIGNMENT_BYTES: Final = 64  # what torch's own CPU allocator gives
SMALL_BYTES_MAX: Final = 1 << 20
SMALL_SEGMENT_BYTES: Final = 2 << 20
MEDIUM_BYTES_MAX: Final = 10 << 20
MEDIUM_SEGMENT_BYTES: Final = 20 << 20  # above MEDIUM_BYTES_MAX a piece has an allocation of its own

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Range:
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class _Segment:
    allocation: Allocation
    free: list[_Range] = field(default_factory=list[_Range])  # by offset; no two touch

    @property
    def empty(self) -> bool:
        return len(self.free) == 1 and self.free[0].nbytes == self.allocation.nbytes

    def take(self, nbytes: int) -> int | None:
        """The offset of the first free range that fits."""
        for position, found in enumerate(self.free):
            if found.nbytes > nbytes:
                self.free[position] = _Range(found.offset + nbytes, found.nbytes - nbytes)
                return found.offset
            if found.nbytes == nbytes:
                del self.free[position]
                return found.offset
        return None

    def give_back(self, piece: _Range) -> None:
        position = bisect.bisect(self.free, piece.offset, key=_offset)
        start, end = piece.offset, piece.offset + piece.nbytes
        if position < len(self.free) and self.free[position].offset == end:
            end += self.free.pop(position).nbytes
        if position and self.free[position - 1].offset + self.free[position - 1].nbytes == start:
            position -= 1
            start = self.free.pop(position).offset
        self.free.insert(position, _Range(start, end - start))


def _offset(piece: _Range) -> int:
    return piece.offset


class Segments:
    """The pieces of one tag and restore mode of one pool. Thread-safe."""

    def __init__(self, pool: Pool, tag: str, mode: RestoreMode | None) -> None:
        self.pool = pool
        self.tag = tag
        self.mode = mode
        self._lock = threading.Lock()  # guards the next two; a dying piece only tries it
        self._segments: list[_Segment] = []
        self._surplus: list[Allocation] = []  # empty, to be freed in the pool
        self._dropped: deque[tuple[_Segment, _Range]] = deque()

    def take(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """A buffer over ``nbytes`` of the pool, with whatever they hold. They are free again when it dies.

        Raises what `Pool.allocate` raises. Until it is filled the caller holds ``pool.changing_layout(tag)``: else a
        park could take the memory away.
        """
        rounded_bytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.reclaim()
        with self._lock:
            self._sort_out()
            segment, offset = self._place(rounded_bytes)
        buffer = (ctypes.c_uint8 * nbytes).from_address(segment.allocation.address + offset)
        weakref.finalize(buffer, self._drop, segment, _Range(offset, rounded_bytes)).atexit = False
        return buffer

    def reclaim(self) -> None:
        """Frees what has become empty. What a transition of the pool keeps back now goes before the next one."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._sort_out()
            finally:
                self._lock.release()
        # Popped one by one, since another thread may be here too.
        kept: list[Allocation] = []
        while self._surplus:
            try:
                allocation = self._surplus.pop()
            except IndexError:
                break
            if not self._freed(allocation):
                kept.append(allocation)
        self._surplus.extend(kept)

    def _freed(self, allocation: Allocation) -> bool:
        try:
            self.pool.free(allocation)
        except ValueError:
            return True  # the pool was closed under us
        except TransitionInProgress:
            return False
        except LullMemoryError:
            _log.warning("%s is empty and could not be freed; it is tried again", allocation, exc_info=True)
            return False
        return True

    def _drop(self, segment: _Segment, piece: _Range) -> None:
        self._dropped.append((segment, piece))
        if _collecting_thread == _thread.get_ident():
            _thread.start_new_thread(self.reclaim, ())
        else:
            self.reclaim()

    def _sort_out(self) -> None:
        while self._dropped:
            segment, piece = self._dropped.popleft()
            segment.give_back(piece)
            if segment.empty:
                self._segments.remove(segment)
                self._surplus.append(segment.allocation)

    def _place(self, nbytes: int) -> tuple[_Segment, int]:
        for segment in self._segments:
            if not self.pool.is_sealed(segment.allocation) and (offset := segment.take(nbytes)) is not None:
                return segment, offset
        segment_bytes = _segment_bytes(nbytes)
        try:
            allocation = self.pool.allocate(segment_bytes, self.tag, self.mode)
        except OutOfDeviceMemory:
            if segment_bytes == nbytes:
                raise
            allocation = self.pool.allocate(nbytes, self.tag, self.mode)
        segment = _Segment(allocation, [_Range(0, allocation.nbytes)])
        self._segments.append(segment)
        offset = segment.take(nbytes)
        assert offset is not None, "a new segment has room for what it was made for"
        return segment, offset


def _segment_bytes(nbytes: int) -> int:
    if nbytes <= SMALL_BYTES_MAX:
        return SMALL_SEGMENT_BYTES
    return MEDIUM_SEGMENT_BYTES if nbytes <= MEDIUM_BYTES_MAX else nbytes


_collecting_thread: int | None = None


def _note_collection(phase: str, info: Mapping[str, int]) -> None:
    global _collecting_thread
    _collecting_thread = _thread.get_ident() if phase == "start" else None


gc.callbacks.append(_note_collection)


class SegmentGuest:
    """All segments of one pool. It keeps them, and the pool keeps it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[tuple[str, RestoreMode | None], Segments] = {}

    def segments(self, pool: Pool, tag: str, mode: RestoreMode | None) -> Segments:
        with self._lock:
            found = self._of.get((tag, mode))
            if found is None:
                found = self._of[tag, mode] = Segments(pool, tag, mode)
            return found

    def before_transition(self) -> None:
        with self._lock:
            every = list(self._of.values())
        for segments in every:
            segments.reclaim()

    def after_transition(self) -> None:
        """What was dropped meanwhile is freed with the next piece, or before the next transition."""


_guest_lock: Final = threading.Lock()


def segments_of(pool: Pool, tag: str, mode: RestoreMode | None) -> Segments:
    """The same object for the same pool, tag and mode."""
    with _guest_lock:
        if pool.guest is None:
            pool.guest = SegmentGuest()
        guest = pool.guest
    if not isinstance(guest, SegmentGuest):
        raise TypeError(f"this pool parks the memory of {type(guest).__name__}; give tensors in host memory their own")
    return guest.segments(pool, tag, mode)
