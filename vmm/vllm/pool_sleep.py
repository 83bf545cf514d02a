"""vLLM's sleep and wake on a pool: what its worker asks, done by ours.

Both are whole or not at all: a wake without room leaves everything asleep and can be asked again, where vLLM's own
allocator stays halfway (vllm-project/vllm#34600). No step begins while anything is asleep, and nothing goes to sleep
while a step is in flight: either one would be a segmentation fault.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from ..errors import AdmissionClosed, TransitionRefused, UnsupportedMode
from ..lifecycle import MemoryState
from ..pool import Pool
from ..tags import KEEPS_CONTENTS
from .levels import KV_CACHE, WORKSPACE, lost_at, pool_tags, woken_by


class StepInFlight(TransitionRefused):
    """The memory is in use; nothing was changed."""


class PoolSleep:
    """One worker's. Thread-safe."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._lock = threading.Lock()  # guards the two below
        self._in_flight = 0
        self._changing = False

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def asleep(self) -> tuple[str, ...]:
        """The pool's tags, sorted."""
        return tuple(sorted(self.pool.parked_tags()))

    # -- steps

    def begin_step(self) -> None:
        """`end_step` must follow. AdmissionClosed while anything is asleep or about to be."""
        with self._lock:
            if self._changing or self.pool.parked_tags():
                raise AdmissionClosed(MemoryState.PARKED)
            self._in_flight += 1

    def end_step(self) -> None:
        with self._lock:
            assert self._in_flight, "every step that ends has begun"
            self._in_flight -= 1

    @contextmanager
    def step(self) -> Generator[None]:
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    @contextmanager
    def _while_idle(self) -> Generator[None]:
        with self._lock:
            if self._in_flight:
                raise StepInFlight(f"{self._in_flight} step(s) are in flight; pause the engine and wait for them first")
            if self._changing:
                raise TransitionRefused("another sleep or wake is under way; wait for it")
            self._changing = True
        try:
            yield
        finally:
            with self._lock:
                self._changing = False

    # -- sleep and wake

    def park(self, level: int) -> None:
        """Everything, at one of vLLM's sleep levels. What sleeps already stays as it is.

        Raises StepInFlight, and what `Pool.release` raises.
        """
        tags = tuple(self.pool.bytes_by_tag())
        lost = lost_at(level, tags)
        for allocation in self.pool.allocations():
            if allocation.mode not in KEEPS_CONTENTS and allocation.tag not in (*lost, KV_CACHE, WORKSPACE):
                raise UnsupportedMode(
                    f"tag {allocation.tag} has restore mode {allocation.mode} and would be lost at level {level};"
                    " sleep at level 2 and load it again, or give it CPU or PINNED"
                )
        with self._while_idle():
            self.pool.release(tags, drop=lost)

    def discard(self, tags: Iterable[str]) -> None:
        """vLLM's ``tags``, without their contents."""
        chosen = pool_tags(tags)
        with self._while_idle():
            self.pool.release(chosen, drop=chosen)

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """vLLM's ``tags``, all unless given. OutOfDeviceMemory leaves everything asleep."""
        with self._while_idle():
            self.pool.resume(woken_by(tags, self.pool.parked_tags()))
