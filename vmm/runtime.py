"""Admission, drain, park and wake of one engine process over its pools.

The states and their edges are `lifecycle`'s; the order is TensorRT-LLM's: close admission, drain, hooks, backups,
release. What fails before a change, or is undone whole, goes back to where it was; anything else ends in FAILED.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from .errors import (
    AdmissionClosed,
    AlreadyParked,
    ContentsLost,
    DrainTimeout,
    RuntimeFailed,
    TransitionInProgress,
)
from .lifecycle import MemoryEvent, MemoryState, advance
from .pool import Pool
from .tags import TRTLLM_TAGS, normalize_tags

Hook = Callable[[tuple[str, ...]], None]

DRAIN_SECONDS_DEFAULT: Final = 300.0


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """``parked_tags`` is sorted. Do not rely on it while parking or failed."""

    state: MemoryState
    parked_tags: tuple[str, ...]


class Runtime:
    """Thread-safe. `release` and `resume` block until they are done; every other call returns at once."""

    def __init__(self, pools: Pool | Sequence[Pool], *, drain_seconds_max: float | None = None) -> None:
        """``drain_seconds_max`` bounds the wait for steps in flight; 300 s unless given."""
        self.pools: tuple[Pool, ...] = (pools,) if isinstance(pools, Pool) else tuple(pools)
        if not self.pools:
            raise ValueError("pools is empty; a runtime needs at least one pool")
        self._drain_seconds_max = DRAIN_SECONDS_DEFAULT if drain_seconds_max is None else drain_seconds_max
        self._condition = threading.Condition()  # guards the four below; never held over a copy or a hook
        self._state = MemoryState.RUNNING
        self._parked_tags: frozenset[str] = frozenset()
        self._in_flight = 0
        self._failure: str | None = None
        self._release_hooks: list[Hook] = []
        self._resume_hooks: list[Hook] = []

    def on_release(self, hook: Hook) -> Hook:
        """Called with the tags after the drain, before anything changes: drop what is pending against them.

        The park may still be undone after it, so the engine must be able to go on. If it raises, nothing is released.
        """
        self._release_hooks.append(hook)
        return hook

    def on_resume(self, hook: Hook) -> Hook:
        """Called with the tags when their memory is back, before admission opens. If it raises, they stay parked."""
        self._resume_hooks.append(hook)
        return hook

    @contextmanager
    def step(self) -> Generator[None]:
        """Work on the memory belongs in here: refused with AdmissionClosed unless running, awaited by the drain."""
        with self._condition:
            if self._state is not MemoryState.RUNNING:
                raise AdmissionClosed(self._state)
            self._in_flight += 1
        try:
            yield
        finally:
            with self._condition:
                self._in_flight -= 1
                self._condition.notify_all()

    @property
    def in_flight(self) -> int:
        with self._condition:
            return self._in_flight

    def status(self) -> MemoryStatus:
        with self._condition:
            return MemoryStatus(self._state, tuple(sorted(self._parked_tags)))

    @property
    def failure(self) -> str | None:
        """Why the state is failed."""
        with self._condition:
            return self._failure

    def known_tags(self) -> tuple[str, ...]:
        """TensorRT-LLM's tags, and those in use here."""
        used = (tag for pool in self.pools for tag in (*pool.bytes_by_tag(), *pool.parked_tags()))
        return tuple(dict.fromkeys((*TRTLLM_TAGS, *used)))

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Parks the tags, all unless given. Parked ones again is no change; more than those is AlreadyParked."""
        chosen = normalize_tags(tags, self.known_tags())
        if not self._begin_park(chosen):
            return
        try:
            self._drain()
            for hook in self._release_hooks:
                hook(chosen)
            self._release_pools(chosen)
        except ContentsLost as error:
            self._fail(error)
            raise
        except BaseException:
            self._move(MemoryEvent.ABORT_PARK)
            raise
        self._move(MemoryEvent.COMPLETE_PARK, parked=frozenset(chosen))

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Wakes the tags, all parked ones unless given. Those that are not parked are no change."""
        wanted = None if tags is None else normalize_tags(tags, self.known_tags())
        waking = self._begin_wake(wanted)
        if not waking:
            return
        try:
            self._resume_pools(waking)
        except ContentsLost as error:
            self._fail(error)
            raise
        except BaseException:
            self._move(MemoryEvent.ABORT_WAKE)
            raise
        with self._condition:
            left = self._parked_tags.difference(waking)
            event = MemoryEvent.COMPLETE_WAKE_PARTLY if left else MemoryEvent.COMPLETE_WAKE
            self._state = advance(self._state, event)
            self._parked_tags = left

    def _begin_park(self, tags: tuple[str, ...]) -> bool:
        with self._condition:
            if self._state is MemoryState.PARKED:
                if self._parked_tags.issuperset(tags):
                    return False
                raise AlreadyParked(tags, self._parked_tags)
            if self._state is not MemoryState.RUNNING:
                raise self._refusal("release")
            self._state = advance(self._state, MemoryEvent.BEGIN_PARK)
            return True

    def _begin_wake(self, tags: tuple[str, ...] | None) -> tuple[str, ...]:
        with self._condition:
            if self._state is MemoryState.RUNNING:
                return ()
            if self._state is not MemoryState.PARKED:
                raise self._refusal("resume")
            waking = tuple(sorted(self._parked_tags if tags is None else self._parked_tags.intersection(tags)))
            if waking:
                self._state = advance(self._state, MemoryEvent.BEGIN_WAKE)
            return waking

    def _refusal(self, verb: str) -> RuntimeFailed | TransitionInProgress:
        text = f"Cannot {verb} memory while state is {self._state}"
        if self._state is MemoryState.FAILED:
            return RuntimeFailed(f"{text} ({self._failure}); replace the process")
        return TransitionInProgress(f"{text}; wait until it has ended")

    def _drain(self) -> None:
        deadline = time.monotonic() + self._drain_seconds_max
        with self._condition:
            while self._in_flight:
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0:
                    raise DrainTimeout(self._in_flight, self._drain_seconds_max)
                self._condition.wait(left_seconds)

    def _release_pools(self, tags: tuple[str, ...]) -> None:
        """All backups of all devices first; only then is the first byte given back."""
        self._all_or_none(lambda pool: pool.prepare_release(tags), Pool.abort_release)
        committed: list[Pool] = []
        for position, pool in enumerate(self.pools):
            try:
                pool.commit_release()
            except BaseException as error:
                for later in self.pools[position + 1 :]:
                    later.abort_release()
                self._take_back(committed, tags, error)
                raise
            committed.append(pool)

    def _take_back(self, pools: Sequence[Pool], tags: tuple[str, ...], error: BaseException) -> None:
        for pool in pools:
            try:
                pool.resume(tags)
            except Exception as second:
                error.add_note("and a device that had parked could not be woken again")
                held = pool.bytes_by_tag().keys() & set(tags)
                lost = second.lost if isinstance(second, ContentsLost) else ()
                raise ContentsLost("the park", lost=lost, parked=held.difference(lost), live=()) from second

    def _resume_pools(self, tags: tuple[str, ...]) -> None:
        self._all_or_none(lambda pool: pool.prepare_resume(tags), Pool.abort_resume)
        try:
            for hook in self._resume_hooks:
                hook(tags)
        except BaseException as error:
            self._undo_each(self.pools, Pool.abort_resume, error)
            raise
        for pool in self.pools:
            pool.commit_resume()

    def _all_or_none(self, prepare: Callable[[Pool], None], undo: Callable[[Pool], None]) -> None:
        """Prepares all devices at once. If one fails, the others are undone and its error is raised."""
        if len(self.pools) == 1:
            prepare(self.pools[0])
            return
        with ThreadPoolExecutor(len(self.pools), thread_name_prefix="lull-device") as executor:
            futures = [executor.submit(prepare, pool) for pool in self.pools]
        failures = [error for future in futures if (error := future.exception()) is not None]
        if not failures:
            return
        first = next((error for error in failures if isinstance(error, ContentsLost)), failures[0])
        prepared = [pool for pool, future in zip(self.pools, futures, strict=True) if future.exception() is None]
        self._undo_each(prepared, undo, first)
        raise first

    @staticmethod
    def _undo_each(pools: Sequence[Pool], undo: Callable[[Pool], None], error: BaseException) -> None:
        """Undoes every pool, also behind one that fails; then raises what could not be undone."""
        failures: list[ContentsLost] = []
        for pool in pools:
            try:
                undo(pool)
            except ContentsLost as second:
                failures.append(second)
        if failures:
            raise failures[0] from error

    def _move(self, event: MemoryEvent, *, parked: frozenset[str] | None = None) -> None:
        with self._condition:
            self._state = advance(self._state, event)
            if parked is not None:
                self._parked_tags = parked

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self._state = advance(self._state, MemoryEvent.FAIL)
            self._failure = str(error)
